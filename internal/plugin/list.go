package plugin

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// departureNotice is how long there must be no doubt that no pod holds a device which left the plan, before it leaves the list.
// Kubelet reads a device that it allocates, or that a pod holds, from the last list without a look whether it is there (the
// device manager of 1.36 and 1.37 crashes then). It does so before it says in its accounts that a pod holds the device; an
// admission takes far less than this.
const departureNotice = 10 * time.Second

// A list is what one resource advertises, over all lives of its server. Its methods may be called at any time from any
// goroutine; readers get immutable views.
type list struct {
	name  string
	clock clock.PassiveClock
	views *feed.Feed[*view]

	mu        sync.Mutex // guards all following fields
	resource  resource.Resource
	options   Options
	departing map[string]departure // by device ID: devices that left the plan and are still listed
	allocated map[string]time.Time // by device ID: when kubelet asked for it, where that is not longer ago than departureNotice
	retired   bool                 // the resource left the plan for good
}

// A departure is a device that left the plan and is still listed, as Unhealthy.
type departure struct {
	device    resource.Device // with its ID alone if an earlier process had listed it
	listed    *pluginapi.Device
	reason    string    // why it cannot be given out
	allocated time.Time // when kubelet may have given it to a pod at the latest; the pod may not be in kubelet's accounts yet
	free      time.Time // since when there is no doubt that no pod holds it; zero while there is
	kubelet   uint64    // incarnation of the kubelet of which that is known
	waits     string    // why it is still listed
	known     bool      // a pod is known to hold it
	counts    bool      // it counted as held when the accounts were read last
}

// held reports whether a pod holds the device, as far as is known.
func (d departure) held(now time.Time) bool {
	return d.free.IsZero() || now.Sub(d.allocated) < departureNotice
}

// A view is what a list says at one moment. It is immutable.
type view struct {
	resource  resource.Resource
	options   Options
	departing map[string]departure
	response  *pluginapi.ListAndWatchResponse
}

func newList(name string, c clock.PassiveClock) *list {
	return &list{name: name, clock: c, views: feed.New(&view{response: &pluginapi.ListAndWatchResponse{}}),
		departing: map[string]departure{}, allocated: map[string]time.Time{}}
}

// set makes the list say what the plan says of the resource now. Devices that the plan no longer has begin to depart; set
// reports whether there are any.
func (l *list) set(r resource.Resource, o Options) (departs bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.retired = false
	l.options = o
	return l.replaceLocked(r)
}

// clear takes all devices out of the plan: they begin to depart, and clear reports whether there are any. If retire is set, the
// list is to end when they are gone.
func (l *list) clear(retire bool) (departs bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.retired = l.retired || retire
	return l.replaceLocked(resource.Resource{Name: l.name})
}

func (l *list) replaceLocked(r resource.Resource) (departs bool) {
	for _, device := range l.resource.Devices {
		if _, stays := r.Device(device.ID); !stays {
			device.Healthy = false
			l.departing[device.ID] = departure{device: device, listed: wire(device), allocated: l.allocated[device.ID],
				reason: "the device is not on this node any more, or the configuration no longer offers it", waits: waitsForAccount, counts: true}
			departs = true
		}
	}
	for _, device := range r.Devices {
		delete(l.departing, device.ID)
	}
	l.resource = r
	l.publishLocked(l.listedBefore())
	return departs
}

// waitsForAccount is why a device is still listed before kubelet's accounts were read.
const waitsForAccount = "kubelet's account was not read since the device left the plan"

// allocating returns the view by which a call of Allocate for these devices is answered. From now on they count as held.
func (l *list) allocating(request *pluginapi.AllocateRequest) *view {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	maps.DeleteFunc(l.allocated, func(_ string, at time.Time) bool { return now.Sub(at) >= departureNotice })
	for _, container := range request.GetContainerRequests() {
		for _, id := range container.GetDevicesIds() {
			if _, planned := l.resource.Device(id); planned {
				l.allocated[id] = now
			}
		}
	}
	return l.views.Value()
}

// adopt lists devices that kubelet knows and that left the plan before this process began, each with the NUMA nodes that
// kubelet has noted for it: without them, kubelet refuses a running pod that holds the device when it starts again. It reports
// whether there are any.
func (l *list) adopt(known map[string][]int64) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, nodes := range known {
		_, planned := l.resource.Device(id)
		_, departing := l.departing[id]
		if planned || departing {
			continue
		}
		listed := &pluginapi.Device{ID: id, Health: pluginapi.Unhealthy}
		for _, node := range slices.Sorted(slices.Values(nodes)) {
			if listed.Topology == nil {
				listed.Topology = &pluginapi.TopologyInfo{}
			}
			listed.Topology.Nodes = append(listed.Topology.Nodes, &pluginapi.NUMANode{ID: node})
		}
		l.departing[id] = departure{device: resource.Device{ID: id}, listed: listed, allocated: l.clock.Now(),
			reason: "kubelet knows the device from before this process started, and the configuration does not offer it now",
			waits:  waitsForAccount, counts: true}
		changed = true
	}
	if changed {
		l.publishLocked(func(id string) bool { _, listed := known[id]; return listed })
	}
	return changed
}

