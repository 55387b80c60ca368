package claims

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install" // registers the conversions
	"k8s.io/kubernetes/pkg/apis/resource/validation"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const node = "node-1"

// scan returns what a simulated machine has, all of it in the state.
func scan(t *testing.T, name string, h inventory.Health) inventory.Snapshot {
	t.Helper()
	profile, err := simulator.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	n := simulator.New(profile)
	t.Cleanup(n.Close)
	session, err := nvidia.New(nvidia.Options{Library: n.NVML(), Root: n.Root()}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := session.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	s, err := session.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		s.GPUs[i].Health = h
		s.GPUs[i].MIGDevices = slices.Clone(s.GPUs[i].MIGDevices)
		for j := range s.GPUs[i].MIGDevices {
			s.GPUs[i].MIGDevices[j].Health = h
		}
	}
	return s
}

// publish returns the slices of a Snapshot as objects of the API.
func publish(t *testing.T, s inventory.Snapshot) []*resourceapi.ResourceSlice {
	t.Helper()
	return objects(t, dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil))
}

// objects returns the slices of a pool as objects of the API; nothing in them may be unknown to it.
func objects(t *testing.T, pool dra.Pool) []*resourceapi.ResourceSlice {
	t.Helper()
	text, err := json.Marshal(pool.List())
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		APIVersion string                       `json:"apiVersion"`
		Kind       string                       `json:"kind"`
		Items      []*resourceapi.ResourceSlice `json:"items"`
	}
	if err := yaml.UnmarshalStrict(text, &list); err != nil {
		t.Fatalf("the slices are not of the API: %v", err)
	}
	return list.Items
}

// internal returns the API server's form of a slice.
func internal(t *testing.T, slice *resourceapi.ResourceSlice) *resource.ResourceSlice {
	t.Helper()
	legacyscheme.Scheme.Default(slice)
	var converted resource.ResourceSlice
	if err := legacyscheme.Scheme.Convert(slice, &converted, nil); err != nil {
		t.Fatal(err)
	}
	return &converted
}

// refused returns what the API server says against the creation of a slice.
func refused(t *testing.T, slice *resourceapi.ResourceSlice) field.ErrorList {
	t.Helper()
	return append(validation.ValidateResourceSlice(internal(t, slice)),
		legacyscheme.Scheme.Validate(t.Context(), options, slice)...)
}

// TestSlicesAreValid has the API server validate the slices of all simulated machines, new ones and
// ones whose devices all got taints.
func TestSlicesAreValid(t *testing.T) {
	since := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	for _, name := range append(simulator.Names(), "") {
		var s, bad inventory.Snapshot // of a node without GPUs
		if name != "" {
			s = scan(t, name, inventory.Health{State: inventory.Healthy})
			bad = scan(t, name, inventory.Health{State: inventory.Unhealthy, XID: 48, Since: since})
			for i := range bad.GPUs {
				bad.GPUs[i].Clique = "3a1f2b4c-0d5e-4f60-8172-93a4b5c6d7e8.5"
			}
		}
		good, tainted := publish(t, s), publish(t, bad)
		for i := range good {
			if errs := refused(t, good[i]); len(errs) > 0 {
				t.Errorf("%s, slice %d is refused: %v", name, i, errs)
			}
			before, after := internal(t, good[i]), internal(t, tainted[i])
			before.ResourceVersion, after.ResourceVersion = "1", "1"
			errs := append(validation.ValidateResourceSliceUpdate(after, before),
				legacyscheme.Scheme.ValidateUpdate(t.Context(), options, tainted[i], good[i])...)
			if len(errs) > 0 {
				t.Errorf("%s, slice %d is refused with taints: %v", name, i, errs)
			}
		}
	}
	wrong := publish(t, scan(t, "t4", inventory.Health{State: inventory.Healthy}))[0]
	wrong.Spec.Devices[0].Name = "GPU"
	if len(refused(t, wrong)) == 0 {
		t.Error("a device with an impossible name is not refused: nothing is validated")
	}
}
