package dra_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestHealthOf: what kubelet is told of each device of a pool.
func TestHealthOf(t *testing.T) {
	t.Parallel()
	healthy := inventory.Health{State: inventory.Healthy}
	for name, tt := range map[string]struct {
		health  inventory.Health
		verdict dra.Verdict
		message string
	}{
		"healthy": {healthy, dra.VerdictHealthy, ""},
		"suspect": {inventory.Health{State: inventory.Suspect, Reason: "XID 48"}, dra.VerdictHealthy, "XID 48"},
		"in grace": {inventory.Health{State: inventory.Unknown, Grace: true, Reason: "no answer"}, dra.VerdictHealthy,
			"no answer"},
		"unknown": {inventory.Health{State: inventory.Unknown, Reason: "no answer"}, dra.VerdictUnknown, "no answer"},
		"unhealthy": {
			inventory.Health{State: inventory.Unhealthy, Reason: "XID 79",
				Remedy: inventory.RemedyReboot}, dra.VerdictUnhealthy, "XID 79; remedy: reboot",
		},
		"no reason": {inventory.Health{State: inventory.Unhealthy, Remedy: inventory.RemedyReset}, dra.VerdictUnhealthy,
			"remedy: reset"},
		"lost": {inventory.Health{State: inventory.Lost, Reason: "it fell off"}, dra.VerdictUnhealthy,
			"it fell off"},
		"not UTF-8": {inventory.Health{State: inventory.Lost, Reason: "driver \xe4"}, dra.VerdictUnhealthy,
			"driver \uFFFD"},
		"long": {
			inventory.Health{State: inventory.Unhealthy, Reason: strings.Repeat("é",
				1000)}, dra.VerdictUnhealthy, strings.Repeat("é", 510) + "...",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gpus := []inventory.GPU{{UUID: "GPU-0", Health: tt.health}, {UUID: "GPU-1", Index: 1, Health: healthy}}
			s := inventory.Snapshot{GPUs: gpus}
			problems := map[string]string{"gpu-1": "no daemon"}
			if !tt.health.Allocatable() {
				problems["gpu-0"] = "what is wrong with the GPU counts before this"
			}
			got := dra.HealthOf(dra.New(s, "node-1", dra.Numbers{"GPU-0": 0, "GPU-1": 1}, dra.All(gpus), nil), s,
				problems)
			want := []dra.DeviceHealth{
				{Device: "gpu-0", Verdict: tt.verdict, Message: tt.message},
				{Device: "gpu-1", Verdict: dra.VerdictUnhealthy, Message: "no daemon"},
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("health (-want +got):\n%s", diff)
			}
			if len(got[0].Message) > 1024 || !utf8.ValidString(got[0].Message) {
				t.Errorf("a message of %d bytes, valid %v", len(got[0].Message), utf8.ValidString(got[0].Message))
			}
		})
	}
}

// TestHealthOfMIG: a MIG device is as ill as its GPU, or more. A device of which nothing is known
// any more is not there.
func TestHealthOfMIG(t *testing.T) {
	t.Parallel()
	half := inventory.MIGAttributes{GISlices: 3, CISlices: 3}
	ill := inventory.Health{State: inventory.Unhealthy, Reason: "XID 94"}
	g := inventory.GPU{UUID: "GPU-0", MIG: inventory.MIGEnabled, Health: inventory.Health{State: inventory.Healthy},
		MIGDevices: []inventory.MIGDevice{
			{UUID: "MIG-0", Profile: "3g.40gb", Placement: inventory.MIGPlacement{Profile: 9, Size: 4},
				Attributes: half, Health: ill},
			{
				UUID: "MIG-1", Index: 1, Profile: "3g.40gb", Placement: inventory.MIGPlacement{Profile: 9, Start: 4,
					Size: 4}, Attributes: half,
				Health: inventory.Health{State: inventory.Healthy},
			},
		}}
	s := inventory.Snapshot{GPUs: []inventory.GPU{g}}
	pool := dra.New(s, "node-1", dra.Numbers{"GPU-0": 0}, dra.All(s.GPUs), nil)
	verdicts := func(s inventory.Snapshot) (all string) {
		for _, d := range dra.HealthOf(pool, s, nil) {
			all += d.Device + " " + string(d.Verdict) + " " + d.Message + "\n"
		}
		return all
	}
	for _, tt := range []struct {
		name, want string
		s          inventory.Snapshot
	}{
		{"one is ill", "gpu-0-mig-3g40gb-9-0 Unhealthy XID 94\ngpu-0-mig-3g40gb-9-4 Healthy \n", s},
		{
			"the GPU is lost", "gpu-0-mig-3g40gb-9-0 Unhealthy gone\ngpu-0-mig-3g40gb-9-4 Unhealthy gone\n",
			inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-0",
				Health: inventory.Health{State: inventory.Lost, Reason: "gone"}, MIGDevices: g.MIGDevices}}},
		},
		{
			"nothing is known", "gpu-0-mig-3g40gb-9-0 Unhealthy it is not there any more; remedy: reconnect\n" +
				"gpu-0-mig-3g40gb-9-4 Unhealthy it is not there any more; remedy: reconnect\n", inventory.Snapshot{},
		},
	} {
		if diff := cmp.Diff(tt.want, verdicts(tt.s)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
