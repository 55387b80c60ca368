package simulator_test

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestEveryProfile(t *testing.T) {
	want := []string{
		"a100-mig-mixed", "a30-x4", "dgx-1", "dgx-2", "dgx-a100", "dgx-b200", "dgx-h100", "dgx-h200", "gb300-nvl72",
		"h100-mig-1g",
		"h100-nvl-x4", "hgx-h20", "l4-x8", "l40-x4", "l40s-x8", "p100-x4", "rtx-pro-6000-x8", "t4",
	}
	if diff := cmp.Diff(want, simulator.Names()); diff != "" {
		t.Fatalf("Names (-want +got):\n%s", diff)
	}
	for _, name := range simulator.Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, lib := start(t, name)
			p, err := simulator.Load(name)
			if err != nil {
				t.Fatal(err)
			}
			if p.Description == "" {
				t.Error("no description")
			}
			checkIdentities(t, lib)
			checkLinks(t, lib)
			checkMIGNames(t, p, lib)
			checkBoundGPUs(t, n)
		})
	}
}

// handles returns all GPUs of a library.
func handles(t *testing.T, lib nvml.Interface) []nvml.Device {
	t.Helper()
	count, ret := lib.DeviceGetCount()
	must(t, "DeviceGetCount", ret)
	all := make([]nvml.Device, count)
	for i := range all {
		all[i] = handle(t, lib, i)
	}
	return all
}

// address returns the PCI address of a GPU as sysfs writes it.
func address(t *testing.T, d nvml.Device) string {
	t.Helper()
	p, ret := d.GetPciInfo()
	must(t, "GetPciInfo", ret)
	return bdf(p)
}

// bdf returns a PCI address as sysfs writes it.
func bdf(p nvml.PciInfo) string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) }

// uuid returns the UUID of a device.
func uuid(t *testing.T, d nvml.Device) string {
	t.Helper()
	u, ret := d.GetUUID()
	must(t, "GetUUID", ret)
	return u
}

// checkIdentities checks that nothing that names a GPU or MIG device names two, and that look-ups
// lead back.
func checkIdentities(t *testing.T, lib nvml.Interface) {
	t.Helper()
	seen := map[string]bool{}
	claim := func(what string, value any) {
		key := fmt.Sprint(what, value)
		if seen[key] {
			t.Errorf("two devices have the %s %v", what, value)
		}
		seen[key] = true
	}
	for _, d := range handles(t, lib) {
		minor, ret := d.GetMinorNumber()
		must(t, "GetMinorNumber", ret)
		claim("minor", minor)
		claim("PCI address", address(t, d))
		claim("UUID", uuid(t, d))
		for _, m := range migDevices(t, d) {
			claim("UUID", uuid(t, m))
		}
	}
}

// migDevices returns the MIG devices of a GPU.
func migDevices(t *testing.T, d nvml.Device) []nvml.Device {
	t.Helper()
	count, ret := d.GetMaxMigDeviceCount()
	must(t, "GetMaxMigDeviceCount", ret)
	var all []nvml.Device
	for i := range count {
		if m, ret := d.GetMigDeviceHandleByIndex(i); ret == nvml.SUCCESS {
			all = append(all, m)
		}
	}
	return all
}

