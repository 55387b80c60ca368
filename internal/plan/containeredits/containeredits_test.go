package containeredits_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// always are the driver's nodes that most nodes have.
const always = inventory.NodeControl | inventory.NodeUVM | inventory.NodeUVMTools | inventory.NodeModeset

// devices are two replicas of a GPU, and a MIG device, with the given nodes of the driver.
func devices(control inventory.ControlNodes) []resource.Device {
	return []resource.Device{
		{ID: "GPU-b::0", UUID: "GPU-b", GPU: "GPU-b", Index: "1", Minor: 6, Control: control,
			Resource: "nvidia.com/gpu"},
		{ID: "MIG-a::1", UUID: "MIG-a", GPU: "GPU-a", Index: "0:2", Minor: 7, GICap: 12, CICap: 13, Control: control},
		{ID: "GPU-b::7", UUID: "GPU-b", GPU: "GPU-b", Index: "1", Minor: 6, Control: control},
	}
}

func TestEdits(t *testing.T) {
	t.Parallel()
	volumes := []containeredits.Mount{
		{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/GPU-b"},
		{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/MIG-a"},
	}
	names := []string{"k8s.device-plugin.nvidia.com/gpu=GPU-b", "k8s.device-plugin.nvidia.com/gpu=MIG-a"}
	everything := containeredits.Options{IMEX: true, GDRCopy: containeredits.Always, GDS: containeredits.Always,
		MOFED: containeredits.Always}
	with := func(o containeredits.Options, strategies ...containeredits.Strategy) containeredits.Options {
		o.Strategies = strategies
		return o
	}
	for _, tt := range []struct {
		name    string
		options containeredits.Options
		control inventory.ControlNodes
		want    containeredits.Edits
	}{
		{
			name: "envvar", options: with(containeredits.Options{}, containeredits.EnvVar),
			want: containeredits.Edits{Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a"}},
		},
		{
			name: "envvar by index", options: with(containeredits.Options{IDs: containeredits.ByIndex},
				containeredits.EnvVar),
			want: containeredits.Edits{Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "1,0:2"}},
		},
		{
			name: "volume-mounts", options: with(containeredits.Options{}, containeredits.VolumeMounts),
			want: containeredits.Edits{Mounts: volumes,
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}},
		},
		{
			name: "envvar and volume-mounts", options: with(containeredits.Options{}, containeredits.EnvVar,
				containeredits.VolumeMounts),
			want: containeredits.Edits{Mounts: volumes,
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}},
		},
		{
			name: "volume-mounts and envvar", options: with(containeredits.Options{}, containeredits.VolumeMounts,
				containeredits.EnvVar),
			want: containeredits.Edits{Mounts: volumes,
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}},
		},
		{
			name: "cdi-cri", options: with(containeredits.Options{}, containeredits.CDICRI),
			want: containeredits.Edits{Env: map[string]string{}, CDIDevices: names},
		},
		{
			name: "cdi-cri by index, void", options: with(containeredits.Options{IDs: containeredits.ByIndex,
				Void: true, DeviceNodes: true}, containeredits.CDICRI),
			want: containeredits.Edits{
				Env:        map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"},
				CDIDevices: []string{"k8s.device-plugin.nvidia.com/gpu=1", "k8s.device-plugin.nvidia.com/gpu=0:2"},
			},
		},
		{
			name: "both CDI ways", options: with(containeredits.Options{Void: true, AnnotationPrefix: "cdi.k8s.io/"},
				containeredits.CDIAnnotations, containeredits.CDICRI),
			want: containeredits.Edits{
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"}, CDIDevices: names,
				Annotations: map[string]string{
					"cdi.k8s.io/nvidia-device-plugin_5550c37eb8b12feb7c25f53504f18ac4": strings.Join(names, ","),
				},
			},
		},
		{
			name: "a mixed set keeps the value of envvar", options: with(containeredits.Options{Void: true},
				containeredits.CDICRI, containeredits.EnvVar),
			want: containeredits.Edits{Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a"},
				CDIDevices: names},
		},
		{
			name: "companions that the node lacks", options: with(everything, containeredits.EnvVar,
				containeredits.CDICRI), control: always,
			want: containeredits.Edits{
				Env: map[string]string{
					"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a", "NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled",
					"NVIDIA_MOFED": "enabled",
				},
				CDIDevices: names,
			},
		},
		{
			name: "companions", options: with(everything, containeredits.EnvVar,
				containeredits.CDICRI), control: inventory.AllControlNodes,
			want: containeredits.Edits{
				Env: map[string]string{
					"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a", "NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled",
					"NVIDIA_MOFED":         "enabled",
					"NVIDIA_IMEX_CHANNELS": "0",
				},
				CDIDevices: append(slices.Clone(names), "k8s.device-plugin.nvidia.com/imex-channel=0",
					"k8s.device-plugin.nvidia.com/gdrcopy=all", "k8s.device-plugin.nvidia.com/gds=all",
					"k8s.device-plugin.nvidia.com/mofed=all"),
			},
		},
		{
			name: "volume-mounts with an IMEX channel", options: with(containeredits.Options{IMEX: true},
				containeredits.VolumeMounts), control: inventory.AllControlNodes,
			want: containeredits.Edits{
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
				Mounts: append(slices.Clone(volumes),
					containeredits.Mount{HostPath: "/dev/null",
						ContainerPath: "/var/run/nvidia-container-devices/imex/0"}),
			},
		},
		{
			name: "device nodes", options: with(containeredits.Options{DeviceNodes: true, DevRoot: "/", IMEX: true},
				containeredits.EnvVar),
			control: inventory.NodeControl | inventory.NodeUVM | inventory.NodeGDS | inventory.NodeIMEXChannel0,
			want: containeredits.Edits{
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a", "NVIDIA_IMEX_CHANNELS": "0"},
				Nodes: nodes("", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia6", "/dev/nvidia7",
					"/dev/nvidia-caps/nvidia-cap12",
					"/dev/nvidia-caps/nvidia-cap13", "/dev/nvidia-caps-imex-channels/channel0"),
			},
		},
		{
			name: "device nodes of a driver container, beside CDI",
			options: with(containeredits.Options{DeviceNodes: true, DevRoot: "/run/nvidia/driver"},
				containeredits.EnvVar, containeredits.CDICRI), control: always,
			want: containeredits.Edits{
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b,MIG-a"}, CDIDevices: names,
				Nodes: nodes("/run/nvidia/driver", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
					"/dev/nvidia-modeset",
					"/dev/nvidia6", "/dev/nvidia7", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"),
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := containeredits.For(devices(tt.control), tt.options)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("edits (-want +got):\n%s", diff)
			}
		})
	}
}

