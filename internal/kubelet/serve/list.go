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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// freeFor is how long it must be known that no pod holds a device that left the plan, before the
// list drops the device. Kubelet crashes when the last list does not have a device that it is
// allocating or that a pod holds. While kubelet is allocating a device, its checkpoint does not yet
// say that a pod holds it; that takes much less than freeFor.
const freeFor = 10 * time.Second

// A list is what one resource advertises, over all lives of its server. Its methods need the lock
// of the Set; readers get immutable views without it.
type list struct {
	name  string
	clock clock.PassiveClock
	views *feed.Feed[*view]
	last  atomic.Pointer[pluginapi.ListAndWatchResponse] // the last one that was sent
	// changes when the last list is to be sent again, for kubelet to write its checkpoint
	again *feed.Feed[uint64]

	resource  resource.Resource
	offered   map[string]bool      // UUIDs of devices of the resource that were not withheld at some time since they came
	departing map[string]departure // by device ID: devices that left the plan and are still listed
	allocated map[string]time.Time // by device ID: the last Allocate, if it was within freeFor
	retired   bool                 // the resource left the plan for good
	units     units                // if the devices are units of memory
	// IDs that kubelet has in its list, if another process sent that; nil if it was the last view
	adopted map[string]bool
}

// A departure is a device that left the plan and is still listed. It is Healthy as long as it
// counts as held and its GPU is well: kubelet gives it to nobody while a pod holds it, and the
// node's count stays what the scheduler knows.
type departure struct {
	possession
	device    resource.Device // Healthy if Allocate gives it; only ID and UUID are known if the node does not have it
	nodes     []int64         // the NUMA nodes that kubelet has noted, if an earlier process listed it
	reason    string          // why Allocate refuses it
	offered   bool            // it is listed as Healthy
	withdrawn time.Time       // when it was on offer last; zero if it was not since it departed
	left      bool            // it was on offer until it left the plan, and may be kept
	kept      bool            // it stays on offer, and counts as held, until Proceed is called
	given     time.Time       // when it was given last since it left the plan; zero if it was not
	// it was never offered, or since it ceased to count, Allocate has given the GPU in another form
	taken bool
}

// counts reports whether the device counts as held by a pod.
func (d departure) counts() bool { return d.kept || d.possession.counts() }

// A view is what a list says at one moment. It is immutable.
type view struct {
	resource  resource.Resource
	options   Options
	departing map[string]departure
	response  *pluginapi.ListAndWatchResponse
	refusal   string // why Allocate gives nothing in one call; empty if it may
	unoffered int    // units of well GPUs that are not on offer
}

func newList(name string, c clock.PassiveClock) *list {
	return &list{name: name, clock: c, views: feed.New(&view{response: &pluginapi.ListAndWatchResponse{}}),
		again:   feed.New(uint64(0)),
		offered: map[string]bool{}, departing: map[string]departure{}, allocated: map[string]time.Time{}}
}

// replace takes in what the plan has of the resource now. Devices that the plan no longer has begin
// to depart.
func (l *list) replace(r resource.Resource) {
	for device := range l.resource.Without(r) {
		d := departure{device: device, possession: possession{allocated: l.allocated[device.ID], waits: waitsForReading},
			left:   l.offered[device.UUID] && device.Healthy && (l.units.gpu == "" || l.units.gpu == device.UUID),
			reason: "the device is not on this node any more, or the configuration no longer offers it"}
		if !l.offered[device.UUID] {
			d.holding, d.taken = unheld, true
		}
		l.departing[device.ID] = d
	}
	offered := map[string]bool{}
	for _, device := range r.Devices {
		if l.offered[device.UUID] && !l.resource.Lacks(device.ID) {
			offered[device.UUID] = true
		}
	}
	for id, d := range l.departing {
		if device, returns := r.Device(id); returns {
			if !d.cannotBeHeld() {
				offered[device.UUID] = true
			}
			delete(l.departing, id)
		}
	}
	l.resource, l.offered = r, offered
}

// waitsForReading is why a device is still listed before the first reading.
const waitsForReading = "kubelet's checkpoint was not read since the device left the plan"

