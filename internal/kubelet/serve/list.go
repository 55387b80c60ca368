package serve

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A list is the advertised devices of one resource, over all registrations of its server. Its
// methods need the lock of Servers. Readers get immutable views without the lock.
type list struct {
	name  string
	clock clock.PassiveClock
	views *feed.Feed[*view]
	last  atomic.Pointer[pluginapi.ListAndWatchResponse] // the last one that was sent
	// changes when the last list is to be sent again, so that the kubelet writes its checkpoint
	resend *feed.Feed[uint64]

	resource resource.Resource
	// UUIDs of devices of the resource that were on offer at some time since they were added
	everOffered map[string]bool
	retiring    map[string]retiringDevice // by device ID: devices that left the plan and are still listed
	retired     bool                      // the resource left the plan for good
	units       units                     // if the devices are units of memory
	// IDs in the kubelet's list, if another process sent the list; nil if the last view was sent
	adoptedIDs map[string]bool
}

// A retiringDevice is a device that left the plan and is still listed. It is Healthy as long as the
// device counts as held and its GPU is healthy: the kubelet gives a held device to no other pod,
// and the scheduler's count of the node stays the same.
type retiringDevice struct {
	holders.State
	device      resource.Device // Healthy if Allocate gives it; only ID and UUID are known if the node does not have it
	nodes       []int64         // the NUMA nodes that kubelet has noted, if an earlier process listed it
	reason      string          // why Allocate refuses it
	offered     bool            // it is listed as Healthy
	lastOffered time.Time       // when it was on offer last; zero if it was not since it departed
	wasOffered  bool            // it was on offer until it left the plan, and may be kept
	keptOnOffer bool            // it stays on offer, and counts as held, until ApproveShrink is called
	lastGrant   time.Time       // when it was given last since it left the plan; zero if it was not
	// The device was never offered, or Allocate has given the GPU in another form since the device
	// ceased to count as held.
	gpuReassigned bool
}

// Counts reports whether the device counts as held by a pod.
func (d retiringDevice) Counts() bool { return d.keptOnOffer || d.State.Counts() }

// A view is the content of a list at one moment. It is immutable.
type view struct {
	resource  resource.Resource
	options   Options
	retiring  map[string]retiringDevice
	response  *pluginapi.ListAndWatchResponse
	refusal   string // why Allocate gives nothing in one call; empty if it may
	unoffered int    // units of well GPUs that are not on offer
}

func newList(name string, c clock.PassiveClock) *list {
	return &list{name: name, clock: c, views: feed.New(&view{response: &pluginapi.ListAndWatchResponse{}}),
		resend:      feed.New(uint64(0)),
		everOffered: map[string]bool{}, retiring: map[string]retiringDevice{}}
}

// replace applies the resource of a new plan. Devices missing from the plan begin to retire.
func (l *list) replace(r resource.Resource, h *holders.Holders) {
	for device := range l.resource.Without(r) {
		ever := l.everOffered[device.UUID]
		l.retiring[device.ID] = retiringDevice{device: device, State: h.Leaves(l.key(device.ID), ever), gpuReassigned: !ever,
			wasOffered: ever && device.Healthy && (l.units.gpu == "" || l.units.gpu == device.UUID),
			reason:     "the device is not on this node any more, or the configuration no longer offers it"}
	}
	offered := map[string]bool{}
	for _, device := range r.Devices {
		if l.everOffered[device.UUID] && !l.resource.Lacks(device.ID) {
			offered[device.UUID] = true
		}
	}
	for id, d := range l.retiring {
		if device, returns := r.Device(id); returns {
			if !d.CannotBeHeld() {
				offered[device.UUID] = true
			}
			delete(l.retiring, id)
		}
	}
	l.resource, l.everOffered = r, offered
}

// key returns the kubelet's name for a device of the list.
func (l *list) key(id string) holders.Key { return holders.Key{Resource: l.name, ID: id} }

// adopt adds the known devices that the plan lacks, as retiring, each with its NUMA nodes: if a
// list lacks the NUMA node of a device that a running pod holds, the kubelet refuses the pod at its
// next start. adopt reports whether it added devices.
func (l *list) adopt(known map[string][]int64) (changed bool) {
	for id, nodes := range known {
		_, planned := l.resource.Device(id)
		_, departing := l.retiring[id]
		if planned || departing {
			continue
		}
		l.retiring[id] = retiringDevice{device: resource.ByID(id), nodes: slices.Sorted(slices.Values(nodes)),
			State: holders.Adopted(l.clock.Now()),
			reason: "an earlier process listed the device, and it is not on this node now, cannot be read, or is not in " +
				"the configuration"}
		changed = true
	}
	if changed {
		l.adoptedIDs = make(map[string]bool, len(known))
		for id := range known {
			l.adoptedIDs[id] = true
		}
	}
	return changed
}

// drop applies new evidence and drops the retiring devices held by no pod for holders.FreeFor. It
// reports whether the checkpoint may be outdated, and whether the list or the reasons for waiting
// changed.
func (l *list) drop(a holders.Account, h *holders.Holders) (outdated, changed bool) {
	now := l.clock.Now()
	for id, d := range l.retiring {
		before := d
		outdated = outdated || a.Held[l.key(id)].CheckpointOnly
		d.State = before.Read(h, a, l.key(id), now)
		d.gpuReassigned = d.gpuReassigned && !d.State.Counts()
		dropped := d.IsOver(a.Began) && !d.keptOnOffer
		changed = changed || dropped || d.Counts() != before.Counts() ||
			d.Counts() && !d.keptOnOffer && d.WaitsFor() != before.WaitsFor()
		if l.retiring[id] = d; dropped {
			delete(l.retiring, id)
		}
	}
	return outdated, changed
}