// nodes are device nodes with the given paths in the container.
func nodes(root string, paths ...string) []containeredits.DeviceNode {
	var all []containeredits.DeviceNode
	for _, p := range paths {
		all = append(all, containeredits.DeviceNode{HostPath: root + p, ContainerPath: p, Permissions: "rw"})
	}
	return all
}

func TestNodesOfTwoMIGDevicesOfOneGPUAreGivenOnce(t *testing.T) {
	t.Parallel()
	two := []resource.Device{
		{UUID: "MIG-a", GPU: "GPU-a", Minor: 3, GICap: 12, CICap: 13}, {UUID: "MIG-b", GPU: "GPU-a", Minor: 3,
			GICap: 12, CICap: 14},
	}
	got, err := containeredits.For(two,
		containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}, DeviceNodes: true})
	if err != nil {
		t.Fatal(err)
	}
	want := nodes("", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13",
		"/dev/nvidia-caps/nvidia-cap14")
	if diff := cmp.Diff(want, got.Nodes); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
}

func TestClientsOfMPS(t *testing.T) {
	t.Parallel()
	d := devices(0)[:1]
	d[0].Sharing, d[0].Resource = resource.MPS, "nvidia.com/gpu.shared"
	got, err := containeredits.For(d,
		containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar},
			MPSRoot: "/run/nvidia/mps"})
	if err != nil {
		t.Fatal(err)
	}
	want := containeredits.Edits{
		Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b",
			"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu.shared/pipe"},
		Mounts: []containeredits.Mount{
			{HostPath: "/run/nvidia/mps/nvidia.com/gpu.shared/pipe", ContainerPath: "/mps/nvidia.com/gpu.shared/pipe"},
			{HostPath: "/run/nvidia/mps/shm", ContainerPath: "/dev/shm"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("edits (-want +got):\n%s", diff)
	}

	// A resource can have devices that are not shared beside those that are. Kubelet names them in any
	// order.
	other := devices(0)[1]
	other.Resource = "nvidia.com/gpu.shared"
	for _, mixed := range [][]resource.Device{{d[0], other}, {other, d[0]}} {
		got, err := containeredits.For(mixed,
			containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar},
				MPSRoot: "/run/nvidia/mps"})
		if err != nil || got.Env["CUDA_MPS_PIPE_DIRECTORY"] != "/mps/nvidia.com/gpu.shared/pipe" ||
			len(got.Mounts) != 2 {
			t.Errorf("%s first: edits %+v, %v; it is to be a client of MPS", mixed[0].UUID, got, err)
		}
	}
}