// checkLinks checks that the NVLinks of all GPUs fit together and that PCIe is as near one way as
// the other.
func checkLinks(t *testing.T, lib nvml.Interface) {
	t.Helper()
	all := handles(t, lib)
	lanes := map[[2]string]int{}
	for i, d := range all {
		links := 0
		for _, ret := d.GetNvLinkState(links); ret == nvml.SUCCESS; _, ret = d.GetNvLinkState(links) {
			links++
		}
		for link := range nvml.NVLINK_MAX_LINKS {
			state, ret := d.GetNvLinkState(link)
			if known := ret == nvml.SUCCESS; known != (link < links) {
				t.Fatalf("GPU %d of %d NVLinks: the state of number %d is %v, %v", i, links, link, state, ret)
			}
			if state != nvml.FEATURE_ENABLED {
				continue
			}
			remote, ret := d.GetNvLinkRemotePciInfo(link)
			must(t, "GetNvLinkRemotePciInfo", ret)
			kind, ret := d.GetNvLinkRemoteDeviceType(link)
			must(t, "GetNvLinkRemoteDeviceType", ret)
			if version, ret := d.GetNvLinkVersion(link); version == 0 || ret != nvml.SUCCESS {
				t.Errorf("the version of NVLink %d of GPU %d is %d, %v", link, i, version, ret)
			}
			peer := bdf(remote)
			lanes[[2]string{address(t, d), peer}]++
			if kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
				lanes[[2]string{peer, address(t, d)}]++
			}
		}
		for j, o := range all[:i] {
			there, ret := d.GetTopologyCommonAncestor(o)
			must(t, "GetTopologyCommonAncestor", ret)
			if back, _ := o.GetTopologyCommonAncestor(d); there != back || there == nvml.TOPOLOGY_INTERNAL {
				t.Errorf("GPU %d is %v from %d, and %v back", i, there, j, back)
			}
		}
	}
	for pair, count := range lanes {
		if back := lanes[[2]string{pair[1], pair[0]}]; back != count {
			t.Errorf("%d NVLinks from %s to %s, %d back", count, pair[0], pair[1], back)
		}
	}
}

// checkMIGNames checks that what the calls say of a MIG device gives the name that the profile
// gives it.
func checkMIGNames(t *testing.T, p simulator.Profile, lib nvml.Interface) {
	t.Helper()
	for i, d := range handles(t, lib) {
		var got []string
		for _, m := range migDevices(t, d) {
			got = append(got, migName(t, d, m))
		}
		want := slices.Sorted(slices.Values(p.GPUs[i].MIG))
		if diff := cmp.Diff(want, slices.Sorted(slices.Values(got))); diff != "" {
			t.Errorf("MIG devices of GPU %d (-want +got):\n%s", i, diff)
		}
	}
}

// migName makes a MIG device's name of what calls say: the eighths of the memory that it has a part
// of.
func migName(t *testing.T, gpu, m nvml.Device) string {
	t.Helper()
	a, ret := m.GetAttributes()
	must(t, "GetAttributes", ret)
	memory, ret := gpu.GetMemoryInfo()
	must(t, "GetMemoryInfo", ret)
	eighths := math.Ceil(float64(a.MemorySizeMB<<20) / float64(memory.Total) * 8)
	name := fmt.Sprintf("%dg.%.0fgb", a.GpuInstanceSliceCount,
		math.Round(eighths/8*math.Ceil(float64(memory.Total)/(1<<30))))
	if a.ComputeInstanceSliceCount < a.GpuInstanceSliceCount {
		name = fmt.Sprintf("%dc.%s", a.ComputeInstanceSliceCount, name)
	}
	id, ret := m.GetGpuInstanceId()
	must(t, "GetGpuInstanceId", ret)
	gi, ret := gpu.GetGpuInstanceById(id)
	must(t, "GetGpuInstanceById", ret)
	info, ret := gi.GetInfo()
	must(t, "GpuInstance.GetInfo", ret)
	media, ret := gpu.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1)
	must(t, "GetGpuInstanceProfileInfo", ret)
	if info.ProfileId == media.Id {
		name += "+me"
	}
	return name
}

func TestIdentitiesAreStable(t *testing.T) {
	first, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	second, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(simulator.New(first).List(), simulator.New(second).List()); diff != "" {
		t.Errorf("two nodes of one profile differ:\n%s", diff)
	}
	if got, want := first.GPUs[0].UUID, "GPU-787a37b7-5768-8cbb-b621-369a695c93a0"; got != want {
		t.Errorf("GPU 0 of dgx-h100 is %s, and was %s in all versions", got, want)
	}
}

func TestTopologyOfDGX1(t *testing.T) {
	_, lib := start(t, "dgx-1")
	lanes := map[string]int{}
	first := handle(t, lib, 0)
	for link := range 6 {
		if info, ret := first.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
			lanes[bdf(info)]++
		}
	}
	want := map[string]int{"0000:07:00.0": 1, "0000:0a:00.0": 1, "0000:0b:00.0": 2, "0000:85:00.0": 2}
	if diff := cmp.Diff(want, lanes); diff != "" {
		t.Errorf("NVLinks of GPU 0 (-want +got):\n%s", diff)
	}
	for peer, want := range map[int]nvml.GpuTopologyLevel{
		0: nvml.TOPOLOGY_INTERNAL, 1: nvml.TOPOLOGY_SINGLE, 2: nvml.TOPOLOGY_HOSTBRIDGE, 4: nvml.TOPOLOGY_SYSTEM,
	} {
		if got, ret := first.GetTopologyCommonAncestor(handle(t, lib, peer)); got != want || ret != nvml.SUCCESS {
			t.Errorf("GPU %d is %v from GPU 0 (%v), want %v", peer, got, ret, want)
		}
	}
}

