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

// freeFor is how long it must be known that no pod holds a device that left the plan, before the list drops the device. Kubelet
// crashes when the last list does not have a device that it is allocating or that a pod holds. While kubelet is allocating a
// device, its checkpoint does not yet say that a pod holds it; that takes much less than freeFor.
const freeFor = 10 * time.Second

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
	allocated map[string]time.Time // by device ID: the last Allocate, if it was within freeFor
	retired   bool                 // the resource left the plan for good
}

// A departure is a device that left the plan and is still listed, as Unhealthy.
type departure struct {
	device    resource.Device // only its ID is set if an earlier process listed it
	listed    *pluginapi.Device
	reason    string    // why Allocate refuses it
	allocated time.Time // the last possible Allocate
	free      time.Time // since when it is known that no pod holds it; zero if that is not known
	kubelet   uint64    // incarnation of kubelet since free
	waits     string    // why it is still listed
	known     bool      // it is known that a pod holds it
	counts    bool      // whether it counted as held at the last reading
}

// held reports whether the device counts as held by a pod: it is not known that no pod holds it, or Allocate was a short time ago.
func (d departure) held(now time.Time) bool {
	return d.free.IsZero() || now.Sub(d.allocated) < freeFor
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

// set makes the list say what the plan says of the resource now. Devices that the plan no longer has begin to depart.
func (l *list) set(r resource.Resource, o Options) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.retired = false
	l.options = o
	l.replaceLocked(r)
}

// clear takes all devices out of the plan: they begin to depart. If retire is set, the list is to end when they are gone.
func (l *list) clear(retire bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.retired = l.retired || retire
	l.replaceLocked(resource.Resource{Name: l.name})
}

func (l *list) replaceLocked(r resource.Resource) {
	for _, device := range l.resource.Devices {
		if _, stays := r.Device(device.ID); !stays {
			device.Healthy = false
			l.departing[device.ID] = departure{device: device, listed: wire(device), allocated: l.allocated[device.ID],
				reason: "the device is not on this node any more, or the configuration no longer offers it", waits: waitsForReading, counts: true}
		}
	}
	for _, device := range r.Devices {
		delete(l.departing, device.ID)
	}
	l.resource = r
	l.publishLocked(l.listedBefore())
}

// waitsForReading is why a device is still listed before the first reading.
const waitsForReading = "kubelet's checkpoint was not read since the device left the plan"

// allocating returns the view for the answer to a call of Allocate. The devices of the call count as held from now on.
func (l *list) allocating(request *pluginapi.AllocateRequest) *view {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	maps.DeleteFunc(l.allocated, func(_ string, at time.Time) bool { return now.Sub(at) >= freeFor })
	for _, container := range request.GetContainerRequests() {
		for _, id := range container.GetDevicesIds() {
			if _, planned := l.resource.Device(id); planned {
				l.allocated[id] = now
			}
		}
	}
	return l.views.Value()
}

// adopt adds the known devices that the plan does not have, as departing, each with its NUMA nodes: if a list has no NUMA node of
// a device that a running pod holds, kubelet refuses the pod at its next start. It reports whether there are any.
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
			reason: "an earlier process listed the device, and the configuration does not offer it now",
			waits:  waitsForReading, counts: true}
		changed = true
	}
	if changed {
		l.publishLocked(func(id string) bool { _, listed := known[id]; return listed })
	}
	return changed
}

// claims returns the devices of the list that the resource r of a plan does not have and that count as held. If known is set,
// it returns only devices that are known to be held, or for which Allocate was a short time ago.
func (l *list) claims(r resource.Resource, known bool) []resource.Claim {
	l.mu.Lock()
	defer l.mu.Unlock()
	var claims []resource.Claim
	now := l.clock.Now()
	for _, d := range l.resource.Devices {
		allocated := now.Sub(l.allocated[d.ID]) < freeFor
		if _, stays := r.Device(d.ID); !stays && (!known || allocated) {
			claims = append(claims, resource.Claim{Resource: l.name, ID: d.ID, GPU: d.GPU, Reason: waitsForReading})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.departing)) {
		d := l.departing[id]
		_, returns := r.Device(id)
		if held := d.known || now.Sub(d.allocated) < freeFor; !returns && d.held(now) && (!known || held) {
			claims = append(claims, resource.Claim{Resource: l.name, ID: id, GPU: d.device.GPU, Reason: d.waits})
		}
	}
	return claims
}

// drop takes in new evidence and drops the departing devices that no pod has held for freeFor. It reports whether the checkpoint
// may be outdated, and whether the result of claims changed.
func (l *list) drop(e evidence) (outdated, changed bool) {
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
			outdated = outdated || holder.checkpointOnly
		case e.gap != "":
			d.free, d.waits = time.Time{}, e.gap
		case d.free.IsZero() || d.kubelet != e.kubelet:
			d.free, d.kubelet = now, e.kubelet
		}
		counts := d.held(now)
		if counts && !d.free.IsZero() {
			d.waits = "kubelet may have allocated it within the last " + freeFor.String()
		} else if !counts {
			d.waits = "no pod holds it; it is dropped after " + freeFor.String()
		}
		changed = changed || counts != d.counts || counts && d.waits != before
		d.counts = counts
		l.departing[id] = d
		if !counts && now.Sub(d.free) >= freeFor {
			delete(l.departing, id)
			dropped = true
		}
	}
	if dropped {
		l.publishLocked(l.listedBefore())
	}
	return outdated, changed
}

// leaving reports whether devices are departing, and as ended whether the list is retired and has none.
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

// resend has every stream send the same list again, so that kubelet writes its checkpoint. It must not be used because kubelet's
// account differs from the list.
func (l *list) resend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	current := *l.views.Value()
	current.response = &pluginapi.ListAndWatchResponse{Devices: current.response.Devices}
	l.views.Publish(&current)
}

// publishLocked publishes a view of the fields. Streams send a response if its pointer differs from the last one, so a
// response with the same content is kept. listed reports whether kubelet has a device in its last list.
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
	if len(departing) > 0 { // without departing devices, package resource has made sure that the list fits
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

// leaveRoom removes planned devices from the end, until a list with the departing ones is not too long for kubelet. Devices that
// kubelet has in its last list stay: it may be allocating them. The removed devices are listed once departing ones were dropped.
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