func TestAnnotationKeysTellRequestsApart(t *testing.T) {
	t.Parallel()
	o := containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDIAnnotations},
		AnnotationPrefix: "cdi.k8s.io/"}
	keys := map[string]bool{}
	for _, request := range [][]resource.Device{devices(0)[:1], devices(0)[1:2], devices(0)} {
		e, err := containeredits.For(request, o)
		if err != nil {
			t.Fatal(err)
		}
		key := slices.Collect(maps.Keys(e.Annotations))[0]
		if _, name, _ := strings.Cut(key, "/"); len(name) > 63 {
			t.Errorf("key %s: the name has %d characters, of which 63 are allowed", key, len(name))
		}
		keys[key] = true
	}
	if len(keys) != 3 {
		t.Errorf("3 requests have the keys %v", keys)
	}
}

func TestCDINames(t *testing.T) {
	t.Parallel()
	old := resource.Device{UUID: "MIG-GPU-a/1/0", Index: "0:1"}
	if got := containeredits.CDIName(old, containeredits.ByUUID); got != "MIG-GPU-a_1_0" {
		t.Errorf("by UUID: %s", got)
	}
	if got := containeredits.CDIName(old, containeredits.ByIndex); got != "0:1" {
		t.Errorf("by index: %s", got)
	}
	o := containeredits.Options{GDS: containeredits.Always, IMEX: true}
	want := map[containeredits.CDIClass]string{containeredits.CDIIMEX: "0", containeredits.CDIGDS: "all"}
	if diff := cmp.Diff(want, containeredits.CDICompanions(inventory.AllControlNodes, o)); diff != "" {
		t.Errorf("companions (-want +got):\n%s", diff)
	}
}

func TestStrategies(t *testing.T) {
	t.Parallel()
	var names []string
	for _, s := range containeredits.AllStrategies {
		names = append(names, s.String())
		o := containeredits.Options{Strategies: []containeredits.Strategy{s}}
		if cdi := strings.HasPrefix(s.String(), "cdi"); o.UsesCDI() != cdi || o.OnlyCDI() != cdi {
			t.Errorf("%s: uses CDI %v, only CDI %v", s, o.UsesCDI(), o.OnlyCDI())
		}
		if _, err := containeredits.For(devices(0), o); err != nil {
			t.Error(err)
		}
	}
	if want := []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri"}; !slices.Equal(names, want) {
		t.Errorf("strategies %q, want %q", names, want)
	}
	if got := fmt.Sprint(containeredits.ByUUID, " ", containeredits.ByIndex, " ",
		containeredits.IDStrategy(9)); got != "uuid index IDStrategy(9)" {
		t.Errorf("ID strategies %s", got)
	}
	if got, err := containeredits.For(nil,
		containeredits.Options{Strategies: []containeredits.Strategy{-1}}); err == nil {
		t.Errorf("unknown strategy: %+v, want an error", got)
	}
}

