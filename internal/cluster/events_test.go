package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// held is a device that a pod holds.
func held(id, pod string) kubelet.HeldDevice {
	return kubelet.HeldDevice{Resource: "nvidia.com/gpu", ID: id, Pod: pod}
}

// about says what Events are about, sorted.
func (s *stage) about() []string {
	var all []string
	for _, e := range s.server.Events() {
		all = append(all, fmt.Sprintf("%s %s/%s", e.Regarding.Kind, e.Regarding.Namespace, e.Regarding.Name))
	}
	slices.Sort(all)
	return all
}

func (s *stage) untilAbout(want ...string) {
	s.Helper()
	s.until(fmt.Sprint("Events about ", want), func() bool { return cmp.Equal(want, s.about()) })
}

// The pods that hold the device, or a part of it, get the Event too; one whose namespace refuses it
// keeps nothing from being written.
func TestPodEvents(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Live: config.Live{Features: everything}})
		p.configure(func(c *config.Config) { c.Features.PodEvents = true })
		p.Held = func(context.Context) ([]kubelet.HeldDevice, error) {
			return []kubelet.HeldDevice{held("GPU-0::1", "a/one"), held("MIG-0", "b/two"), held("GPU-1", "c/three")}, nil
		}
		p.Checkpoint = func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Held: []kubelet.HeldDevice{
				held("GPU-0::1", "with UID 1"), held("MIG-0", "with UID 2"), held("GPU-1", "with UID 3"), held("GPU-1",
					"with UID 4"),
			}}, nil
		}
		part := gpu(0, good)
		part.UUID, part.GPU = "MIG-0", "GPU-0"
		p.gpus(gpu(0, good), part, gpu(1, good))
		p.start()
		s.untilCondition("True")
		p.gpus(gpu(0, bad), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Pod a/one", "Pod b/two") // whose UID is 3 or 4 cannot be told

		// fails has creations of Events fail from the second one on, which is of the first pod, for some
		// times.
		fails := func(times int64) {
			var creations atomic.Int64
			s.server.SetFault(apiserver.Fault{Status: 503, Only: func(r apiserver.Request) bool {
				n := creations.Load()
				if r.Verb == "create" && r.Resource == "events" {
					n = creations.Add(1)
				}
				return n > 1 && n <= 1+times
			}})
		}
		// The API server goes away between the Event of the node and those of its pods, and comes back.
		fails(9)
		p.gpus(gpu(0, good), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two", "Pod b/two")

		// One namespace does not answer: the other one gets its Event.
		fails(10)
		p.gpus(gpu(0, gone), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two",
			"Pod b/two", "Pod b/two")
		s.until("the one that is not written is counted", func() bool { return p.drops("refused") == 1 })
	})
}

// The pods that have the device by a claim get the Event, with the UIDs by which the claim is
// reserved for them. A claim that was created again since it was prepared is of other pods.
func TestPodEventsByClaim(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Live: config.Live{Features: config.Features{Events: true, PodEvents: true}}})
		uids := map[string]string{}
		for _, name := range []string{"one", "again"} {
			err := s.server.ChangeClaim("ns", name, func(c *resourceapi.ResourceClaim) {
				c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
					{Resource: "pods", Name: name + "-a", UID: types.UID("uid-a")}, {Resource: "pods", Name: name + "-b",
						UID: types.UID("uid-b")},
					{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: "uid-c"},
				}
			})
			if err != nil {
				s.Fatal(err)
			}
			c, err := s.server.Claim("ns", name)
			if err != nil {
				s.Fatal(err)
			}
			uids[name] = string(c.UID)
		}
		p.ClaimsOf = func(devices []string) []dra.Claim {
			if !slices.Equal(devices, []string{"GPU-0"}) {
				s.Errorf("asked for claims of %v", devices)
			}
			return []dra.Claim{{Namespace: "ns", Name: "one", UID: uids["one"]}, {Namespace: "ns", Name: "again", UID: "before"}}
		}
		p.gpus(gpu(0, bad))
		p.start()
		s.untilAbout("Node /node-1", "Pod ns/one-a", "Pod ns/one-b")
	})
}

// A device that is shared by very many pods: a few of them are told. None is while one of kubelet's
// accounts is missing.
func TestPodEventsOfASharedDevice(t *testing.T) {
	for name, tt := range map[string]struct {
		named, recorded error
		want            int
	}{"both accounts": {want: 16}, "no PodResources": {named: errors.New("away")}, "no checkpoint": {recorded: errors.New("away")}} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				var names, records []kubelet.HeldDevice
				for i := range 40 {
					id := fmt.Sprint("GPU-0::", i)
					names = append(names, held(id, fmt.Sprint("ns/pod-", i/2))) // each has two
					records = append(records, held(id, fmt.Sprint("with UID ", i/2)), held(id, fmt.Sprint("with UID ", i/2)))
				}
				p := s.new(config.Config{Live: config.Live{Features: config.Features{Events: true, PodEvents: true}}})
				p.Held = func(context.Context) ([]kubelet.HeldDevice, error) { return names, tt.named }
				p.Checkpoint = func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{Held: records}, tt.recorded }
				p.gpus(gpu(0, bad))
				p.start()
				s.pass(time.Minute)
				if got := s.about(); len(got) != 1+tt.want || got[0] != "Node /node-1" {
					s.Errorf("Events about %v", got)
				}
			})
		})
	}
}
