package cluster_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
)

// The claims of the cluster are listed only if this may show a free GPU: while a known claim has
// the GPU, only this claim is read. The lists of many nodes are spread over time.
func TestListOfClaims(t *testing.T) {
	onStage(t, func(s *stage) {
		give := func(name, device string) {
			s.Helper()
			err := s.server.ChangeClaim("ns", name, func(claim *resourceapi.ResourceClaim) {
				claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: nodeName,
						Device: device}},
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
			claimed, err := p.cluster.ClaimsOf(s.Context(), nodeName, gpus,
				func(device string) (string, bool) { return device, true })
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

// If lists by all nodes would take longer than two minutes, the claims are counted and not listed.
// 251 claims are two pages.
func TestTooManyClaims(t *testing.T) {
	onStage(t, func(s *stage) {
		for i := range 251 {
			if err := s.server.ChangeClaim("ns", fmt.Sprint(i), func(claim *resourceapi.ResourceClaim) {
				claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: nodeName,
						Device: "gpu-0"}},
				}}
			}); err != nil {
				s.Fatal(err)
			}
		}
		nodes := 1 // this one
		grow := func(to int) {
			for ; nodes < to; nodes++ {
				if err := s.server.ChangeNode(fmt.Sprintf("other-%d", nodes), func(*corev1.Node) {}); err != nil {
					s.Fatal(err)
				}
			}
		}
		longest := time.Duration(0)
		p := s.new(config.Config{})
		ask := func(want, requests int, most time.Duration, listed error) {
			s.Helper()
			began, before := time.Now(), s.listsOfClaims()
			claimed, err := p.cluster.ClaimsOf(s.Context(), nodeName, []string{"gpu-0"},
				func(device string) (string, bool) { return device, true })
			took, made := time.Since(began), s.listsOfClaims()-before
			if longest = max(longest, took); len(claimed["gpu-0"]) != want || made != requests || took > most ||
				!errors.Is(err, listed) {
				s.Errorf("%d nodes: %d claims after %v and %d requests, error %v; want %d after %v at most and %d, error %v",
					nodes, len(claimed["gpu-0"]), took, made, err, want, most, requests, listed)
			}
		}
		grow(600)
		for range 8 {
			p = s.new(config.Config{}).start()
			ask(251, 3, 133*time.Second, nil)
		}
		if longest < 13*time.Second { // once in 10^9 runs
			s.Errorf("eight lists of one of 600 nodes began within %v", longest)
		}
		grow(601)
		p = s.new(config.Config{}).start() // it counts the nodes again
		ask(0, 1, 13*time.Second, owner.ErrNotListed)
		ask(0, 0, 0, owner.ErrNotListed)
		s.pass(time.Hour)
		ask(0, 1, 13*time.Second, owner.ErrNotListed)
		if err := s.server.DeleteClaim("ns", "0"); err != nil {
			s.Fatal(err)
		}
		s.pass(time.Hour)
		ask(250, 2, 13*time.Second, nil)
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
