package cluster_test

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// claimStatusOf returns in one line what the status of a claim says.
func (s *stage) claimStatusOf(name string) string {
	s.Helper()
	claim, err := s.server.Claim("ns", name)
	if err != nil {
		return err.Error()
	}
	text := ""
	for _, d := range claim.Status.Devices {
		if d.Driver == network.Driver {
			continue
		}
		var data map[string]any
		if err := json.Unmarshal(d.Data.Raw, &data); err != nil {
			s.Fatal(err)
		}
		text += fmt.Sprintf("%s %s %s %v", d.Driver, d.Pool, d.Device, data)
		for _, c := range d.Conditions {
			text += fmt.Sprintf(" %s=%s(%s %s since %s)", c.Type, c.Status, c.Reason, c.Message,
				c.LastTransitionTime.UTC().Format(time.TimeOnly))
		}
	}
	return text
}

// network is what another driver says of its device.
var network = resourceapi.AllocatedDeviceStatus{Driver: "network.example.com", Pool: nodeName, Device: "gpu-0"}

// isGiven gives a claim a device by parameters with spaces and names that are not sorted, and one
// of another driver, which says something of it.
func isGiven(claim *resourceapi.ResourceClaim) {
	config := resourceapi.DeviceAllocationConfiguration{Source: resourceapi.AllocationConfigSourceClaim}
	config.Opaque = &resourceapi.OpaqueDeviceConfiguration{
		Driver:     dra.Driver,
		Parameters: runtime.RawExtension{Raw: []byte(`{"kind": "GpuConfig", "apiVersion": "resource.nvidia.com/v1beta1"}`)},
	}
	result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: dra.Driver, Pool: nodeName,
		Device: "gpu-0"}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{result},
		Config:  []resourceapi.DeviceAllocationConfiguration{config},
	}}
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{network}
}

// writesOfClaims counts the writes of the status of claims.
func (s *stage) writesOfClaims() (n int) {
	for request, count := range s.server.Requests() {
		if request.Verb == "update" && request.Resource == "resourceclaims/status" {
			n += count
		}
	}
	return n
}

// TestClaimStatus: the status of a claim says which device it has, and whether that is ready and
// healthy. It is written once after the claim is prepared, when one of these changes, and by the
// next process, which changes nothing. A claim that is gone, or another one of its name, keeps no
// other from it; nor does an API server that was away.
func TestClaimStatus(t *testing.T) {
	onStage(t, func(s *stage) {
		since := time.Date(2026, 1, 1, 10, 0, 0, 0, time.UTC)
		uids := map[string]string{}
		for _, name := range []string{"a", "b"} {
			if err := s.server.ChangeClaim("ns", name, isGiven); err != nil {
				s.Fatal(err)
			}
			object, err := s.server.Claim("ns", name)
			if err != nil {
				s.Fatal(err)
			}
			uids[name] = string(object.UID)
		}
		node := func(h inventory.Health) inventory.Snapshot {
			return inventory.Snapshot{Generation: 1, GPUs: []inventory.GPU{{UUID: "GPU-a", MIG: inventory.MIGDisabled,
				Health: h}}}
		}
		well := node(inventory.Health{State: inventory.Healthy})
		pools := feed.New(dra.New(well, nodeName, dra.Numbers{"GPU-a": 0}, dra.Owners{"GPU-a": dra.OwnedByDRA}, nil))
		snapshots := feed.New(well)
		of := func(name string, d dra.DeviceState) dra.ClaimState {
			return dra.ClaimState{UID: uids[name], Namespace: "ns", Name: name, Since: since, Devices: []dra.DeviceState{d}}
		}
		whole := dra.DeviceState{Device: "gpu-0", GPU: "GPU-a"}
		prepared := feed.New([]dra.ClaimState{
			{UID: "another", Namespace: "ns", Name: "b", Devices: []dra.DeviceState{whole}},
			{UID: "gone", Namespace: "ns", Name: "gone", Devices: []dra.DeviceState{whole}},
			of("a", whole),
		})
		start := func() (stop func()) {
			p := s.new(config.Config{})
			p.start()
			ctx, cancel := context.WithCancel(s.Context())
			var running sync.WaitGroup
			running.Go(func() { p.cluster.WriteClaimStatus(ctx, prepared.Latest, pools, snapshots) })
			return func() {
				cancel()
				running.Wait()
			}
		}
		says := func(name, want string) {
			s.Helper()
			if !s.becomes(func() bool { return s.claimStatusOf(name) == want }) {
				s.Fatalf("the status of %s is %q, want %q", name, s.claimStatusOf(name), want)
			}
		}
		const head = "gpu.nvidia.com " + nodeName + " gpu-0 map[uuid:GPU-a] "
		const healthy = head + "Ready=True(Prepared  since 10:00:00) Healthy=True(Healthy  since 10:00:00)"
		stop := start()
		says("a", healthy)
		says("b", "")
		writes := s.writesOfClaims()
		snapshots.Publish(well)
		s.pass(time.Minute)
		if now := s.writesOfClaims(); now != writes {
			s.Errorf("%d writes while nothing changes", now-writes)
		}
		stop()
		before, err := s.server.Claim("ns", "a")
		if err != nil {
			s.Fatal(err)
		}
		defer start()()
		s.pass(time.Minute)
		if after, err := s.server.Claim("ns", "a"); err != nil || after.ResourceVersion != before.ResourceVersion {
			s.Errorf("the next process changes the claim: %v", err)
		}
		s.server.SetFault(apiserver.Fault{Status: 500})
		snapshots.Publish(node(inventory.Health{State: inventory.Unhealthy, Reason: "XID 79", Remedy: inventory.RemedyReset}))
		s.pass(time.Minute)
		s.server.SetFault(apiserver.Fault{})
		s.until("the claim says that its GPU is ill", func() bool {
			return strings.Contains(s.claimStatusOf("a"), "since 10:00:00) Healthy=False(Unhealthy XID 79")
		})
		if text := s.claimStatusOf("a"); strings.Count(text, "10:00:00") != 1 {
			s.Errorf("the time of the change is not told: %s", text)
		}
		part := dra.DeviceState{Device: "gpu-0", GPU: "GPU-a", MIG: "MIG-a", Memory: 1 << 30, Limited: true,
			Problem: "the MPS control daemon died"}
		prepared.Publish([]dra.ClaimState{of("b", part)})
		const want = "gpu.nvidia.com " + nodeName + " gpu-0 map[memory:1.073741824e+09 memoryIsLimit:true parentUUID:GPU-a uuid:MIG-a] " +
			"Ready=False(NotUsable the MPS control daemon died since "
		s.until("b says what is wrong", func() bool { return strings.HasPrefix(s.claimStatusOf("b"), want) })
		if claim, err := s.server.Claim("ns", "b"); err != nil || len(claim.Status.Devices) != 2 ||
			!reflect.DeepEqual(claim.Status.Devices[0], network) {
			s.Errorf("the status of another driver is not kept: %+v, %v", claim.Status.Devices, err)
		}
	})
}

