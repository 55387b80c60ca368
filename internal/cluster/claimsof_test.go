package cluster_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// Only what may show that a GPU is free lists the claims of the cluster: as long as a claim that was seen has it, that claim alone is read. The
// lists of many nodes are spread.
func TestClaimsAreListedOnlyWhenThatMayShowAFreeGPU(t *testing.T) {
	onStage(t, func(s *stage) {
		give := func(name, device string) {
			s.Helper()
			err := s.server.ChangeClaim("ns", name, func(claim *resourceapi.ResourceClaim) {
				claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: nodeName, Device: device}},
				}}
			})
			if err != nil {
				s.Fatal(err)
			}
		}
		take := func(name string) {
			s.Helper()
			if err := s.server.DeleteClaim("ns", name); err != nil {
				s.Fatal(err)
			}
		}
		for i := range 399 { // beside this one
			if err := s.server.ChangeNode(fmt.Sprintf("other-%d", i), func(*corev1.Node) {}); err != nil {
				s.Fatal(err)
			}
		}
		p := s.new(config.Config{})
		p.start()
		lists, longest := 0, time.Duration(0)
		ask := func(want string, wantList bool, gpus ...string) {
			s.Helper()
			began, before := time.Now(), s.listsOfClaims()
			claimed, err := p.cluster.ClaimsOf(s.Context(), nodeName, gpus, func(device string) (string, bool) { return device, true })
			listed := s.listsOfClaims() > before
			if got := fmt.Sprint(claimed); err != nil || got != want || listed != wantList {
				s.Errorf("of %v: %s, error %v, listed %t; want %s, listed %t", gpus, got, err, listed, want, wantList)
			}
			took := time.Since(began)
			if listed {
				lists, longest = lists+1, max(longest, took)
			}
			if took > 9*time.Second || !listed && took > time.Second {
				s.Errorf("of %v: after %v, listed %t", gpus, took, listed)
			}
		}
		give("a", "gpu-0")
		give("b", "gpu-1")
		give("c", "gpu-1")
		ask("map[gpu-0:[ns/a] gpu-1:[ns/b ns/c]]", true, "gpu-0", "gpu-1")
		for range 3 {
			ask("map[gpu-0:[ns/a] gpu-1:[ns/b]]", false, "gpu-0", "gpu-1")
		}
		take("b")
		ask("map[gpu-0:[ns/a] gpu-1:[ns/c]]", false, "gpu-0", "gpu-1")
		take("a")
		ask("map[gpu-1:[ns/c]]", true, "gpu-0", "gpu-1") // gpu-0 is free
		ask("map[gpu-1:[ns/c]]", false, "gpu-1")
		give("c", "gpu-2") // another claim of that name
		give("d", "gpu-1")
		ask("map[gpu-1:[ns/d] gpu-2:[ns/c]]", true, "gpu-1")
		take("c")
		take("d")
		ask("map[]", true, "gpu-1")
		for range 8 {
			ask("map[]", true, "gpu-1")
		}
		if longest < 500*time.Millisecond { // with 13 lists within 8 s each, once in 10^15 runs
			s.Errorf("%d lists of one of 400 nodes began within %v", lists, longest)
		}
	})
}

// listsOfClaims counts the lists of ResourceClaims.
func (s *stage) listsOfClaims() int {
	n := 0
	for request, count := range s.server.Requests() {
		if request.Verb == "list" && request.Resource == "resourceclaims" {
			n += count
		}
	}
	return n
}