func TestCommonAncestor(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want nvml.GpuTopologyLevel
	}{
		{"0/0/0", "1/0/0", nvml.TOPOLOGY_SYSTEM},
		{"0/0/0", "0/1/0", nvml.TOPOLOGY_NODE},
		{"0/0/0", "0/0/1", nvml.TOPOLOGY_HOSTBRIDGE},
		{"0/0", "0/0", nvml.TOPOLOGY_HOSTBRIDGE},
		{"0/0/0/0", "0/0/0/1", nvml.TOPOLOGY_MULTIPLE},
		{"0/0/0", "0/0/0/1", nvml.TOPOLOGY_MULTIPLE},
		{"0/0/0", "0/0/0", nvml.TOPOLOGY_SINGLE},
	} {
		file := filepath.Join(t.TempDir(), "two.yaml")
		text := fmt.Sprintf("{description: Two GPUs, driver: 580.1, cuda: \"13.0\", model: l40s, gpus: [{bdf: "+
			"\"0000:01:00.0\", pcie: %s}, "+
			"{bdf: \"0000:02:00.0\", pcie: %s}]}", c.a, c.b)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, lib := start(t, file)
		if got, ret := handle(t, lib, 0).GetTopologyCommonAncestor(handle(t, lib, 1)); got != c.want ||
			ret != nvml.SUCCESS {
			t.Errorf("%s and %s: %v, %v, want %v", c.a, c.b, got, ret, c.want)
		}
	}
}