// TestUnwritableClaimStatus: an API server that never takes, or never answers, the write of one
// claim keeps no other claim from its status, one that is prepared later included. That claim is
// tried again with pauses that become longer, and is written when it can be.
func TestUnwritableClaimStatus(t *testing.T) {
	for name, fault := range map[string]apiserver.Fault{
		"500": {Status: 500}, "429": {Status: 429, RetryAfter: time.Hour}, "no answer": {Delay: 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				well := inventory.Snapshot{Generation: 1, GPUs: []inventory.GPU{{UUID: "GPU-a", MIG: inventory.MIGDisabled}}}
				var claims []dra.ClaimState
				for _, name := range []string{"a", "b", "c"} {
					if err := s.server.ChangeClaim("ns", name, func(*resourceapi.ResourceClaim) {}); err != nil {
						s.Fatal(err)
					}
					object, err := s.server.Claim("ns", name)
					if err != nil {
						s.Fatal(err)
					}
					claims = append(claims, dra.ClaimState{
						UID: string(object.UID), Namespace: "ns", Name: name, Devices: []dra.DeviceState{{Device: "gpu-0", GPU: "GPU-a"}},
					})
				}
				pools := feed.New(dra.New(well, nodeName, dra.Numbers{"GPU-a": 0}, dra.Owners{"GPU-a": dra.OwnedByDRA}, nil))
				prepared := feed.New(claims[:2])
				fault.Path = "/resourceclaims/a/"
				s.server.SetFault(fault)
				p := s.new(config.Config{})
				p.start()
				var running sync.WaitGroup
				defer running.Wait()
				ctx, cancel := context.WithCancel(s.Context())
				defer cancel()
				running.Go(func() { p.cluster.WriteClaimStatus(ctx, prepared.Latest, pools, feed.New(well)) })
				written := func(name string) {
					s.Helper()
					began := time.Now()
					s.until(name+" is written", func() bool { return s.claimStatusOf(name) != "" })
					if took := time.Since(began); took > time.Second {
						s.Errorf("%s is written after %s", name, took)
					}
				}
				written("b")
				s.pass(10 * time.Minute)
				if n := s.writesOfClaims(); n > 25 {
					s.Errorf("%d writes in ten minutes", n)
				}
				prepared.Publish(claims)
				written("c")
				if text := s.claimStatusOf("a"); text != "" {
					s.Errorf("a says %s", text)
				}
				s.server.SetFault(apiserver.Fault{})
				s.pass(2 * time.Hour)
				written("a")
			})
		})
	}
}
