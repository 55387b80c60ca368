package cdi_test

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const version = "615.71.05"

// A host is a file system with a driver in it, and a directory for specs beside it.
type host struct {
	root, specs string
	writer      *cdi.Writer
}

// newHost returns a host with files of the given paths.
func newHost(t *testing.T, paths ...string) *host {
	t.Helper()
	h := &host{root: t.TempDir(), specs: filepath.Join(t.TempDir(), "cdi")}
	for _, p := range paths {
		h.add(t, p)
	}
	h.writer = cdi.NewWriter(h.specs, os.DirFS(h.root))
	return h
}

func (h *host) add(t *testing.T, path string) {
	t.Helper()
	path = filepath.Join(h.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// library makes a shared library with a soname.
func (h *host) library(t *testing.T, path, soname string) {
	t.Helper()
	h.add(t, path)
	c := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", "-Wl,-soname,"+soname, "-x", "c", "-o",
		filepath.Join(h.root, path), os.DevNull)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
}

// driverFiles are files of a driver in a Debian-like root that is seen at /driver-root.
func driverFiles(more ...string) []string {
	return append([]string{
		"driver-root/usr/lib/x86_64-linux-gnu/libcuda.so." + version,
		"driver-root/usr/lib/x86_64-linux-gnu/libcuda.so.1",
		"driver-root/usr/lib/x86_64-linux-gnu/libcuda.so.470.1", "driver-root/usr/lib/x86_64-linux-gnu/libother.so.1",
		"driver-root/usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so." + version,
		"driver-root/usr/lib/x86_64-linux-gnu/libnvidia-nvvm70.so.4", "driver-root/usr/bin/nvidia-smi",
		"driver-root/bin/nvidia-smi",
		"driver-root/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin",
		"driver-root/lib/firmware/nvidia/470.1/gsp.bin",
		"driver-root/usr/share/nvidia/nvoptix.bin", "driver-root/run/nvidia-persistenced/socket",
	}, more...)
}

// wanted is a node with a whole GPU and a partitioned one.
func wanted() cdi.Wanted {
	healthy := inventory.Health{State: inventory.Healthy}
	snapshot := inventory.Snapshot{
		Driver: inventory.Driver{Version: version}, Control: inventory.NodeControl | inventory.NodeUVM,
		GPUs: []inventory.GPU{
			{UUID: "GPU-a", Index: 0, Minor: 3, BDF: "0000:1b:00.0", Health: healthy},
			{
				UUID: "GPU-b", Index: 1, Minor: 2, BDF: "0000:1c:00.0", Health: healthy, MIG: inventory.MIGEnabled,
				MIGDevices: []inventory.MIGDevice{{UUID: "MIG-b0", Index: 0, GI: 1, GICap: 30, CICap: 31,
					Profile: "1g.10gb", Health: healthy}},
			},
		},
	}
	return cdi.Wanted{
		Snapshot: snapshot,
		Plan: resource.New(snapshot, resource.Options{MIG: resource.MIGMixed, Sharing: resource.Sharing{
			Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 3}},
		}}),
		Edits:   containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}, Void: true},
		Options: cdi.Options{DriverRoot: "/", ContainerDriverRoot: "/driver-root"},
	}
}

func (h *host) apply(t *testing.T, w cdi.Wanted) cdi.Written {
	t.Helper()
	written, err := h.writer.Apply(w)
	if err != nil {
		t.Fatal(err)
	}
	if lacks := written.Lacks(w); len(lacks) > 0 {
		t.Fatalf("written, and lacks %v", lacks)
	}
	return written
}

// spec reads a spec file as a runtime does.
func (h *host) spec(t *testing.T, class string) *specs.Spec {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(h.specs), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatalf("the directory has errors: %v", errs)
	}
	for _, s := range cache.GetVendorSpecs("k8s.device-plugin.nvidia.com") {
		if s.GetClass() == class {
			return s.Spec
		}
	}
	t.Fatalf("no spec of class %s", class)
	return nil
}

func node(path string) *specs.DeviceNode { return &specs.DeviceNode{Path: path} }