func TestLoadOfOwnFile(t *testing.T) {
	const good = `
description: mine
driver: 580.1
cuda: "13.0"
model: mine
models:
  mine: {name: My GPU, architecture: hopper, compute: "9.0", memoryMiB: 1024, pci: 233010DE,
    nvlink: {links: 2, version: "4.0"}}
gpus:
- {bdf: "0000:01:00.0", pcie: 0/0, uuid: GPU-mine}
- {bdf: "0000:02:00.0", pcie: 0/0, minor: 5, numa: 3}
nvlinks: [0 2, 2 0]
`
	file := filepath.Join(t.TempDir(), "mine.yml")
	load := func(t *testing.T, text string) (simulator.Profile, error) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return simulator.Load(file)
	}
	p, err := load(t, good)
	if err != nil {
		t.Fatal(err)
	}
	n := simulator.New(p)
	t.Cleanup(n.Close)
	numa, err := fs.ReadFile(n.Root(), "sys/bus/pci/devices/0000:02:00.0/numa_node")
	if p.Name != "mine" || p.GPUs[0].UUID != "GPU-mine" || n.List()[1].Minor != 5 || string(numa) != "3\n" ||
		err != nil {
		t.Errorf("loaded %+v, NUMA node %q, %v", p, numa, err)
	}
	for name, c := range map[string]struct{ replace, by, want string }{
		"unknown key":       {"pcie: 0/0, minor", "pci: 0/0, minor", `unknown field "pci"`},
		"no GPU":            {"gpus:", "gpus: []\nx:", "unknown field"},
		"bad address":       {"0000:01:00.0", "01:00.0", `gpus[0]: "01:00.0" is not a PCI address`},
		"order":             {"0000:01:00.0", "0000:03:00.0", "does not follow 0000:03:00.0"},
		"unknown model":     {"model: mine", "model: h1000", `model "h1000" is not known: give one of a100-sxm4-40gb`},
		"same minor":        {"minor: 5", "minor: 0", "gpus[1]: has the uuid or the minor of gpus[0]"},
		"PCIe":              {"pcie: 0/0, uuid", "pcie: x, uuid", `pcie "x" is not a way`},
		"driver":            {"580.1", "new", `driver "new" is not a version`},
		"CUDA":              {`"13.0"`, `"new"`, `cuda "new" is not a version`},
		"architecture":      {"hopper", "hoper", `architecture "hoper" is not known`},
		"one-sided NVLinks": {"2 0]", "1 0]", "nvlinks[1] has 1 lanes to GPU 0, which has 2 back"},
		"too many NVLinks":  {"[0 2, 2 0]", "[0 3, 3 0]", "GPU 1 or GPU 0 has more lanes than its model has NVLinks"},
		"missing row":       {"[0 2, 2 0]", "[0 2]", "nvlinks has 1 rows for 2 GPUs"},
		"switch and links":  {"nvlinks:", "nvswitches: [\"0000:09:00.0\"]\nnvlinks:", "both given"},
		"MIG without mode":  {"minor: 5", "mig: [1g.10gb]", "gpus[1]: mig: My GPU has no multi-instance mode"},
		"impossible fault": {"nvlinks:", "faults: [{kind: lost, gpu: \"2\"}]\nnvlinks:",
			`faults[0]: inject lost: no GPU or MIG device "2"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t, strings.Replace(good, c.replace, c.by, 1))
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), file) {
				t.Errorf("got %v, want an error with %s that says %s", err, file, c.want)
			}
		})
	}
}

func TestFaultsFromTheStart(t *testing.T) {
	t.Parallel()
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	p.Faults = []simulator.Fault{{Kind: simulator.KindLost, GPU: "2"}, {Kind: simulator.KindRemapFailure, GPU: "5"},
		{Kind: simulator.KindDriver, Driver: "missing"}}
	file := filepath.Join(t.TempDir(), "dgx-h100.yaml")
	text, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	written, err := simulator.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	n := simulator.New(written)
	if ret := n.NVML().Init(); ret != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("Init answers %v", ret)
	}
	gpus := n.List()
	if gpus[2].State != "lost" || len(gpus[5].Faults) != 1 || gpus[0].UUID != simulator.New(p).List()[0].UUID {
		t.Errorf("the node is %+v", gpus)
	}
}

func TestLoadOfNothing(t *testing.T) {
	if _, err := simulator.Load("dgx-h1000"); err == nil ||
		!strings.Contains(err.Error(), "give one of a100-mig-mixed, a30-x4,") {
		t.Errorf("an unknown name: %v", err)
	}
	if _, err := simulator.Load("/no/such/file.yaml"); err == nil ||
		!strings.Contains(err.Error(), "/no/such/file.yaml") {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestLayouts(t *testing.T) {
	for name, c := range map[string]struct {
		devices []string
		want    []string // GI/CI/name, or an error
	}{
		"one size":  {[]string{"1g.10gb", "1g.10gb"}, []string{"7/0/1g.10gb", "8/0/1g.10gb"}},
		"all sizes": {[]string{"1g.10gb", "2g.20gb", "3g.40gb"}, []string{"1/0/3g.40gb", "3/0/2g.20gb", "7/0/1g.10gb"}},
		"parts": {
			[]string{"1c.3g.40gb", "2c.3g.40gb", "1c.3g.40gb"},
			[]string{"1/0/1c.3g.40gb", "1/1/2c.3g.40gb", "2/0/1c.3g.40gb"},
		},
		"too many slices": {
			[]string{"4g.40gb", "3g.40gb", "1g.10gb"}, []string{"need 8 of 7 compute slices and 9 of 8 memory slices"},
		},
		"too many of one": {[]string{"1g.10gb+me", "1g.10gb+me"}, []string{"1g.10gb+me fits 1 times"}},
		"unknown":         {[]string{"1g.5gb"}, []string{`has no MIG device "1g.5gb": it has 1g.10gb, 1g.10gb+me,`}},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := start(t, "a100-mig-mixed")
			if err := n.Inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: c.devices}); err != nil {
				if !strings.Contains(err.Error(), c.want[0]) {
					t.Errorf("got %v, want %s", err, c.want[0])
				}
				return
			}
			var got []string
			for _, m := range n.List()[0].MIG {
				got = append(got, fmt.Sprintf("%d/%d/%s", m.GI, m.CI, m.Profile))
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
