package layout_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// TestPlanForAProgram: the GPU's steps with the instances that they are about.
func TestPlanForAProgram(t *testing.T) {
	t.Parallel()
	part := layout.Part{GPUInstance: inventory.GPUInstance{ID: 1, Profile: "1g.10gb", Start: 2, Size: 1}, Exists: true}
	compute := inventory.ComputeInstance{ID: 5, Start: 1, Slices: 2}
	changes := layout.Changes{Layout: "a", Warnings: []string{"second"},
		GPUs: []layout.GPUChange{{GPU: layout.GPU{Index: 3, UUID: "GPU-3", Model: "H100"}, Steps: []layout.Step{
			{Action: inventory.MIGEnable, Part: part}, {Action: inventory.MIGDisable,
				Part: part}, {Action: inventory.MIGDestroyCompute, Part: part, Compute: compute},
			{Action: inventory.MIGDestroyInstance, Part: part}, {Action: inventory.MIGCreateInstance},
			{Action: inventory.MIGCreateCompute, Compute: compute},
		}}}}
	p := layout.NewPlanned(changes, map[string]string{"GPU-3": "ampere"}, []string{"first"})
	if p.Layout != "a" || !p.Possible || !p.GPUs[0].Resets || p.Err() != nil {
		t.Errorf("%+v", p)
	}
	if diff := cmp.Diff([]string{"first", "second"}, p.Warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	text, err := json.Marshal(p.GPUs[0].Steps)
	if err != nil {
		t.Fatal(err)
	}
	const instance, other = `{"id":1,"profile":"1g.10gb","start":2,"size":1,"devices":[]}`, `{"profile":"","start":0,"size":0,"devices":[]}`
	want := fmt.Sprintf(`[{"action":%q},{"action":%q},{"action":%q,"gpuInstance":%s,"computeInstance":{"id":5,"start":1,"slices":2}},`+
		`{"action":%q,"gpuInstance":%s},{"action":%q,"gpuInstance":%s},{"action":%q,"gpuInstance":%s,"computeInstance":{"start":1,"slices":2}}]`,
		inventory.MIGEnable, inventory.MIGDisable, inventory.MIGDestroyCompute, instance, inventory.MIGDestroyInstance,
		instance,
		inventory.MIGCreateInstance, other, inventory.MIGCreateCompute, other)
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