// claims returns the devices of the list that the resource r of a plan does not have and that count as held. If known is set,
// devices of which nothing is known are left out.
func (l *list) claims(r resource.Resource, known bool) []resource.Claim {
	l.mu.Lock()
	defer l.mu.Unlock()
	var claims []resource.Claim
	now := l.clock.Now()
	for _, d := range l.resource.Devices {
		allocated := now.Sub(l.allocated[d.ID]) < departureNotice
		if _, stays := r.Device(d.ID); !stays && (!known || allocated) {
			claims = append(claims, resource.Claim{Resource: l.name, ID: d.ID, GPU: d.GPU, Reason: waitsForAccount})
		}
	}
	for id, d := range l.departing {
		_, returns := r.Device(id)
		if held := d.known || now.Sub(d.allocated) < departureNotice; !returns && d.held(now) && (!known || held) {
			claims = append(claims, resource.Claim{Resource: l.name, ID: id, GPU: d.device.GPU, Reason: d.waits})
		}
	}
	return claims
}

// reap drops the departing devices of which there was no doubt for long enough that no pod holds them. It reports whether it
// would help to have kubelet save again who holds devices, and whether other devices count as held than before, or for other
// reasons.
func (l *list) reap(e evidence) (doubtful, changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	dropped := false
	for id, d := range l.departing {
		holder, held := e.held[deviceKey{l.name, id}]
		d.known = held
		before := d.waits
		switch {
		case held:
			d.free, d.waits = time.Time{}, heldBy(holder.pod)
			doubtful = doubtful || holder.savedOnly
		case e.gap != "":
			d.free, d.waits = time.Time{}, e.gap
		case d.free.IsZero() || d.kubelet != e.kubelet:
			d.free, d.kubelet = now, e.kubelet
		}
		counts := d.held(now)
		if counts && !d.free.IsZero() {
			d.waits = "kubelet may have given it to a pod within the last " + departureNotice.String()
		} else if !counts {
			d.waits = "no pod holds it; it is dropped when that has been so for " + departureNotice.String()
		}
		changed = changed || counts != d.counts || counts && d.waits != before
		d.counts = counts
		l.departing[id] = d
		if !counts && now.Sub(d.free) >= departureNotice {
			delete(l.departing, id)
			dropped = true
		}
	}
	if dropped {
		l.publishLocked(l.listedBefore())
	}
	return doubtful, changed
}

// leaving reports whether devices are departing, and ended whether the list was retired and all of them are gone.
func (l *list) leaving() (departing, ended bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.departing) > 0, l.retired && len(l.departing) == 0
}

// departures returns the devices that left the plan and are still listed, by ID.
func (l *list) departures() []Departing {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Departing
	for _, id := range slices.Sorted(maps.Keys(l.departing)) {
		all = append(all, Departing{ID: id, Reason: l.departing[id].reason, Waiting: l.departing[id].waits})
	}
	return all
}

// resend has every stream send the list once more although it says nothing new: kubelet saves who holds devices when it
// receives a list. It is no answer to an account that differs from the list.
func (l *list) resend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	current := *l.views.Value()
	current.response = &pluginapi.ListAndWatchResponse{Devices: current.response.Devices}
	l.views.Publish(&current)
}

// publishLocked publishes the view that the fields make. Streams send what differs by pointer, so a response that says
// the same as the one before is kept. Kubelet knows the devices of which listed says so.
func (l *list) publishLocked(listed func(id string) bool) {
	planned := make([]*pluginapi.Device, 0, len(l.resource.Devices)+len(l.departing))
	for _, device := range l.resource.Devices {
		planned = append(planned, wire(device))
	}
	departing := make([]*pluginapi.Device, 0, len(l.departing))
	for _, d := range l.departing {
		departing = append(departing, d.listed)
	}
	slices.SortFunc(departing, func(a, b *pluginapi.Device) int { return strings.Compare(a.ID, b.ID) })
	if len(departing) > 0 { // what the plan offers fits into a list of its own
		planned = leaveRoom(planned, departing, listed)
	}
	devices := slices.Concat(planned, departing)
	before := l.views.Value()
	response := &pluginapi.ListAndWatchResponse{Devices: devices}
	if slices.EqualFunc(devices, before.response.Devices, sameDevice) {
		response = before.response
	}
	l.views.Publish(&view{resource: l.resource, options: l.options, departing: maps.Clone(l.departing), response: response})
}

// leaveRoom returns the planned devices without so many of the last ones that kubelet accepts a list of them and of the departing
// ones. A device that kubelet knows already stays: it may be allocating it. The others are listed when devices were dropped.
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

// listedBefore returns what reports whether the last list names a device.
func (l *list) listedBefore() func(id string) bool {
	var ids map[string]bool
	return func(id string) bool {
		if ids == nil { // only needed for a list that is too long
			ids = map[string]bool{}
			for _, d := range l.views.Value().response.Devices {
				ids[d.GetID()] = true
			}
		}
		return ids[id]
	}
}

// wire translates a device into kubelet's words.
func wire(d resource.Device) *pluginapi.Device {
	w := &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy}
	if d.Healthy {
		w.Health = pluginapi.Healthy
	}
	if d.NUMANode >= 0 { // negative: not known
		w.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(d.NUMANode)}}}
	}
	return w
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
