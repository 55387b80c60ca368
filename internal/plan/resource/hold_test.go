package resource_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// twoResources is a plan of two resources with two devices each, of which the last is not Healthy.
// GPU-0 is in both.
func twoResources() resource.Plan {
	a := resource.NewResource("a", resource.Options{}, linked(1), []resource.Device{
		{ID: "GPU-0", UUID: "GPU-0", Index: "0", Healthy: true}, {ID: "GPU-1", UUID: "GPU-1", Index: "1", Healthy: true},
	})
	b := resource.NewResource("b", resource.Options{}, linked(1), []resource.Device{
		{ID: "GPU-0::0", UUID: "GPU-0", Index: "0", Healthy: true}, {ID: "GPU-2", UUID: "GPU-2", Index: "2", Reason: "bad"},
	})
	return resource.Plan{Resources: []resource.Resource{a, b},
		LeftOut: []resource.LeftOut{{UUID: "GPU-1", Index: "1", Reason: "x"}}}
}

// Holds show devices as Unhealthy or not at all, in one resource or in every one; the reason is the
// hold's.
func TestUnder(t *testing.T) {
	t.Parallel()
	type devices map[string]string // ID → reason, by resource and device
	type holds = []resource.Hold
	none := devices{"a GPU-0": "", "a GPU-1": "", "b GPU-0::0": "", "b GPU-2": "bad"}
	with := func(changed devices, gone ...string) devices {
		all := devices{}
		for key, reason := range none {
			all[key] = reason
		}
		for key, reason := range changed {
			all[key] = reason
		}
		for _, key := range gone {
			delete(all, key)
		}
		return all
	}
	hold := func(name, uuid, reason string) resource.Hold {
		return resource.Hold{Resource: name, UUID: uuid, Reason: reason}
	}
	hide := func(name, uuid, reason string) resource.Hold {
		return resource.Hold{Resource: name, UUID: uuid, Reason: reason, Hidden: true}
	}
	for name, tt := range map[string]struct {
		holds   holds
		want    devices
		leftOut []string // besides GPU-1
	}{
		"none":                {nil, none, nil},
		"of another device":   {holds{hold("", "GPU-9", "x")}, none, nil},
		"of another resource": {holds{hold("c", "GPU-0", "x")}, none, nil},
		"one resource":        {holds{hold("a", "GPU-0", "x")}, with(devices{"a GPU-0": "x"}), nil},
		"every resource":      {holds{hold("", "GPU-0", "x")}, with(devices{"a GPU-0": "x", "b GPU-0::0": "x"}), nil},
		"hidden in one":       {holds{hide("a", "GPU-0", "x")}, with(nil, "a GPU-0"), []string{"GPU-0: x"}},
		"hidden everywhere":   {holds{hide("", "GPU-0", "x")}, with(nil, "a GPU-0", "b GPU-0::0"), []string{"GPU-0: x"}},
		"the first counts": {holds{hold("a", "GPU-0", "x"), hold("a", "GPU-0", "y")}, with(devices{"a GPU-0": "x"}),
			nil},
		"a hidden one counts": {holds{hold("a", "GPU-0", "x"), hide("a", "GPU-0", "y")}, with(nil, "a GPU-0"),
			[]string{"GPU-0: y"}},
		"the first hidden counts": {holds{hide("a", "GPU-0", "x"), hide("a", "GPU-0", "y")}, with(nil, "a GPU-0"),
			[]string{"GPU-0: x"}},
		"hidden, and then not": {holds{hide("a", "GPU-0", "x"), hold("a", "GPU-0", "y")}, with(nil, "a GPU-0"),
			[]string{"GPU-0: x"}},
		"its resource's is closer": {
			holds{hold("", "GPU-0", "x"), hold("a", "GPU-0", "y")}, with(devices{"a GPU-0": "y", "b GPU-0::0": "x"}), nil,
		},
		"hidden everywhere counts": {
			holds{hold("a", "GPU-0", "y"), hide("", "GPU-0", "x")}, with(nil, "a GPU-0", "b GPU-0::0"), []string{"GPU-0: x"},
		},
		"hidden here, held everywhere": {
			holds{hide("a", "GPU-0", "y"), hold("", "GPU-0", "x")}, with(devices{"b GPU-0::0": "x"},
				"a GPU-0"), []string{"GPU-0: y"},
		},
		"hidden both ways": {
			holds{hide("a", "GPU-0", "y"), hide("", "GPU-0", "x")}, with(nil, "a GPU-0", "b GPU-0::0"), []string{"GPU-0: y"},
		},
		"of a bad device": {holds{hold("", "GPU-2", "x")}, none, nil},
		"a resource is empty": {
			holds{hide("", "GPU-0", "x"), hide("", "GPU-1", "y")}, with(nil, "a GPU-0", "a GPU-1", "b GPU-0::0"),
			[]string{"GPU-0: x", "GPU-1: y"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plan := twoResources()
			held := plan.Under(tt.holds)
			got := devices{}
			for _, r := range held.Resources {
				if len(r.Devices) == 0 {
					t.Errorf("resource %s has no device", r.Name)
				}
				for _, d := range r.Devices {
					got[r.Name+" "+d.ID] = d.Reason
					if d.Healthy != (d.Reason == "") {
						t.Errorf("%s is Healthy: %v, and the reason is %q", d.ID, d.Healthy, d.Reason)
					}
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			var leftOut []string
			for i, l := range held.LeftOut {
				if i > 0 && l.Index < held.LeftOut[i-1].Index {
					t.Errorf("left out %+v, not by index", held.LeftOut)
				}
				if l.Reason != "x" || l.UUID != "GPU-1" {
					leftOut = append(leftOut, l.UUID+": "+l.Reason)
				}
			}
			if diff := cmp.Diff(tt.leftOut, leftOut); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
			if len(held.Warnings) != len(tt.leftOut) {
				t.Errorf("warnings %q", held.Warnings)
			}
			if !plan.Equal(twoResources()) {
				t.Error("the plan that was held has changed")
			}
		})
	}
}

// TestUnderGPUs: a hold on a GPU keeps all its devices but those of some instances. A GPU about
// which nothing is decided is in no list.
func TestUnderGPUs(t *testing.T) {
	t.Parallel()
	gpus := []inventory.GPU{gpu(0), gpu(1, "1g.10gb", "1g.10gb"), gpu(2), gpu(3)}
	plan := resource.New(inventory.Snapshot{GPUs: gpus}, resource.Options{MIG: resource.MIGMixed})
	held := plan.UnderGPUs(map[string]resource.GPUHold{
		"GPU-a": {Kept: []int{9}}, "GPU-b": {Reason: "it is divided again", Kept: []int{7}}, "GPU-d": {Reason: "it waits"},
	})
	got := map[string]string{}
	for _, r := range held.Resources {
		for _, d := range r.Devices {
			got[d.ID] = d.Reason
		}
	}
	want := map[string]string{"GPU-a": "", "MIG-b0": "", "MIG-b1": "it is divided again", "GPU-d": "it waits"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	leftOut := []resource.LeftOut{{UUID: "GPU-c", Index: "2", Reason: "it is not known yet how its GPU is to be divided"}}
	if diff := cmp.Diff(leftOut, held.LeftOut); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
}

// TestHoldsThatWait: for each device one reason counts: its health, a hold that hides it, or else
// the first hold. The other holds wait.
func TestHoldsThatWait(t *testing.T) {
	t.Parallel()
	hold := func(uuid, reason string) []resource.Hold { return []resource.Hold{{UUID: uuid, Reason: reason}} }
	hide := func(uuid, reason string) []resource.Hold {
		return []resource.Hold{{UUID: uuid, Reason: reason, Hidden: true}}
	}
	for name, tt := range map[string]struct {
		holds [][]resource.Hold // one after the other
		want  string
	}{
		"one":                    {[][]resource.Hold{hold("GPU-1", "x")}, "a GPU-1 x"},
		"a second one":           {[][]resource.Hold{hold("GPU-1", "x"), hold("GPU-1", "y")}, "a GPU-1 x; a GPU-1 y waits"},
		"the same again":         {[][]resource.Hold{hold("GPU-1", "x"), hold("GPU-1", "x")}, "a GPU-1 x"},
		"of a bad device":        {[][]resource.Hold{hold("GPU-2", "x")}, "b GPU-2 x waits"},
		"a bad device is hidden": {[][]resource.Hold{hide("GPU-2", "x")}, "b GPU-2 x"},
		"one that hides":         {[][]resource.Hold{hold("GPU-1", "x"), hide("GPU-1", "y")}, "a GPU-1 x waits; a GPU-1 y"},
		"hidden already":         {[][]resource.Hold{hide("GPU-1", "x"), hold("GPU-1", "y")}, "a GPU-1 x"},
		"of two resources": {[][]resource.Hold{hold("GPU-0", "x"), {{Resource: "b", UUID: "GPU-0", Reason: "y"}}},
			"a GPU-0 x; b GPU-0 x; b GPU-0 y waits"},
		"hidden in one": {[][]resource.Hold{hold("GPU-0", "x"), {{Resource: "b", UUID: "GPU-0", Reason: "y", Hidden: true}}},
			"a GPU-0 x; b GPU-0 x waits; b GPU-0 y"},
	} {
		plan := twoResources()
		for _, holds := range tt.holds {
			before, was := plan, slices.Clone(plan.Holds)
			plan = plan.Under(holds)
			if !slices.Equal(before.Holds, was) {
				t.Errorf("%s: the holds of the plan before have changed: %v", name, before.Holds)
			}
		}
		var got []string
		for _, h := range plan.Holds {
			text := h.Resource + " " + h.UUID + " " + h.Reason
			if h.Waits {
				text += " waits"
			}
			got = append(got, text)
		}
		if text := strings.Join(got, "; "); text != tt.want {
			t.Errorf("%s: %q, want %q", name, text, tt.want)
		}
	}
}

// TestTheOrderOfHolds: whatever is put on first, the hold with the lowest row counts, the holds are
// listed by row, and the others wait.
func TestTheOrderOfHolds(t *testing.T) {
	t.Parallel()
	hold := func(row resource.Row, reason string) resource.Hold {
		return resource.Hold{Resource: "a", UUID: "GPU-0", Row: row, Reason: reason}
	}
	mps, files, form := hold(resource.RowMPS, "mps"), hold(resource.RowFiles, "files"), hold(resource.RowForm, "form")
	for _, order := range [][]resource.Hold{
		{mps, files, form}, {mps, form, files}, {files, mps, form},
		{files, form, mps}, {form, mps, files}, {form, files, mps},
	} {
		plan := twoResources()
		for _, h := range order {
			plan = plan.Under([]resource.Hold{h})
		}
		if d := plan.Resources[0].Devices[0]; d.Healthy || d.Reason != "mps" {
			t.Errorf("%v: the device is Healthy: %v, by %q", order, d.Healthy, d.Reason)
		}
		for i, want := range []resource.Hold{mps, files, form} {
			if want.Waits = i > 0; plan.Holds[i] != want {
				t.Errorf("%v: hold %d is %+v", order, i, plan.Holds[i])
			}
		}
		files := files
		files.Hidden, files.Reason = true, "lost"
		if plan = plan.Under([]resource.Hold{files}); !plan.Resources[0].Lacks("GPU-0") || !plan.Holds[0].Waits {
			t.Errorf("%v: a hidden device is listed, or the hold %+v counts", order, plan.Holds[0])
		}
	}
}

// TestSparedReplicas: a hold leaves the first Healthy replicas alone.
func TestSparedReplicas(t *testing.T) {
	t.Parallel()
	o := resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{{Name: resource.WholeGPU, Replicas: 3}}}}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1)}}, o)
	plan = plan.Under([]resource.Hold{{UUID: "GPU-b", Reason: "sick", Row: resource.RowCUDA}})
	plan = plan.Under([]resource.Hold{{UUID: "GPU-a", Reason: "a moment ago", Row: resource.RowGrowth, Spared: 2},
		{UUID: "GPU-b", Reason: "a moment ago", Row: resource.RowGrowth, Spared: 2}})
	var got []string
	for _, d := range plan.Resources[0].Devices {
		got = append(got, d.Reason)
	}
	if want := []string{"", "", "a moment ago", "sick", "sick", "sick"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestHoldsOfAnotherOwner: a GPU that pods get by claims has a hold with that reason.
func TestHoldsOfAnotherOwner(t *testing.T) {
	t.Parallel()
	o := resource.Options{NotOffered: map[string]string{"GPU-a": "pods get it by claims"}}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1)}}, o)
	want := []resource.Hold{{UUID: "GPU-a", Reason: "pods get it by claims", Row: resource.RowOwner, Hidden: true}}
	if diff := cmp.Diff(want, plan.Holds); diff != "" || !want[0].Row.IsRoutine() {
		t.Errorf("holds (-want +got):\n%s", diff)
	}
}
