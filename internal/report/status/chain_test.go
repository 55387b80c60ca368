package status_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// steps formats steps: reached steps with their seconds, the others with their texts.
func steps(all []status.ReadyStep) string {
	var parts []string
	for _, s := range all {
		part := fmt.Sprintf("%s %.0fs", s.Name, s.Seconds)
		if !s.Reached {
			part = s.Name + ": " + s.Text
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, " | ")
}

// TestSteps follows a node that becomes ready step by step.
func TestSteps(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	p := status.NewProgress(start)
	var s status.Status
	e := status.Evidence{Refused: "driver 550 is not accepted", MissingNode: "/dev/nvidia-uvm"}
	s.Validation = &status.Validation{Devices: []status.Validated{{Index: "0", UUID: "GPU-0", Result: status.Waiting,
		Reason: "the proof is running"}}}
	s.Resources = []status.Resource{{Name: "nvidia.com/gpu", Planned: true, Server: "registering"}}
	s.Holds = []status.Hold{{Device: "GPU-0", Reason: "CUDA is not proven on it yet"}}
	for _, now := range []struct {
		after  time.Duration
		change func()
		want   string
	}{
		{time.Second, func() {}, "driver: the first scan of the GPUs has not ended | device nodes: waits for " +
			"driver | containers: waits for driver | CUDA: waits for driver | kubelet: waits for driver"},
		{2 * time.Second, func() { s.Stale = "Driver Not Loaded" }, "driver: Driver Not Loaded | device nodes: waits"},
		{3 * time.Second, func() {
			s.Stale, s.Looked, e.AnswersSince = "", start, start.Add(3*time.Second)
			s.GPUs = []status.Device{{UUID: "GPU-0"}}
		}, "driver: driver 550 is not accepted | device"},
		{5 * time.Second, func() { e.Refused, s.Driver = "", "580" },
			"driver 3s | device nodes: the device node /dev/nvidia-uvm does not exist | containers: waits for device nodes"},
		{6 * time.Second, func() { e.MissingNode = "" },
			"driver 3s | device nodes 6s | containers 6s | CUDA: proven on 0 of 1 device; device 0: the proof is " +
				"running | kubelet: waits for CUDA"},
		{7 * time.Second, func() { s.Holds[0].Reason, s.Holds[0].Device, s.GPUs[0].UUID = "no CDI spec", "GPU-1", "GPU-1" },
			"driver 3s | device nodes 6s | containers: no CDI spec | CUDA: waits for containers"},
		{9 * time.Second, func() {
			s.Validation.Devices[0] = status.Validated{Result: status.Proven, Since: start.Add(7 * time.Second),
				Milliseconds: 1000}
			s.Holds = nil
		}, "driver 3s | device nodes 6s | containers 6s | CUDA 9s | kubelet: nvidia.com/gpu: registering"},
		{time.Hour, func() {
			s.Resources[0].Server, s.Resources[0].Agreed, s.Resources[0].Healthy, s.Resources[0].Devices = "serving", true, 1, 1
			e.AgreesSince = start.Add(10 * time.Second)
		}, "driver 3s | device nodes 6s | containers 6s | CUDA 9s | kubelet 10s"},
		{2 * time.Hour, func() { s.Quiet = true }, "driver: the driver is released | device nodes: waits for driver"},
		{2 * time.Hour, func() { s.Quiesced = &status.Quiesced{ForChange: true} },
			"driver: the driver of the node is being changed | device nodes: waits for driver"},
		{3 * time.Hour, func() { s.Quiet, s.Quiesced = false, nil }, "driver 3s | device nodes 6s | containers 6s | CUDA 9s | kubelet 10s"},
	} {
		now.change()
		s.Steps = p.Steps(s, e, start.Add(now.after))
		if got := steps(s.Steps); !strings.HasPrefix(got, now.want) {
			t.Errorf("after %v: %s\nwant %s", now.after, got, now.want)
		}
		if step, waits := s.Waits(); waits && now.after == 2*time.Hour && !step.Since.Equal(start.Add(2*time.Hour)) {
			t.Errorf("it waits since %v", step.Since)
		}
	}
}

// TestStepsWithHeldAndFailedDevices: one bad device does not delay a node, nor does a device in
// use by a pod.
func TestStepsWithHeldAndFailedDevices(t *testing.T) {
	t.Parallel()
	good := func() status.Status {
		return status.Status{
			Looked: time.Unix(1, 0), GPUs: []status.Device{{UUID: "GPU-0"}, {UUID: "GPU-1"}},
			Resources: []status.Resource{{Name: "a", Planned: true, Server: "serving", Agreed: true, Healthy: 1, Devices: 2}},
			Validation: &status.Validation{Devices: []status.Validated{{UUID: "GPU-0", Result: status.Proven},
				{UUID: "GPU-1", Result: status.Failed}}},
		}
	}
	parts := func(node bool, held ...string) func(*status.Status) { // a GPU with two MIG devices
		return func(s *status.Status) {
			s.Validation, s.GPUs = nil, []status.Device{{UUID: "GPU-0"}, {UUID: "MIG-0", GPU: "GPU-0"},
				{UUID: "MIG-1", GPU: "GPU-0"}}
			for _, uuid := range held {
				s.Holds = append(s.Holds, status.Hold{Device: uuid, Reason: "it lacks something", Node: node})
			}
		}
	}
	for name, tt := range map[string]struct {
		change func(*status.Status)
		waits  string
	}{
		"one fails": {func(*status.Status) {}, ""},
		"all fail":  {func(s *status.Status) { s.Validation.Devices[0].Result = status.Failed }, status.StepCUDA},
		"one waits": {func(s *status.Status) { s.Validation.Devices[1].Result = status.Waiting }, status.StepCUDA},
		"all are in use": {func(s *status.Status) {
			for i := range s.Validation.Devices {
				s.Validation.Devices[i].Result, s.Validation.Devices[i].InUse = status.Waiting, true
			}
		}, ""},
		"one is held": {func(s *status.Status) { s.Holds = []status.Hold{{Device: "GPU-0"}} }, ""},
		"all are held": {func(s *status.Status) {
			s.Validation, s.Holds = nil, []status.Hold{{Device: "GPU-0"}, {Device: "GPU-1"}}
		}, status.StepContainers},
		"all parts of a GPU are held":   {parts(false, "MIG-0", "MIG-1"), status.StepContainers},
		"the GPU of all parts is held":  {parts(false, "GPU-0"), status.StepContainers},
		"all parts lack a node":         {parts(true, "MIG-0", "MIG-1"), status.StepNodes},
		"one of two parts is held":      {parts(true, "MIG-0"), ""},
		"a part that is not there, too": {parts(true, "MIG-0", "MIG-7", "MIG-8"), ""},
		"none is offered":               {func(s *status.Status) { s.Resources[0].Healthy = 0 }, status.StepKubelet},
		"claims":                        {func(s *status.Status) { s.Resources, s.DRA = nil, &status.DRA{} }, ""},
		"no GPU":                        {func(s *status.Status) { s.GPUs = nil }, status.StepDriver},
	} {
		s := good()
		tt.change(&s)
		s.Steps = status.NewProgress(time.Unix(0, 0)).Steps(s, status.Evidence{}, time.Unix(9, 0))
		if step, waits := s.Waits(); waits != (tt.waits != "") || step.Name != tt.waits {
			t.Errorf("%s: it waits for %+v", name, step)
		}
	}
}
