package resource_test

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestComputeModes: a GPU on which no program may compute is not given out, and one that is shared
// although it takes one process is warned of.
func TestComputeModes(t *testing.T) {
	t.Parallel()
	for mode, want := range map[inventory.ComputeMode]struct {
		healthy bool
		warns   string
	}{
		inventory.ComputeDefault:          {true, ""},
		inventory.ComputeProhibited:       {false, ""},
		inventory.ComputeExclusiveThread:  {true, "its compute mode EXCLUSIVE_THREAD allows one container at a time"},
		inventory.ComputeExclusiveProcess: {true, "its compute mode EXCLUSIVE_PROCESS allows one container at a time"},
	} {
		for _, sharing := range []resource.SharingMode{resource.Unshared, resource.TimeSliced, resource.MPS} {
			o := resource.Options{Sharing: resource.Sharing{Mode: sharing}}
			if sharing != resource.Unshared {
				o.Sharing.Rules = []resource.SharingRule{{Name: resource.WholeGPU, Replicas: 2}}
			}
			plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{{
				UUID: "GPU-a", Index: 3, ComputeMode: mode, Health: inventory.Health{State: inventory.Healthy},
				ComputeCapability: inventory.ComputeCapability{Major: 9},
			}}}, o)
			d := plan.Resources[0].Devices[0]
			if d.Healthy != want.healthy || !d.Healthy && !strings.Contains(d.Reason,
				"PROHIBITED, and no program can use it: nvidia-smi -i 3 -c DEFAULT") {
				t.Errorf("%s, shared by %s: Healthy %v, %q", mode, sharing, d.Healthy, d.Reason)
			}
			warning := strings.Join(plan.Warnings, "; ")
			if expected := sharing == resource.TimeSliced && want.warns != ""; (warning != "") != expected ||
				expected && !strings.Contains(warning, want.warns) {
				t.Errorf("%s, shared by %s: warnings %q", mode, sharing, warning)
			}
		}
	}
}

// TestConfidentialComputingAndLicences: GPUs that accept no work are not given out; a virtual GPU
// without a licence is, with a warning.
func TestConfidentialComputingAndLicences(t *testing.T) {
	t.Parallel()
	gpu := inventory.GPU{UUID: "GPU-a", Health: inventory.Health{State: inventory.Healthy}, NotReady: true}
	if d := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu}},
		resource.Options{}).Resources[0].Devices[0]; d.Healthy ||
		!strings.Contains(d.Reason, "confidential computing is on and not ready") ||
		!strings.Contains(d.Reason, "nvidia-smi conf-compute -srs 1") {
		t.Errorf("not ready: Healthy %v, %q", d.Healthy, d.Reason)
	}
	gpu.NotReady, gpu.Unlicensed = false, true
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu}}, resource.Options{})
	if d := plan.Resources[0].Devices[0]; !d.Healthy || len(plan.Warnings) != 1 ||
		!strings.Contains(plan.Warnings[0], "without a licence") {
		t.Errorf("without a licence: Healthy %v, %q; warnings %q", d.Healthy, d.Reason, plan.Warnings)
	}
}