// TestNodesOfOneGPU: a container with one GPU gets that GPU's node and the driver's, and nothing
// without a device.
func TestNodesOfOneGPU(t *testing.T) {
	t.Parallel()
	o := containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}, DeviceNodes: true}
	one := []resource.Device{{UUID: "GPU-a", GPU: "GPU-a", Minor: 0, Control: inventory.NodeControl}}
	got, err := containeredits.For(one, o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(nodes("", "/dev/nvidiactl", "/dev/nvidia0"), got.Nodes); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if got, err := containeredits.For(nil, o); err != nil || got.Nodes != nil {
		t.Errorf("no device: %+v, %v", got, err)
	}
}

// TestNodesOfMIGDevices: a minor of 0 is one that is not known; 1 is a node.
func TestNodesOfMIGDevices(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		device resource.Device
		want   []string
	}{
		{resource.Device{Minor: 2}, []string{"/dev/nvidia2"}},
		{resource.Device{Minor: 2, GICap: 1, CICap: 1}, []string{"/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap1",
			"/dev/nvidia-caps/nvidia-cap1"}},
		{resource.Device{Minor: 2, GICap: 3}, []string{"/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap3"}},
	} {
		if diff := cmp.Diff(tt.want, containeredits.DevicePaths(tt.device)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.device, diff)
		}
	}
}

// TestCompanionsOneByOne: what the operator wants of the driver's companions gives nothing else.
func TestCompanionsOneByOne(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		options containeredits.Options
		env     map[string]string
		class   containeredits.CDIClass
	}{
		"none": {containeredits.Options{}, nil, ""},
		"GDRCopy": {containeredits.Options{GDRCopy: containeredits.Always},
			map[string]string{"NVIDIA_GDRCOPY": "enabled"}, containeredits.CDIGDRCopy},
		"GDS": {containeredits.Options{GDS: containeredits.Always}, map[string]string{"NVIDIA_GDS": "enabled"},
			containeredits.CDIGDS},
		"MOFED": {containeredits.Options{MOFED: containeredits.Always}, map[string]string{"NVIDIA_MOFED": "enabled"},
			containeredits.CDIMOFED},
		"IMEX": {containeredits.Options{IMEX: true}, map[string]string{"NVIDIA_IMEX_CHANNELS": "0"},
			containeredits.CDIIMEX},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.options.Strategies = []containeredits.Strategy{containeredits.EnvVar, containeredits.CDICRI}
			got, err := containeredits.For(devices(inventory.AllControlNodes)[:1], tt.options)
			if err != nil {
				t.Fatal(err)
			}
			env := map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-b"}
			maps.Copy(env, tt.env)
			if diff := cmp.Diff(env, got.Env); diff != "" {
				t.Errorf("env (-want +got):\n%s", diff)
			}
			companions := containeredits.CDICompanions(inventory.AllControlNodes, tt.options)
			if _, has := companions[tt.class]; len(companions) != len(tt.env) || has != (tt.class != "") {
				t.Errorf("CDI companions %v, want %s", companions, tt.class)
			}
			if len(got.CDIDevices) != 1+len(tt.env) {
				t.Errorf("CDI devices %v", got.CDIDevices)
			}
			if got := containeredits.CDICompanions(0, tt.options); len(got) != 0 {
				t.Errorf("companions of a node that has none: %v", got)
			}
		})
	}
}