func mount(host, container string, options ...string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: options}
}

func TestSpecWithHooks(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles("sys/bus/pci/devices/0000:1b:00.0/drm/card1/x",
		"sys/bus/pci/devices/0000:1b:00.0/drm/renderD128/x", "sys/bus/pci/devices/0000:1b:00.0/drm/controlD64/x")...)
	h.program(t, "driver-root/usr/bin/nvidia-cdi-hook", newHook)
	h.library(t, "driver-root/usr/lib/x86_64-linux-gnu/libcuda.so."+version, "libcuda.so.1")
	h.apply(t, wanted())
	const lib = "/usr/lib/x86_64-linux-gnu"
	ro := []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}
	same := func(path string) *specs.Mount { return mount(path, path, ro...) }
	hook := func(args ...string) *specs.Hook {
		return &specs.Hook{
			HookName: "createContainer", Path: "/usr/bin/nvidia-cdi-hook", Args: append([]string{"nvidia-cdi-hook"},
				args...),
			Env: []string{"NVIDIA_CTK_DEBUG=false"},
		}
	}
	limits := hook("apply-cuda-memory-limits", "--driver-root", "/", "--gpu-id", "GPU-a")
	limits.HookName = "createRuntime"
	gpu := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{node("/dev/nvidia3"), node("/dev/dri/card1"), node("/dev/dri/renderD128")},
		Hooks: []*specs.Hook{hook("create-symlinks", "--link", "../card1::/dev/dri/by-path/pci-0000:1b:00.0-card",
			"--link", "../renderD128::/dev/dri/by-path/pci-0000:1b:00.0-render"), limits},
	}
	mig := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
		node("/dev/nvidia2"), node("/dev/nvidia-caps/nvidia-cap30"), node("/dev/nvidia-caps/nvidia-cap31"),
	}}
	want := &specs.Spec{
		Version: "0.5.0", Kind: "k8s.device-plugin.nvidia.com/gpu",
		Devices: []specs.Device{{Name: "0", ContainerEdits: gpu}, {Name: "1:0", ContainerEdits: mig},
			{Name: "GPU-a", ContainerEdits: gpu},
			{Name: "MIG-b0", ContainerEdits: mig}, {Name: "all", ContainerEdits: specs.ContainerEdits{
				DeviceNodes: slices.Concat(gpu.DeviceNodes, mig.DeviceNodes), Hooks: gpu.Hooks,
			}}},
		ContainerEdits: specs.ContainerEdits{
			Env:         []string{"NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_CTK_LIBCUDA_DIR=" + lib},
			DeviceNodes: []*specs.DeviceNode{node("/dev/nvidiactl"), node("/dev/nvidia-uvm")},
			Mounts: []*specs.Mount{
				same(lib + "/libcuda.so." + version), same(lib + "/vdpau/libvdpau_nvidia.so." + version), same(lib +
					"/libnvidia-nvvm70.so.4"),
				same("/usr/bin/nvidia-smi"), same("/usr/share/nvidia/nvoptix.bin"),
				same("/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin"),
				mount("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket", "nosuid", "nodev", "rbind",
					"rprivate", "noexec"),
			},
			Hooks: []*specs.Hook{
				hook("create-symlinks", "--link", "libcuda.so."+version+"::"+lib+"/libcuda.so.1", "--link",
					"libcuda.so.1::"+lib+"/libcuda.so"),
				hook("enable-cuda-compat", "--host-driver-version="+version),
				hook("update-ldcache", "--folder", lib, "--folder", lib+"/vdpau"),
				hook("disable-device-node-modification"),
				hook("update-application-profile"),
			},
		},
	}
	if diff := cmp.Diff(want, h.spec(t, "gpu")); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
}

