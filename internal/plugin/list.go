package plugin

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

const (
	// departureNotice is how long a device that left the plan, and that no pod holds, stays listed as Unhealthy. An ID that
	// vanishes while kubelet allocates it makes kubelet crash (nil dereference in the device manager of 1.36 and 1.37);
	// an admission takes kubelet far less than this.
	departureNotice = 10 * time.Second
	// departureLimit is how long such a device stays listed where kubelet's account cannot be asked who holds it.
	departureLimit = 5 * time.Minute
)

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
	retired   bool                 // the resource left the plan for good
}

// A departure is a device on its way out of the list.
type departure struct {
	listed *pluginapi.Device // as it is listed until then
	reason string            // why it cannot be given out
	wanted time.Time         // when it left the plan, or was last known to be held by a pod
	free   time.Time         // since when kubelet's account shows no holder; zero before
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
		departing: map[string]departure{}}
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
			l.departLocked(wire(device), "the device is not on this node any more, or the configuration no longer offers it")
		}
	}
	for _, device := range r.Devices {
		delete(l.departing, device.ID)
	}
	l.resource = r
	l.publishLocked()
}

// adopt lists devices that kubelet knows and the plan does not, as departing: an earlier process offered them.
func (l *list) adopt(ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		_, planned := l.resource.Device(id)
		_, departing := l.departing[id]
		if !planned && !departing {
			l.departLocked(&pluginapi.Device{ID: id, Health: pluginapi.Unhealthy},
				"kubelet remembers the device from before this process started, and it is not on this node now")
		}
	}
	l.publishLocked()
}

func (l *list) departLocked(listed *pluginapi.Device, reason string) {
	l.departing[listed.ID] = departure{listed: listed, reason: reason, wanted: l.clock.Now()}
}

// reap drops the departing devices whose time has come: nobody has held them for a while, as far as held can tell. A nil
// held means that kubelet's account could not be asked. One answer is not enough: a kubelet that just started knows of no
// pod yet.
func (l *list) reap(held func(id string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	for id, d := range l.departing {
		gone := false
		switch {
		case held == nil:
			gone = now.Sub(d.wanted) >= departureLimit
		case held(id):
			d.wanted, d.free = now, time.Time{}
		case d.free.IsZero():
			d.free = now
		default:
			gone = now.Sub(d.free) >= departureNotice
		}
		l.departing[id] = d
		if gone {
			delete(l.departing, id)
		}
	}
	l.publishLocked()
}

// leaving reports whether devices are departing, and ended whether the list was retired and all of them are gone.
func (l *list) leaving() (departing, ended bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.departing) > 0, l.retired && len(l.departing) == 0
}

// resend has every stream send the list once more although it says nothing new.
func (l *list) resend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	current := *l.views.Value()
	current.response = &pluginapi.ListAndWatchResponse{Devices: current.response.Devices}
	l.views.Publish(&current)
}

// publishLocked publishes the view that the fields make. Streams send what differs by pointer, so a response that says
// the same as the one before is kept.
func (l *list) publishLocked() {
	devices := make([]*pluginapi.Device, 0, len(l.resource.Devices)+len(l.departing))
	for _, device := range l.resource.Devices {
		devices = append(devices, wire(device))
	}
	if len(l.departing) > 0 {
		for _, d := range l.departing {
			devices = append(devices, d.listed)
		}
		slices.SortStableFunc(devices[len(l.resource.Devices):], func(a, b *pluginapi.Device) int {
			return strings.Compare(a.ID, b.ID)
		})
	}
	before := l.views.Value()
	response := &pluginapi.ListAndWatchResponse{Devices: devices}
	if slices.EqualFunc(devices, before.response.Devices, sameDevice) {
		response = before.response
	}
	l.views.Publish(&view{resource: l.resource, options: l.options, departing: maps.Clone(l.departing), response: response})
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
	if a.ID != b.ID || a.Health != b.Health || (a.Topology == nil) != (b.Topology == nil) {
		return false
	}
	return a.Topology == nil || a.Topology.Nodes[0].ID == b.Topology.Nodes[0].ID
}

// healthy returns the IDs that the view lists as Healthy, in the order of the list.
func (v *view) healthy() []string {
	var ids []string
	for _, d := range v.response.Devices {
		if d.Health == pluginapi.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}