// adopt adds the known devices that the plan does not have, as departing, each with its NUMA nodes:
// if a list has no NUMA node of a device that a running pod holds, kubelet refuses the pod at its
// next start. It reports whether there are any.
func (l *list) adopt(known map[string][]int64) (changed bool) {
	for id, nodes := range known {
		_, planned := l.resource.Device(id)
		_, departing := l.departing[id]
		if planned || departing {
			continue
		}
		l.departing[id] = departure{device: resource.ByID(id), nodes: slices.Sorted(slices.Values(nodes)),
			possession: possession{allocated: l.clock.Now(), waits: waitsForReading},
			reason:     "an earlier process listed the device, and it is not on this node now, cannot be read, or is not in the configuration"}
		changed = true
	}
	if changed {
		l.adopted = make(map[string]bool, len(known))
		for id := range known {
			l.adopted[id] = true
		}
	}
	return changed
}

// drop takes in new evidence and drops the departing devices that no pod has held for freeFor. It
// reports whether the checkpoint may be outdated, and whether the list or what its devices wait for
// changed. silent says that kubelet's accounts cannot be read for so long that it counts.
func (l *list) drop(e evidence, silent bool) (outdated, changed bool) {
	now := l.clock.Now()
	for id, d := range l.departing {
		before := d
		holder, named := e.held[deviceKey{l.name, id}]
		outdated = outdated || named && holder.checkpointOnly
		d.possession = before.read(e, holder, named, silent, now)
		dropped := d.over(e.began) && !d.kept
		changed = changed || dropped || d.counts() != before.counts() || d.counts() && !d.kept && d.waits != before.waits
		if l.departing[id] = d; dropped {
			delete(l.departing, id)
		}
	}
	return outdated, changed
}

// leaving reports whether devices are departing, and as ended whether the list is retired and has
// none.
func (l *list) leaving() (departing, ended bool) {
	return len(l.departing) > 0, l.retired && len(l.departing) == 0
}

// departures returns the devices that left the plan and are still listed, by ID.
func (l *list) departures() []Departing {
	var all []Departing
	for _, id := range slices.Sorted(maps.Keys(l.departing)) {
		all = append(all, Departing{ID: id, Reason: l.departing[id].reason, Waiting: l.departing[id].waits})
	}
	return all
}

// publish publishes a view: the resource with the holds on it, of which withheld says which devices
// are under a hold of the Set, by UUID, and the departing devices. Streams send a response if its
// pointer differs from the last one, so a response with the same content is kept.
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
			l.offered[device.UUID] = true
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
	departing := make([]*pluginapi.Device, 0, len(l.departing))
	for _, id := range slices.Sorted(maps.Keys(l.departing)) {
		d := l.departing[id]
		d.device.Healthy = d.offered
		departing = append(departing, wire(d.device, near(d.device, d.nodes)))
	}
	planned = leaveRoom(planned, departing, l.listedBefore())
	l.adopted = nil
	devices := slices.Concat(planned, departing)
	response := &pluginapi.ListAndWatchResponse{Devices: devices}
	if slices.EqualFunc(devices, before.response.Devices, sameDevice) {
		response = before.response
	}
	l.views.Publish(&view{resource: r, options: o, departing: maps.Clone(l.departing), response: response,
		unoffered: unoffered})
}

// leaveRoom removes planned devices from the end, until a list with the departing ones is not too
// long for kubelet. Devices that kubelet has in its last list stay: it may be allocating them. The
// removed devices are listed once departing ones were dropped.
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

// listedBefore returns a function that reports whether a device is in the list that kubelet
// received last.
func (l *list) listedBefore() func(id string) bool {
	ids := l.adopted
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

// wire translates a device into kubelet's words.
func wire(d resource.Device, near *pluginapi.TopologyInfo) *pluginapi.Device {
	w := &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy, Topology: near}
	if d.Healthy {
		w.Health = pluginapi.Healthy
	}
	return w
}

// near returns the NUMA nodes of a device in kubelet's words: those given, if there are any. It is
// nil if there are none.
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

// healthy returns the IDs that the view lists as Healthy, in the order of the list.
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