// leaving reports whether devices are retiring. ended reports whether the list is retired and has
// no devices.
func (l *list) leaving() (departing, ended bool) {
	return len(l.retiring) > 0, l.retired && len(l.retiring) == 0
}

// retiringDevices returns the devices that left the plan and are still listed, sorted by ID.
func (l *list) retiringDevices() []RetiringDevice {
	var all []RetiringDevice
	for _, id := range slices.Sorted(maps.Keys(l.retiring)) {
		all = append(all, RetiringDevice{ID: id, Reason: l.retiring[id].reason, Waiting: l.retiring[id].WaitsFor()})
	}
	return all
}

// publish publishes a view of the resource with its holds and of the retiring devices. withheld has
// the UUIDs of the devices under a hold of Servers. Streams send a response if its pointer differs
// from the last response, so publish reuses a response with the same content.
func (l *list) publish(r resource.Resource, o Options, withheld map[string]bool) {
	l.resource = r
	before := l.views.Value()
	planned := make([]*pluginapi.Device, 0, len(before.response.Devices))
	unoffered, numa := 0, -1         // not known
	var same *pluginapi.TopologyInfo // devices share it: there may be thousands
	for device := range r.All() {
		if device.NUMANode != numa {
			same, numa = near(device, nil), device.NUMANode
		}
		if !withheld[device.UUID] {
			l.everOffered[device.UUID] = true
		}
		if r.InUnits() {
			offered := l.units.offered[len(planned)]
			if device.Healthy && !offered {
				unoffered++
			}
			device.Healthy = offered
		}
		planned = append(planned, wire(device, same))
	}
	departing := make([]*pluginapi.Device, 0, len(l.retiring))
	for _, id := range slices.Sorted(maps.Keys(l.retiring)) {
		d := l.retiring[id]
		d.device.Healthy = d.offered
		departing = append(departing, wire(d.device, near(d.device, d.nodes)))
	}
	planned = leaveRoom(planned, departing, l.listedBefore())
	l.adoptedIDs = nil
	devices := slices.Concat(planned, departing)
	response := &pluginapi.ListAndWatchResponse{Devices: devices}
	if slices.EqualFunc(devices, before.response.Devices, sameDevice) {
		response = before.response
	}
	l.views.Publish(&view{resource: r, options: o, retiring: maps.Clone(l.retiring), response: response,
		unoffered: unoffered})
}

// leaveRoom removes planned devices from the end until the list with the retiring devices is short
// enough for the kubelet. Devices in the kubelet's last list stay, because the kubelet may be
// allocating them. The removed devices are listed once retiring devices were dropped.
func leaveRoom(planned, departing []*pluginapi.Device, listed func(id string) bool) []*pluginapi.Device {
	excess := proto.Size(&pluginapi.ListAndWatchResponse{Devices: planned}) +
		proto.Size(&pluginapi.ListAndWatchResponse{Devices: departing}) - resource.MaxList
	for i := len(planned) - 1; i >= 0 && excess > 0; i-- {
		if !listed(planned[i].GetID()) {
			excess -= proto.Size(&pluginapi.ListAndWatchResponse{Devices: planned[i : i+1]})
			planned = slices.Delete(planned, i, i+1)
		}
	}
	return planned
}

// listedBefore returns a function that reports whether the list last received by the kubelet has a
// device.
func (l *list) listedBefore() func(id string) bool {
	ids := l.adoptedIDs
	return func(id string) bool {
		if ids == nil { // needed only if a list is too long
			ids = map[string]bool{}
			for _, d := range l.views.Value().response.Devices {
				ids[d.GetID()] = true
			}
		}
		return ids[id]
	}
}

// wire translates a device into the kubelet's API.
func wire(d resource.Device, near *pluginapi.TopologyInfo) *pluginapi.Device {
	w := &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy, Topology: near}
	if d.Healthy {
		w.Health = pluginapi.Healthy
	}
	return w
}

// near returns the given NUMA nodes, or else the NUMA node of the device, in the kubelet's API. It
// returns nil if there are none.
func near(d resource.Device, nodes []int64) (t *pluginapi.TopologyInfo) {
	if len(nodes) == 0 && d.NUMANode >= 0 { // negative: not known
		nodes = []int64{int64(d.NUMANode)}
	}
	for _, node := range nodes {
		if t == nil {
			t = &pluginapi.TopologyInfo{}
		}
		t.Nodes = append(t.Nodes, &pluginapi.NUMANode{ID: node})
	}
	return t
}

func sameDevice(a, b *pluginapi.Device) bool {
	if a.ID != b.ID || a.Health != b.Health {
		return false
	}
	return slices.EqualFunc(a.GetTopology().GetNodes(), b.GetTopology().GetNodes(),
		func(a, b *pluginapi.NUMANode) bool { return a.ID == b.ID })
}

// healthy returns the IDs listed as Healthy, in the order of the list.
func (v *view) healthy() []string { return healthyIDs(v.response) }

func healthyIDs(r *pluginapi.ListAndWatchResponse) []string {
	var ids []string
	for _, d := range r.Devices {
		if d.Health == pluginapi.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}
