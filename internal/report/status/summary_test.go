package status_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// fine is the status of a healthy node.
func fine() status.Status {
	at := time.Date(2026, 11, 22, 1, 2, 3, 0, time.UTC)
	return status.Status{
		Version: "v1", Driver: "580", Looked: at, Readiness: status.Readiness{Ready: true},
		GPUs: []status.Device{
			{Index: "0", UUID: "GPU-0", State: "Healthy"}, {Index: "1", UUID: "GPU-1", State: "Healthy"},
			{Index: "1:0", UUID: "MIG-0", State: "Healthy"},
		},
		Resources: []status.Resource{{Name: "a/b", Devices: 2, Healthy: 2, Server: "serving"}},
	}
}

func TestSummarize(t *testing.T) {
	t.Parallel()
	three := 3
	for name, tt := range map[string]struct {
		change func(*status.Status)
		want   string // state: text
	}{
		"all is well": {func(*status.Status) {}, "ready: 2 GPUs and 1 MIG device Healthy; a/b: 2 of 2"},
		"starting": {func(s *status.Status) { *s = status.Status{Version: "v1"} },
			"starting: the first scan of the GPUs has not ended"},
		"the first look hangs": {func(s *status.Status) { *s = status.Status{Calls: []status.Call{{GPU: &three, Function: "nvmlX"}}} },
			"starting: the first scan of the GPUs has not ended; nvmlX of GPU 3 does not return"},
		"the first look hangs before it knows a GPU": {func(s *status.Status) { *s = status.Status{Calls: []status.Call{{Function: "nvmlInit_v2"}}} },
			"starting: the first scan of the GPUs has not ended; nvmlInit_v2 does not return"},
		"there never was a driver": {func(s *status.Status) { *s = status.Status{Stale: "libnvidia-ml.so.1 is not there"} },
			"waiting for driver: libnvidia-ml.so.1 is not there; to find the cause, run: gpu-device-plugin doctor"},
		"the driver was unloaded": {func(s *status.Status) { s.Stale = "no driver" },
			"waiting for driver: no driver; the GPUs are shown as they were at 2026-11-22T01:02:03Z; to find the " +
				"cause, run: gpu-device-plugin doctor"},
		"quiesced": {func(s *status.Status) {
			s.Quiet, s.Stale, s.Quiesced = true, "quiet", &status.Quiesced{Since: s.Looked}
		},
			"quiesced: the driver is released since 2026-11-22T01:02:03Z, and new pods get no GPU; to end this, run: " +
				"gpu-device-plugin resume"},
		"quiesced while a call hangs": {func(s *status.Status) {
			s.Quiet, s.Stale, s.Quiesced, s.Calls = true, "quiet", &status.Quiesced{Since: s.Looked}, []status.Call{{GPU: &three,
				Function: "nvmlX"}}
		}, "quiesced: the driver is not released yet: nvmlX of GPU 3 does not return; the release is retried, and " +
			"new pods get no GPU; to end this, run: gpu-device-plugin resume"},
		"quiesced before this process, with allocation": {func(s *status.Status) {
			*s = status.Status{Quiet: true, Quiesced: &status.Quiesced{Since: s.Looked, Allocate: true}}
		},
			"quiesced: the driver is released since 2026-11-22T01:02:03Z, and new pods get GPUs; to end this, run: " +
				"gpu-device-plugin resume"},
		"another plugin": {func(s *status.Status) { s.Resources[0].Server = "standing by: another server has registered" },
			"standing by: another device plugin serves a/b; this one takes over when it stops"},
		"another plugin before it was ready": {func(s *status.Status) {
			s.Resources[0].Server, s.Readiness = "standing by: another server has registered", status.Readiness{Reason: "x"}
		}, "standing by: another device plugin serves a/b; this one takes over when it stops"},
		"no kubelet": {func(s *status.Status) {
			s.Resources[0].Server, s.Readiness = "waiting for kubelet", status.Readiness{Reason: "x"}
		},
			"waiting for kubelet: the kubelet is not running; not registered: a/b"},
		"not ready": {func(s *status.Status) { s.Readiness = status.Readiness{Reason: "kubelet refuses a/b"} },
			"not ready: kubelet refuses a/b"},
		"a GPU that is sick": {func(s *status.Status) { s.GPUs[0].State, s.Resources[0].Healthy = "Lost", 1 },
			"degraded: GPU 0 Lost; a/b: 1 of 2"},
		"units of other GPUs": {func(s *status.Status) { s.Resources[0].Healthy, s.Resources[0].Unoffered = 1, 1 },
			"ready: 2 GPUs and 1 MIG device Healthy; a/b: 1 of 2 because units.fit is one"},
		"units of a GPU that is sick": {func(s *status.Status) {
			s.Resources[0].Healthy, s.Resources[0].Unoffered, s.Resources[0].Devices = 1, 1, 3
		},
			"degraded: a/b: 1 of 3 because units.fit is one"},
		"a GPU with MIG devices": {func(s *status.Status) { s.GPUs[1].State, s.GPUs[2].State = "Lost", "Lost" },
			"degraded: GPU 1 Lost; a/b: 2 of 2"},
		"a MIG device with a fault of its own": {func(s *status.Status) {
			s.GPUs[1].State, s.GPUs[1].Reason, s.GPUs[2].State, s.GPUs[2].Reason = "Lost", "x", "Lost", "y"
		}, "degraded: GPU 1 Lost, MIG device 1:0 Lost; a/b: 2 of 2"},
		"a GPU alone": {func(s *status.Status) { s.GPUs[1].State = "Unhealthy" }, "degraded: GPU 1 Unhealthy; a/b: 2 of 2"},
		"three": {func(s *status.Status) {
			for i := range 3 {
				s.GPUs = append(s.GPUs, status.Device{Index: fmt.Sprint(7 + i), State: "Lost"})
			}
		}, "degraded: GPU 7 Lost, GPU 8 Lost, GPU 9 Lost; a/b: 2 of 2"},
		"a MIG device": {func(s *status.Status) { s.GPUs[2].State = "Unhealthy" },
			"degraded: MIG device 1:0 Unhealthy; a/b: 2 of 2"},
		"a MIG device whose GPU is not there": {func(s *status.Status) { s.GPUs = append(s.GPUs, status.Device{Index: "7:0", State: "Lost"}) },
			"degraded: MIG device 7:0 Lost; a/b: 2 of 2"},
		"a GPU that is asked again": {func(s *status.Status) { s.GPUs[0].State, s.Retries = "Lost", []status.Retry{{Index: 0}, {Index: 7}} },
			"degraded: GPU 0 Lost, GPU 7 cannot be read; a/b: 2 of 2"},
		"registration fails": {func(s *status.Status) { s.Resources[0].Server, s.Resources[0].Problem = "registering", "refused" },
			"degraded: a/b: registering, refused; a/b: 2 of 2"},
		"a device that departs": {func(s *status.Status) { s.Resources[0].Healthy = 1 }, "degraded: a/b: 1 of 2"},
		"the file": {func(s *status.Status) { s.ConfigError = "line 1" },
			"degraded: the configuration file is not used; a/b: 2 of 2"},
		"metrics": {func(s *status.Status) { s.MetricsError = "in use" },
			"degraded: metrics are not served; a/b: 2 of 2"},
		"a hold": {func(s *status.Status) { s.Holds = []status.Hold{{Device: "GPU-0"}} },
			"degraded: not offered yet: 1; a/b: 2 of 2"},
		"MPS": {func(s *status.Status) { s.MPS = []string{"x"} },
			"degraded: MPS does not work; a/b: 2 of 2"},
		"no GPU": {func(s *status.Status) {
			s.GPUs, s.Resources, s.Readiness.Reason = nil, nil, "nothing to serve: this node has no GPU"
		}, "ready: nothing to serve: this node has no GPU"},
		"many": {func(s *status.Status) {
			for range 50 {
				s.GPUs = append(s.GPUs, status.Device{Index: "9", State: "Lost"})
				s.Resources = append(s.Resources, status.Resource{Name: "c/d", Server: "serving"})
			}
		}, "degraded: " + strings.Repeat("GPU 9 Lost, ", 40) +
			"GPU 9 Lost and 9 more; a/b: 2 of 2; c/d: 0 of 0; c/d: 0 of 0; 48 more resources"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := fine()
			tt.change(&s)
			got := status.Summarize(s)
			if diff := cmp.Diff(tt.want, got.State+": "+got.Text); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	const lines = "one line each"
	for name, tt := range map[string]struct {
		change func(before, after *status.Status)
		want   string
	}{
		"nothing": {func(_, s *status.Status) { s.Looked = s.Looked.Add(time.Hour) }, ""},
		"the state": {func(_, s *status.Status) { s.GPUs[0].State = "Lost" },
			"GPU 0: Healthy → Lost\nsummary: ready → degraded: GPU 0 Lost; a/b: 2 of 2"},
		"the reason": {func(b, s *status.Status) { b.GPUs[0].State, s.GPUs[0].State, s.GPUs[0].Reason = "Lost", "Lost", lines }, "GPU 0: still Lost: one line each"},
		"the remedy": {func(_, s *status.Status) { s.GPUs[2].Remedy = "reset" },
			"MIG device 1:0: still Healthy (remedy: reset)"},
		"another GPU at an index": {func(_, s *status.Status) { s.GPUs[0].UUID = "GPU-9" },
			"GPU 0: Healthy\nGPU 0: no longer: Healthy"},
		"an event": {func(_, s *status.Status) { s.GPUs[0].Events = []string{"XID 13 × 1"} },
			"event of GPU 0: XID 13 × 1"},
		"an event of a MIG device": {func(_, s *status.Status) { s.GPUs[2].Events = []string{"XID 13 × 1"} },
			"event of MIG device 1:0: XID 13 × 1"},
		"a call that hangs": {func(_, s *status.Status) { s.Calls = []status.Call{{Function: "nvmlX"}} },
			"call: nvmlX does not return"},
		"another event of its kind": {func(b, s *status.Status) {
			b.GPUs[0].Events, s.GPUs[0].Events = []string{"XID 13 × 1"}, []string{"XID 13 × 2"}
		},
			"event of GPU 0: XID 13 × 2"},
		"a resource": {func(_, s *status.Status) { s.Resources[0].Problem = "refused" },
			"a/b: still 2 of 2 devices Healthy, serving: refused\n" +
				"summary: ready → degraded: a/b: serving, refused; a/b: 2 of 2"},
		"a resource that is gone": {func(_, s *status.Status) { s.Resources = nil },
			"a/b: no longer: 2 of 2 devices Healthy, serving"},
		"a thousand replicas depart": {func(_, s *status.Status) {
			s.Resources[0].Departing = make([]status.Departing, 1000)
			s.Resources[0].Departing[0].Reason = lines
		}, "departing of a/b: 1000 devices: one line each"},
		"a thousand replicas are held": {func(b, s *status.Status) {
			b.Summary.State = status.Degraded
			for range 1000 {
				s.Holds = append(s.Holds, status.Hold{Resource: "a/b", Device: "GPU-0", Reason: "busy"})
			}
		}, "hold: 1000 × a/b; busy\nsummary: ready → degraded: not offered yet: 1000; a/b: 2 of 2"},
		"sentences": {func(b, s *status.Status) { b.Warnings, s.Warnings = []string{"one", "two"}, []string{"two", "th\nree"} },
			"warning: th ree\nwarning: no longer: one"},
		"the configuration": {func(_, s *status.Status) { s.ConfigGeneration, s.ConfigError = 2, "line 1" },
			"configuration: generation 0 → generation 2: line 1\n" +
				"summary: ready → degraded: the configuration file is not used; a/b: 2 of 2"},
		"the MIG layout": {func(_, s *status.Status) { s.MIG = &status.MIGLayout{Layout: "all-1g", State: "failed", Reason: lines} },
			"MIG layout: all-1g, failed: one line each"},
		"no MIG layout is named": {func(_, s *status.Status) { s.MIG = &status.MIGLayout{State: "none"} }, ""},
		"counts of the summary": {func(b, s *status.Status) {
			for _, s := range []*status.Status{b, s} {
				s.MPS = []string{"x"}
			}
			s.Driver = "590"
		}, "driver: 580 → 590"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before, after := fine(), fine()
			tt.change(&before, &after)
			before.Summary, after.Summary = status.Summarize(before), status.Summarize(after)
			var got []string
			for _, c := range status.Changes(before, after, before.Looked) {
				if !c.Time.Equal(before.Looked) {
					t.Errorf("time %v", c.Time)
				}
				got = append(got, c.String())
			}
			if diff := cmp.Diff(tt.want, strings.Join(got, "\n")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	lost := fine()
	for i := range lost.GPUs {
		lost.GPUs[i].State, lost.GPUs[i].Reason = "Lost", lines
	}
	joined := status.Joined(status.Changes(fine(), lost, time.Time{}))
	if len(joined) != 2 || joined[0].Name != "0" || joined[1].Name != "1" {
		t.Errorf("without what is the same for a MIG device and its GPU: %+v", joined)
	}
	lost.GPUs[2].Reason = "another"
	if joined := status.Joined(status.Changes(fine(), lost, time.Time{})); len(joined) != 3 {
		t.Errorf("a MIG device with a reason of its own: %+v", joined)
	}
	all := fine()
	all.Summary = status.Summarize(all)
	changes := status.Changes(status.Status{}, all, time.Time{})
	if first, last := changes[0], changes[len(changes)-1]; len(changes) != 8 || first.Kind != "daemon" ||
		last.Kind != "summary" || last.To != status.AllServed {
		t.Errorf("from nothing: %+v", changes)
	}
}
