package cdi_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestNodesThatTheHostDoesNotHave: a runtime gives a container the nodes whose numbers are known,
// whether or not somebody has made them on the host. Nobody makes those of a new MIG device there.
func TestNodesThatTheHostDoesNotHave(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	w.Snapshot.Control = inventory.NodeControl | inventory.NodeModeset
	// the driver was loaded again
	for _, majors := range []inventory.Majors{{GPU: 195, UVM: 510, Caps: 234}, {GPU: 195, UVM: 508, Caps: 236}} {
		w.Snapshot.Majors = majors
		h.apply(t, w)
		given := inject(t, h, "k8s.device-plugin.nvidia.com/gpu=MIG-b0")
		want := map[string]oci.LinuxDevice{}
		for path, number := range map[string][2]int{
			"/dev/nvidiactl": {195, 255}, "/dev/nvidia-modeset": {195, 254}, "/dev/nvidia2": {195, 2},
			"/dev/nvidia-uvm": {majors.UVM, 0}, "/dev/nvidia-uvm-tools": {majors.UVM, 1},
			"/dev/nvidia-caps/nvidia-cap30": {majors.Caps, 30}, "/dev/nvidia-caps/nvidia-cap31": {majors.Caps, 31},
		} {
			want[path] = oci.LinuxDevice{Path: path, Type: "c", Major: int64(number[0]), Minor: int64(number[1])}
		}
		got := map[string]oci.LinuxDevice{}
		for _, d := range given.Linux.Devices {
			if d.FileMode != nil && d.Major == int64(majors.Caps) && *d.FileMode != 0o444 {
				t.Errorf("%s has the mode %o", d.Path, *d.FileMode)
			}
			d.FileMode = nil
			got[d.Path] = d
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}
		claimed, err := h.writer.DeviceEdits(w.Snapshot, w.Edits, w.Options)
		if err != nil || !claimed.Has("MIG-b0") {
			t.Errorf("DeviceEdits() = %+v, %v", claimed, err)
		}
	}
}

// TestNodesWithoutNumbers: where the kernel tells no number, the runtime takes that of the host's
// node, and there must be one.
func TestNodesWithoutNumbers(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	w.Snapshot.Majors = inventory.Majors{}
	h.apply(t, w)
	nodes := h.spec(t, "gpu").ContainerEdits.DeviceNodes
	for _, d := range h.spec(t, "gpu").Devices {
		nodes = append(nodes, d.ContainerEdits.DeviceNodes...)
	}
	for _, n := range nodes {
		if n.Type != "" || n.Major != 0 || n.FileMode != nil {
			t.Errorf("%+v", *n)
		}
	}
}

// inject returns what a runtime gives a container by a CDI name.
func inject(t *testing.T, h *host, name string) *oci.Spec {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(h.specs), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	spec := &oci.Spec{Hooks: &oci.Hooks{}}
	if _, err := cache.InjectDevices(spec, name); err != nil {
		t.Fatal(err)
	}
	return spec
}
