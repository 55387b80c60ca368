package serve

import (
	"slices"
	"sync/atomic"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A list publishes the devices of one resource to the streams of all registrations of its server.
type list struct {
	name  string
	views *feed.Feed[*view]
	last  atomic.Pointer[pluginapi.ListAndWatchResponse] // the last response that was sent
	// changes when the last list is to be sent again, so that the kubelet writes its checkpoint
	resend *feed.Feed[uint64]
}

// A view is the content of a list at one moment. It is immutable.
type view struct {
	listing.List
	options  Options
	response *pluginapi.ListAndWatchResponse
}

func newList(name string) *list {
	none := listing.List{Resource: resource.Resource{Name: name}}
	return &list{name: name, resend: feed.New(uint64(0)),
		views: feed.New(&view{List: none, response: &pluginapi.ListAndWatchResponse{}})}
}

// publish publishes a view. Streams send a response if its pointer differs from the
// last response, so publish reuses a response with the same content.
func (l *list) publish(devices listing.List, o Options) {
	before := l.views.Value()
	response := before.response
	if !devices.Same(before.List) {
		response = responseOf(devices)
	}
	l.views.Publish(&view{List: devices, options: o, response: response})
}

// responseOf translates a list into the kubelet's API.
func responseOf(l listing.List) *pluginapi.ListAndWatchResponse {
	response := &pluginapi.ListAndWatchResponse{Devices: make([]*pluginapi.Device, 0, len(l.Entries))}
	var nodes []int64
	var near *pluginapi.TopologyInfo // devices share it: there may be thousands
	for _, d := range l.Entries {
		if !slices.Equal(d.Nodes, nodes) {
			nodes, near = d.Nodes, topologyOf(d.Nodes)
		}
		w := &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy, Topology: near}
		if d.Healthy {
			w.Health = pluginapi.Healthy
		}
		response.Devices = append(response.Devices, w)
	}
	return response
}

// topologyOf returns NUMA nodes in the kubelet's API; nil if there are none.
func topologyOf(nodes []int64) (t *pluginapi.TopologyInfo) {
	for _, node := range nodes {
		if t == nil {
			t = &pluginapi.TopologyInfo{}
		}
		t.Nodes = append(t.Nodes, &pluginapi.NUMANode{ID: node})
	}
	return t
}

func healthyIDs(r *pluginapi.ListAndWatchResponse) []string {
	var ids []string
	for _, d := range r.Devices {
		if d.Health == pluginapi.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}