func TestSpecWithoutHooksPutsLibrariesWhereLoadersLook(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.library(t, "driver-root/lib64/libcuda.so."+version, "libcuda.so.1")
	h.library(t, "driver-root/lib64/libnvidia-gpucomp.so."+version, "libnvidia-gpucomp.so."+version)
	w := wanted()
	w.Options.DriverRoot = "/usr/local/nvidia"
	h.apply(t, w)
	got := map[string]string{}
	spec := h.spec(t, "gpu")
	for _, m := range spec.ContainerEdits.Mounts {
		got[m.ContainerPath] = m.HostPath
	}
	want := map[string]string{}
	debian := map[string]string{"amd64": "/usr/lib/x86_64-linux-gnu/", "arm64": "/usr/lib/aarch64-linux-gnu/"}
	for _, folder := range []string{"/usr/lib64/", debian[runtime.GOARCH]} {
		for _, name := range []string{"libcuda.so", "libcuda.so.1", "libcuda.so." + version} {
			want[folder+name] = "/usr/local/nvidia/lib64/libcuda.so." + version
		}
		want[folder+"libnvidia-gpucomp.so."+version] = "/usr/local/nvidia/lib64/libnvidia-gpucomp.so." + version
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	if n := len(spec.ContainerEdits.Mounts); n != len(got) {
		t.Errorf("%d mounts at %d paths", n, len(got))
	}
	if len(spec.ContainerEdits.Hooks) > 0 || len(spec.ContainerEdits.Env) != 1 {
		t.Errorf("hooks %v, environment %q", spec.ContainerEdits.Hooks, spec.ContainerEdits.Env)
	}
}

func TestNamesByIndexAndAnotherDevRootNeedANewerSpec(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*cdi.Wanted){
		func(w *cdi.Wanted) { w.Edits.IDs = containeredits.ByIndex },
		func(w *cdi.Wanted) { w.Edits.DevRoot = "/run/nvidia/driver" },
	} {
		h := newHost(t, driverFiles()...)
		w := wanted()
		change(&w)
		h.apply(t, w)
		spec := h.spec(t, "gpu")
		if spec.Version != "0.5.0" {
			t.Errorf("version %s", spec.Version)
		}
		if host := spec.ContainerEdits.DeviceNodes[0].HostPath; w.Edits.DevRoot != "" &&
			host != "/run/nvidia/driver/dev/nvidiactl" {
			t.Errorf("host path %s", host)
		}
	}
}

func TestCompanionsHaveSpecsOfTheirOwn(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles("dev/nvidia-fs0", "dev/nvidia-fs1", "dev/gdrdrv", "driver-root/dev/infiniband/rdma_cm",
		"driver-root/dev/infiniband/uverbs0", "dev/nvidia-caps-imex-channels/channel0", "etc/cufile.json",
		"driver-root/run/udev/x")...)
	w := wanted()
	w.Snapshot.Control = inventory.AllControlNodes
	w.Edits.GDS, w.Edits.MOFED, w.Edits.GDRCopy, w.Edits.IMEX = containeredits.Always, containeredits.Always,
		containeredits.Always, true
	h.apply(t, w)
	for class, want := range map[string]string{
		"gds": "all: /dev/nvidia-fs0 /dev/nvidia-fs1 /run/udev /etc/cufile.json", "gdrcopy": "all: /dev/gdrdrv",
		"mofed":        "all: /dev/infiniband/uverbs0 /dev/infiniband/rdma_cm",
		"imex-channel": "0: /dev/nvidia-caps-imex-channels/channel0",
	} {
		d := h.spec(t, class).Devices[0]
		got := d.Name + ":"
		for _, n := range d.ContainerEdits.DeviceNodes {
			got += " " + n.Path
		}
		for _, m := range d.ContainerEdits.Mounts {
			got += " " + m.ContainerPath
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", class, got, want)
		}
	}
}