// TestCompanionsWhereTheyAre: with auto a container is asked for what its node has, by each way,
// and RDMA devices come with GPUDirect Storage alone.
func TestCompanionsWhereTheyAre(t *testing.T) {
	t.Parallel()
	const always = inventory.NodeControl | inventory.NodeUVM
	for _, tt := range []struct {
		control inventory.ControlNodes
		env     []string
		classes []containeredits.CDIClass
	}{
		{always, nil, nil},
		{always | inventory.NodeRDMA, nil, nil},
		{always | inventory.NodeGDRCopy, []string{"NVIDIA_GDRCOPY"},
			[]containeredits.CDIClass{containeredits.CDIGDRCopy}},
		{always | inventory.NodeGDS, []string{"NVIDIA_GDS"}, []containeredits.CDIClass{containeredits.CDIGDS}},
		{
			inventory.AllControlNodes, []string{"NVIDIA_GDRCOPY", "NVIDIA_GDS", "NVIDIA_MOFED"},
			[]containeredits.CDIClass{containeredits.CDIGDRCopy, containeredits.CDIGDS, containeredits.CDIMOFED},
		},
	} {
		o := containeredits.Options{GDRCopy: containeredits.Auto, GDS: containeredits.Auto, MOFED: containeredits.Auto,
			Strategies: []containeredits.Strategy{containeredits.CDICRI}}
		got, err := containeredits.For(devices(tt.control), o)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.env, slices.Sorted(maps.Keys(got.Env))); diff != "" {
			t.Errorf("a node with %s: env (-want +got):\n%s", tt.control, diff)
		}
		if diff := cmp.Diff(tt.classes,
			slices.Sorted(maps.Keys(containeredits.CDICompanions(tt.control, o)))); diff != "" {
			t.Errorf("a node with %s: CDI companions (-want +got):\n%s", tt.control, diff)
		}
		for _, class := range tt.classes {
			if name := "k8s.device-plugin.nvidia.com/" + string(class) + "=all"; !slices.Contains(got.CDIDevices,
				name) {
				t.Errorf("a node with %s: CDI devices %v lack %s", tt.control, got.CDIDevices, name)
			}
		}
	}
}

// TestNumbersOfNodes: a node has a number where the kernel has its major, and no other file has
// one.
func TestNumbersOfNodes(t *testing.T) {
	t.Parallel()
	majors := inventory.Majors{GPU: 195, UVM: 510, Caps: 234, IMEX: 233}
	for path, want := range map[string]containeredits.Number{
		"/dev/nvidiactl": {Major: 195, Minor: 255}, "/dev/nvidia-modeset": {Major: 195,
			Minor: 254}, "/dev/nvidia12": {Major: 195, Minor: 12},
		"/dev/nvidia-uvm": {Major: 510}, "/dev/nvidia-uvm-tools": {Major: 510, Minor: 1},
		"/dev/nvidia-caps/nvidia-cap30": {Major: 234, Minor: 30,
			Mode: 0o444}, "/dev/nvidia-caps-imex-channels/channel0": {Major: 233},
	} {
		if got, known := containeredits.NumberOf(path, majors); !known || got != want {
			t.Errorf("%s: %+v, %t; want %+v", path, got, known, want)
		}
		if _, known := containeredits.NumberOf(path, inventory.Majors{}); known {
			t.Errorf("%s has a number although the kernel has no major", path)
		}
	}
	for _, path := range []string{"/dev/nvidia", "/dev/nvidia-nvswitch0", "/dev/nvidia-fs0", "/dev/gdrdrv",
		"/dev/dri/card0", "/dev/nvidia-caps/nvidia-cap"} {
		if got, known := containeredits.NumberOf(path, majors); known {
			t.Errorf("%s has the number %+v", path, got)
		}
	}
}
