package containeredits_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A container with units of memory has one GPU, its limit and the MPS daemon of the GPU. One with a
// percentage has only that limit: kubelet joins what it is given for both.
func TestLimitsOfUnits(t *testing.T) {
	t.Parallel()
	unit := func(sharing resource.SharingMode) []resource.Device {
		d := resource.Device{UUID: "GPU-a", GPU: "GPU-a", Index: "0", Resource: "volcano.sh/gpu-mem.256Mi",
			Sharing: sharing}
		return []resource.Device{d, d, d}
	}
	var tokens []resource.Device
	for range 25 {
		tokens = append(tokens, resource.Device{UUID: "percentage", Resource: "volcano.sh/gpu-core.percentage",
			Sharing: resource.Percentage})
	}
	const kind = "k8s.device-plugin.nvidia.com/"
	pipe := map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/mps/pipe"}
	mounts := []containeredits.Mount{{HostPath: "/run/mps/gpu.GPU-a/pipe", ContainerPath: "/mps/pipe"},
		{HostPath: "/run/mps/shm", ContainerPath: "/dev/shm"}}
	for _, tt := range []struct {
		name       string
		devices    []resource.Device
		strategies []containeredits.Strategy
		want       containeredits.Edits
	}{
		{"by variables", unit(resource.InMPSUnits), []containeredits.Strategy{containeredits.EnvVar},
			containeredits.Edits{Mounts: mounts, Env: map[string]string{
				"NVIDIA_VISIBLE_DEVICES": "GPU-a", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=768M",
				"CUDA_MPS_PIPE_DIRECTORY": "/mps/pipe"}}},
		{"by CDI", unit(resource.InMPSUnits), []containeredits.Strategy{containeredits.CDICRI},
			containeredits.Edits{Mounts: mounts, Env: pipe, CDIDevices: []string{kind + "gpu=GPU-a",
				kind + "memory-limit=768Mi"}}},
		{"by the driver", unit(resource.InDriverUnits), []containeredits.Strategy{containeredits.CDICRI},
			containeredits.Edits{Env: map[string]string{}, CDIDevices: []string{kind + "gpu=GPU-a",
				kind + "driver-memory-limit=768Mi"}}},
		{"only counted", unit(resource.InUnits), []containeredits.Strategy{containeredits.EnvVar},
			containeredits.Edits{Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-a"}}},
		{"a percentage by variables", tokens, []containeredits.Strategy{containeredits.EnvVar},
			containeredits.Edits{Env: map[string]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}}},
		{"a percentage by CDI", tokens, []containeredits.Strategy{containeredits.CDICRI},
			containeredits.Edits{Env: map[string]string{}, CDIDevices: []string{kind + "thread-limit=25"}}},
		{"a percentage by volume mounts", tokens, []containeredits.Strategy{containeredits.VolumeMounts},
			containeredits.Edits{Env: map[string]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}}},
	} {
		got, err := containeredits.For(tt.devices, containeredits.Options{Strategies: tt.strategies,
			MPSRoot: "/run/mps", Void: false, DeviceNodes: false, GDS: containeredits.Always})
		if err != nil {
			t.Error(err)
		}
		delete(got.Env, "NVIDIA_GDS")
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	both, err := containeredits.For(tokens,
		containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar,
			containeredits.CDIAnnotations}, AnnotationPrefix: "cdi/"})
	if err != nil || len(both.Annotations) != 1 || len(both.Env) != 1 {
		t.Errorf("a percentage by both: %+v, %v", both, err)
	}
}