// TestHostPathsOfGDS: the host has the files of GPUDirect Storage below the driver root, and else
// where this process sees them.
func TestHostPathsOfGDS(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles("dev/nvidia-fs0", "driver-root/run/udev/x", "etc/cufile.json")...)
	w := wanted()
	w.Snapshot.Control = inventory.AllControlNodes
	w.Edits.GDS = containeredits.Always
	for root, want := range map[string][]string{
		"/":                  {"/run/udev to /run/udev", "/etc/cufile.json to /etc/cufile.json"},
		"/run/nvidia/driver": {"/run/nvidia/driver/run/udev to /run/udev", "/etc/cufile.json to /etc/cufile.json"},
	} {
		w.Options.DriverRoot = root
		h.apply(t, w)
		var got []string
		for _, m := range h.spec(t, "gds").Devices[0].ContainerEdits.Mounts {
			got = append(got, m.HostPath+" to "+m.ContainerPath)
		}
		if !slices.Equal(got, want) {
			t.Errorf("driver root %s: mounts %q, want %q", root, got, want)
		}
	}
}

// TestVoidInSpecs: a spec has the variable whatever is used beside CDI.
func TestVoidInSpecs(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	for _, strategies := range [][]containeredits.Strategy{{containeredits.CDICRI},
		{containeredits.EnvVar, containeredits.CDICRI}, {containeredits.VolumeMounts, containeredits.CDIAnnotations}} {
		for _, void := range []bool{true, false} {
			w := wanted()
			w.Edits.Strategies, w.Edits.Void = strategies, void
			h.apply(t, w)
			if got := slices.Contains(h.spec(t, "gpu").ContainerEdits.Env, "NVIDIA_VISIBLE_DEVICES=void"); got != void {
				t.Errorf("%v: the spec has it: %v, want %v", strategies, got, void)
			}
		}
	}
}

// Every name that a container is given is in a spec.
func TestEveryNameOfEditsResolves(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles("dev/nvidia-fs0", "dev/gdrdrv", "dev/infiniband/rdma_cm",
		"dev/nvidia-caps-imex-channels/channel0")...)
	for _, ids := range []containeredits.IDStrategy{containeredits.ByUUID, containeredits.ByIndex} {
		w := wanted()
		w.Snapshot.Control = inventory.AllControlNodes
		w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
		w.Edits.IDs = ids
		w.Edits.GDS, w.Edits.MOFED, w.Edits.GDRCopy, w.Edits.IMEX = containeredits.Always, containeredits.Always,
			containeredits.Always, true
		h.apply(t, w)
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(h.specs), cdilib.WithAutoRefresh(false))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range w.Plan.Resources {
			e, err := containeredits.For(r.Devices, w.Edits)
			if err != nil {
				t.Fatal(err)
			}
			if len(e.CDIDevices) != 5 {
				t.Errorf("names %q", e.CDIDevices)
			}
			for _, name := range e.CDIDevices {
				if cache.GetDevice(name) == nil {
					t.Errorf("%s is in no spec", name)
				}
			}
		}
	}
}

func TestUnchangedSpecsAreNotWritten(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	h.apply(t, wanted())
	path := filepath.Join(h.specs, "k8s.device-plugin.nvidia.com-gpu.json")
	stat := func() os.FileInfo {
		t.Helper()
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	first := stat()
	if first.Mode().Perm() != 0o644 {
		t.Errorf("mode %s: users' own runtimes read the file, too", first.Mode())
	}
	if info, err := os.Stat(h.specs); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the folder: %v, %v", info.Mode(), err)
	}
	h.apply(t, wanted())
	if !os.SameFile(first, stat()) {
		t.Error("the file was written again without need")
	}
	h.add(t, "driver-root/usr/bin/nvidia-imex")
	h.apply(t, wanted())
	if os.SameFile(first, stat()) {
		t.Error("the file was not written again")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	h.apply(t, wanted())
	for _, junk := range []string{"", "{", `{"kind": "x/y"}`} {
		if err := os.WriteFile(path, []byte(junk), 0o600); err != nil {
			t.Fatal(err)
		}
		h.apply(t, wanted())
		if got := len(h.spec(t, "gpu").Devices); got != 5 {
			t.Errorf("after %q: %d devices", junk, got)
		}
	}
}

// TestLinkInPlaceOfSpec is replaced by a file: what it points to keeps its mode and its
// content.
func TestLinkInPlaceOfSpec(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	h.apply(t, wanted())
	path, elsewhere := filepath.Join(h.specs, "k8s.device-plugin.nvidia.com-gpu.json"), filepath.Join(t.TempDir(),
		"elsewhere")
	if err := errors.Join(os.Rename(path, elsewhere), os.Chmod(elsewhere, 0o600),
		os.Symlink(elsewhere, path)); err != nil {
		t.Fatal(err)
	}
	h.apply(t, wanted())
	if info, err := os.Stat(elsewhere); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file that the link points to: %v, %v", info.Mode(), err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("the spec: %v, %v", info.Mode(), err)
	}
}

func TestOtherFilesAreLeftAlone(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	others := map[string]string{"nvidia.yaml": "kind: nvidia.com/gpu", "k8s.device-plugin.nvidia.com-gds.json": "{}"}
	if err := os.MkdirAll(h.specs, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range others {
		if err := os.WriteFile(filepath.Join(h.specs, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h.apply(t, wanted())
	for name, text := range others {
		if data, err := os.ReadFile(filepath.Join(h.specs, name)); err != nil || string(data) != text {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	entries, err := os.ReadDir(h.specs)
	if err != nil || len(entries) != 3 {
		t.Errorf("directory has %v, %v", entries, err)
	}
}

func TestUnwritableSpecs(t *testing.T) {
	t.Parallel()
	noDriver := newHost(t, "driver-root/usr/lib64/libcuda.so.470.1")
	notADirectory := newHost(t, driverFiles()...)
	if err := os.WriteFile(notADirectory.specs, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	noCompanion := newHost(t, driverFiles()...)
	companion := wanted()
	// but no node to be found
	companion.Snapshot.Control, companion.Edits.GDS = inventory.AllControlNodes, containeredits.Always
	for name, tt := range map[string]struct {
		host   *host
		wanted cdi.Wanted
		says   string
	}{
		"no libraries":      {noDriver, wanted(), "no driver libraries: libcuda.so." + version + " is in none of"},
		"no directory":      {notADirectory, wanted(), "write the CDI spec of k8s.device-plugin.nvidia.com/gpu"},
		"no companion node": {noCompanion, companion, "write the CDI spec of k8s.device-plugin.nvidia.com/gds"},
	} {
		written, err := tt.host.writer.Apply(tt.wanted)
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		lacks := written.Lacks(tt.wanted)
		if got := slices.Sorted(maps.Keys(lacks)); !slices.Equal(got, []string{"GPU-a", "MIG-b0"}) ||
			lacks["GPU-a"] != err.Error() {
			t.Errorf("%s: lacks %v", name, lacks)
		}
	}
	var nothing cdi.Written
	if lacks := nothing.Lacks(wanted()); lacks["GPU-a"] != "its CDI spec is not written yet" {
		t.Errorf("before the first write: lacks %v", lacks)
	}
}

// A write that fails takes no device away whose name is in the file already.
func TestPartlyUnwritableSpecs(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	h.apply(t, wanted())
	w := wanted()
	w.Snapshot.GPUs[1].MIGDevices[0].UUID = "no CDI name"
	w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
	written, err := h.writer.Apply(w)
	if err == nil {
		t.Fatal("written")
	}
	if got := slices.Collect(maps.Keys(written.Lacks(w))); !slices.Equal(got, []string{"no CDI name"}) {
		t.Errorf("lacks %q", got)
	}
	w.Snapshot.GPUs[0].Minor = 5
	w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
	written, err = h.writer.Apply(w)
	if lacks := written.Lacks(w); err == nil || len(lacks) != 2 || lacks["GPU-a"] == "" {
		t.Errorf("lacks %v, %v, although GPU-a has another device node", lacks, err)
	}
	w.Snapshot.GPUs[0].Minor = 3
	w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
	w.Snapshot.Control |= inventory.NodeModeset // every device of the file is given in another way now
	written, err = h.writer.Apply(w)
	if err == nil || len(written.Lacks(w)) != 2 {
		t.Errorf("lacks %v, %v", written.Lacks(w), err)
	}
}
