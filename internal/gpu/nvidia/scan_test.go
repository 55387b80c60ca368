package nvidia_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// links renders the links of a GPU as a row of nvidia-smi topo -m, with SW in place of NV for lanes
// through a switch.
func links(g inventory.GPU, gpus int) string {
	cells := slices.Repeat([]string{"-"}, gpus)
	cells[g.Index] = "X"
	for _, l := range g.Links {
		cells[l.PeerIndex] = l.PCIe.String()
		if l.NVLinks > 0 {
			kind := map[bool]string{false: "NV", true: "SW"}[l.Switched]
			cells[l.PeerIndex] = fmt.Sprintf("%s%d/%s", kind, l.NVLinks, l.PCIe)
		}
	}
	return strings.Join(cells, " ")
}

// each returns what f says of every GPU.
func each[T any](s inventory.Snapshot, f func(inventory.GPU) T) []T {
	var all []T
	for _, g := range s.GPUs {
		all = append(all, f(g))
	}
	return all
}

// migDevices lists the MIG devices of a GPU by index, GI, CI and profile.
func migDevices(g inventory.GPU) string {
	var all []string
	for _, m := range g.MIGDevices {
		all = append(all, fmt.Sprintf("%d=%d/%d:%s", m.Index, m.GI, m.CI, m.Profile))
	}
	return strings.Join(all, " ")
}

func TestScanProfiles(t *testing.T) {
	t.Parallel()
	sevens := func(profile string) string {
		var all []string
		for i := range 7 {
			all = append(all, fmt.Sprintf("%d=%d/0:%s", i, 7+i, profile))
		}
		return strings.Join(all, " ")
	}
	halves := []int{0, 0, 0, 0, 1, 1, 1, 1}
	dgxA100 := []int{3, 3, 1, 1, 7, 7, 5, 5}
	a100Minors := []int{2, 3, 0, 1, 6, 7, 4, 5}
	inOrder := []int{0, 1, 2, 3, 4, 5, 6, 7}
	for profile, want := range map[string]struct {
		driver  inventory.Driver
		gpu     string // of all GPUs: model, MiB, architecture, compute capability, MIG mode
		minors  []int
		nodes   []int
		links   []string // of the first GPUs
		version int      // of NVLink
		mig     []string
	}{
		"dgx-1": {
			driver: inventory.Driver{Version: "470.256.02", CUDA: "11.4"},
			gpu:    "Tesla V100-SXM2-16GB 16384 volta 7.0 unsupported", minors: inOrder, nodes: halves, version: 2,
			links: []string{
				"X NV1/PIX NV1/PHB NV2/PHB NV2/SYS SYS SYS SYS",
				"NV1/PIX X NV2/PHB NV1/PHB SYS NV2/SYS SYS SYS",
				"NV1/PHB NV2/PHB X NV2/PIX SYS SYS NV1/SYS SYS",
				"NV2/PHB NV1/PHB NV2/PIX X SYS SYS SYS NV1/SYS",
				"NV2/SYS SYS SYS SYS X NV1/PIX NV1/PHB NV2/PHB",
				"SYS NV2/SYS SYS SYS NV1/PIX X NV2/PHB NV1/PHB",
				"SYS SYS NV1/SYS SYS NV1/PHB NV2/PHB X NV2/PIX",
				"SYS SYS SYS NV1/SYS NV2/PHB NV1/PHB NV2/PIX X",
			},
		},
		"dgx-2": {
			driver: inventory.Driver{Version: "535.261.03", CUDA: "12.2"},
			gpu:    "Tesla V100-SXM3-32GB 32768 volta 7.0 unsupported", version: 2,
			minors: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
			nodes:  slices.Sorted(slices.Values(slices.Repeat(halves, 2))),
			links: []string{"X SW6/PIX SW6/PXB SW6/PXB" + strings.Repeat(" SW6/NODE", 4) + strings.Repeat(" SW6/SYS",
				8)},
		},
		"dgx-a100": {
			driver: inventory.Driver{Version: "570.172.08", CUDA: "12.8"},
			gpu:    "NVIDIA A100-SXM4-40GB 40960 ampere 8.0 disabled", minors: a100Minors, nodes: dgxA100, version: 3,
			links: []string{"X SW12/PXB" + strings.Repeat(" SW12/SYS", 6), "SW12/PXB X" + strings.Repeat(" SW12/SYS",
				6)},
		},
		"dgx-h100": {
			driver: inventory.Driver{Version: "580.95.05", CUDA: "13.0"},
			gpu:    "NVIDIA H100 80GB HBM3 81559 hopper 9.0 disabled", minors: inOrder, nodes: halves, version: 4,
			links: []string{"X SW18/NODE SW18/NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS"},
		},
		"dgx-h200": {
			driver: inventory.Driver{Version: "580.95.05", CUDA: "13.0"},
			gpu:    "NVIDIA H200 143771 hopper 9.0 disabled", minors: inOrder, nodes: halves, version: 4,
			links: []string{"X SW18/NODE SW18/NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS"},
		},
		"dgx-b200": {
			driver: inventory.Driver{Version: "590.48.01", CUDA: "13.1"},
			gpu:    "NVIDIA B200 183359 blackwell 10.0 disabled", minors: inOrder, nodes: halves, version: 5,
			links: []string{"X SW18/NODE SW18/NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS"},
		},
		"l40s-x8": {
			driver: inventory.Driver{Version: "575.57.08", CUDA: "12.9"},
			gpu:    "NVIDIA L40S 46068 ada 8.9 unsupported", minors: inOrder, nodes: halves,
			links: []string{
				"X PIX NODE NODE SYS SYS SYS SYS", "PIX X NODE NODE SYS SYS SYS SYS", "NODE NODE X PIX SYS SYS SYS SYS",
			},
		},
		"t4": {
			driver: inventory.Driver{Version: "550.163.01", CUDA: "12.4"},
			gpu:    "Tesla T4 15360 turing 7.5 unsupported", minors: []int{0}, nodes: []int{inventory.NoNUMANode},
			links: []string{"X"},
		},
		"h100-mig-1g": {
			driver: inventory.Driver{Version: "580.95.05", CUDA: "13.0"},
			gpu:    "NVIDIA H100 80GB HBM3 81559 hopper 9.0 enabled", minors: inOrder, nodes: halves, version: 4,
			links: []string{"X SW18/NODE SW18/NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS"},
			mig:   slices.Repeat([]string{sevens("1g.10gb")}, 8),
		},
		"a100-mig-mixed": {
			driver: inventory.Driver{Version: "565.57.01", CUDA: "12.7"},
			minors: a100Minors, nodes: dgxA100, version: 3,
			links: []string{"X SW12/PXB" + strings.Repeat(" SW12/SYS", 6)},
			mig: []string{
				"", "", sevens("1g.10gb"), "0=1/0:3g.40gb 1=2/0:3g.40gb",
				"0=1/0:3g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb 3=8/0:1g.10gb",
				"0=1/0:4g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb+me",
				"0=1/0:1c.3g.40gb 1=1/1:1c.3g.40gb 2=1/2:1c.3g.40gb 3=2/0:3g.40gb", "0=0/0:7g.80gb",
			},
		},
	} {
		bubble(t, profile, func(t *testing.T) {
			r := newRig(t, profile)
			s := r.scan()
			if s.Driver != want.driver {
				t.Errorf("driver: got %+v, want %+v", s.Driver, want.driver)
			}
			gpus := len(s.GPUs)
			compare(t, "minors", want.minors, each(s, func(g inventory.GPU) int { return g.Minor }))
			compare(t, "NUMA nodes", want.nodes, each(s, func(g inventory.GPU) int { return g.NUMANode }))
			rows := each(s, func(g inventory.GPU) string { return links(g, gpus) })
			compare(t, "links", want.links, rows[:len(want.links)])
			if want.gpu != "" {
				compare(t, "GPUs", slices.Repeat([]string{want.gpu}, gpus), each(s, func(g inventory.GPU) string {
					return fmt.Sprintf("%s %d %s %v %v", g.Model, g.MemoryBytes>>20, g.Architecture,
						g.ComputeCapability, g.MIG)
				}))
			}
			if want.mig != nil {
				compare(t, "MIG devices", want.mig, each(s, migDevices))
			}
			compareWithNode(t, s, r.node)
			for _, g := range s.GPUs {
				if old := s.Driver.Version < "510"; old != (g.ReservedBytes == 0) ||
					!old && g.ReservedBytes != 512<<20 {
					t.Errorf("GPU %d: the driver keeps %d bytes", g.Index, g.ReservedBytes)
				}
				for _, l := range g.Links {
					if l.NVLinks > 0 && l.NVLinkVersion != want.version {
						t.Errorf("link from %d to %d: NVLink %d, want %d", g.Index, l.PeerIndex, l.NVLinkVersion,
							want.version)
					}
				}
			}
		})
	}
}

func compare[T any](t testing.TB, what string, want, got T) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// compareWithNode checks the identities in a Snapshot, and that all are healthy.
func compareWithNode(t *testing.T, s inventory.Snapshot, n *simulator.Node) {
	t.Helper()
	type id struct{ uuid, bdf, mig string }
	var want, got []id
	for i, g := range n.List() {
		want = append(want, id{uuid: g.UUID, bdf: g.BDF})
		for _, m := range g.MIG {
			want = append(want, id{uuid: m.UUID, mig: fmt.Sprintf("%d:%d", i, m.Index)})
		}
	}
	for i, g := range s.GPUs {
		got = append(got, id{uuid: g.UUID, bdf: g.BDF})
		if g.Index != i || g.Health != (inventory.Health{}) {
			t.Errorf("GPU %d: index %d, health %+v", i, g.Index, g.Health)
		}
		for _, m := range g.MIGDevices {
			got = append(got, id{uuid: m.UUID, mig: fmt.Sprintf("%d:%d", i, m.Index)})
			if m.Health != (inventory.Health{}) || m.MemoryBytes == 0 {
				t.Errorf("MIG device %d:%d: health %+v, %d bytes", i, m.Index, m.Health, m.MemoryBytes)
			}
		}
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(id{})); diff != "" {
		t.Errorf("UUIDs (-want +got):\n%s", diff)
	}
}

// contacts checks how a GPU answers when its health is read, and that all others answer.
func (r *rig) contacts(bad int, want inventory.Contact, reason string) {
	r.t.Helper()
	for gpu := range r.node.List() {
		reading, err := r.Read(r.ctx, r.uuid(gpu))
		switch {
		case err != nil:
			r.t.Error(err)
		case gpu != bad && reading.Contact != inventory.ContactGood:
			r.t.Errorf("GPU %d: %v", gpu, reading.Contact)
		case gpu == bad && (reading.Contact != want || want != inventory.ContactGood &&
			!strings.Contains(reading.Reason, reason)):
			r.t.Errorf("got %v (%s), want %v with %q", reading.Contact, reading.Reason, want, reason)
		}
	}
}

// TestScanFailingGPU has one GPU of eight fail in one way or another: the others are served as
// ever.
func TestScanFailingGPU(t *testing.T) {
	t.Parallel()
	const bad = 3
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: call, Return: ret}
	}
	for name, test := range map[string]struct {
		fault   simulator.Fault
		contact inventory.Contact // as health is read
		reason  string            // part of it, or why it is as it was last seen
		// unknown is part of the reason for which the GPU is left out when the fault was there from the
		// start; empty if the GPU is in nonetheless.
		unknown string
	}{
		"lost": {
			fault: simulator.Fault{Kind: simulator.KindLost, GPU: "3"}, contact: inventory.ContactLost,
			reason: "ERROR_GPU_IS_LOST", unknown: "cannot be identified: nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST",
		},
		"lost, but its handle is not": {
			fault: fail("DeviceGetUUID", "GPU_IS_LOST"), contact: inventory.ContactLost,
			reason: "ERROR_GPU_IS_LOST", unknown: "cannot be identified: nvmlDeviceGetUUID: ERROR_GPU_IS_LOST",
		},
		"lost, as a call on its memory says": {
			fault: fail("DeviceGetMemoryInfo", "GPU_IS_LOST"), contact: inventory.ContactLost,
			reason: "ERROR_GPU_IS_LOST",
		},
		"lost, as a call on its links says": {
			fault: fail("DeviceGetNvLinkState", "GPU_IS_LOST"), contact: inventory.ContactLost,
			reason: "ERROR_GPU_IS_LOST",
		},
		"reset required": {
			fault: fail("", "RESET_REQUIRED"), contact: inventory.ContactResetRequired,
			reason:  "ERROR_RESET_REQUIRED",
			unknown: "cannot be identified: nvmlDeviceGetHandleByIndex: ERROR_RESET_REQUIRED",
		},
		"reset required for one call": {
			fault: fail("DeviceGetMigMode", "RESET_REQUIRED"), contact: inventory.ContactGood,
			reason: "ERROR_RESET_REQUIRED",
		},
		"unknown error": {
			fault: fail("DeviceGetHandleByIndex", "UNKNOWN"), contact: inventory.ContactGood,
			reason:  "nvmlDeviceGetHandleByIndex: ERROR_UNKNOWN",
			unknown: "cannot be identified: nvmlDeviceGetHandleByIndex: ERROR_UNKNOWN",
		},
		"no permission": {
			fault: fail("DeviceGetMinorNumber", "NO_PERMISSION"), contact: inventory.ContactGood,
			reason:  "nvmlDeviceGetMinorNumber: ERROR_NO_PERMISSION",
			unknown: "cannot be identified: nvmlDeviceGetMinorNumber",
		},
		"memory unreadable": {
			fault: fail("DeviceGetMemoryInfo", "UNKNOWN"), contact: inventory.ContactFailing,
			reason: "nvmlDeviceGetMemoryInfo: ERROR_UNKNOWN",
		},
		"no PCI address": {
			fault: fail("DeviceGetPciInfo", "UNKNOWN"), contact: inventory.ContactGood,
			reason: "nvmlDeviceGetPciInfo: ERROR_UNKNOWN", unknown: "cannot be identified: nvmlDeviceGetPciInfo",
		},
		"memory not supported": {fault: fail("DeviceGetMemoryInfo", "NOT_SUPPORTED")},
		"links not supported":  {fault: fail("DeviceGetNvLinkState", "NOT_SUPPORTED")},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(test.fault)
			r.retry() // links are asked for, too
			after := r.scan()
			r.contacts(bad, test.contact, test.reason)
			if test.reason != "" {
				compare(t, "the GPU", before.GPUs[bad], after.GPUs[bad])
			}
			if test.fault.Kind == simulator.KindFail { // the others do not come back within a session
				r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
				r.retry()
				compare(t, "the node once the fault is gone", before, r.scan())
			}
		})
		bubble(t, name+" from the start", func(t *testing.T) {
			r := newRig(t, "dgx-h100", test.fault)
			s := r.scan()
			if test.unknown == "" {
				r.contacts(bad, test.contact, test.reason)
				compare(t, "GPUs that are left out", 0, len(s.LeftOut))
				return
			}
			if len(s.LeftOut) != 1 || s.LeftOut[0].Index != bad ||
				!strings.Contains(s.LeftOut[0].Reason, test.unknown) {
				t.Errorf("left out: got %v, want GPU %d with %q", s.LeftOut, bad, test.unknown)
			}
			compare(t, "a new session may find it", name != "no permission", s.LeftOut[0].Retry)
			compare(t, "the others", []int{0, 1, 2, 4, 5, 6, 7}, each(s, func(g inventory.GPU) int { return g.Index }))
			for _, g := range s.GPUs {
				if len(g.Links) != 6 {
					t.Errorf("GPU %d: %d links", g.Index, len(g.Links))
				}
			}
			if test.fault.Kind == simulator.KindFail {
				r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
				if s := r.scan(); len(s.LeftOut) != 1 {
					t.Errorf("the GPU is not left alone: %v", s.LeftOut)
				}
				r.retry()
				if s := r.scan(); len(s.LeftOut) > 0 || len(s.GPUs) != 8 {
					t.Errorf("left out once the GPU is asked again: %v", s.LeftOut)
				}
			}
		})
	}
}

// TestScanNewSession plugs GPUs in and out: a session says that it no longer knows them all, and
// the next one does.
func TestScanNewSession(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	scan := func() (s inventory.Snapshot) {
		for s = r.scan(); s.LinksDue; s = r.scan() { // calls take long on a busy machine
		}
		return s
	}
	whole := scan()
	reopen := func() {
		t.Helper()
		_, err := r.Scan(r.ctx)
		if !errors.Is(err, inventory.ErrNewSession) {
			t.Fatalf("got error %v, want ErrNewSession", err)
		}
		if err := r.Close(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.clean()
		if r.Session, err = r.driver.Open(r.ctx); err != nil {
			t.Fatal(err)
		}
	}
	r.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "3"})
	reopen()
	s := r.scan()
	compare(t, "minors without GPU 3", []int{0, 1, 2, 4, 5, 6, 7},
		each(s, func(g inventory.GPU) int { return g.Minor }))
	compare(t, "indexes without GPU 3", []int{0, 1, 2, 3, 4, 5, 6},
		each(s, func(g inventory.GPU) int { return g.Index }))
	r.inject(simulator.Fault{Kind: simulator.KindAdd, GPU: "3"})
	reopen()
	back := scan()
	if back.GPUs[3].Binding == whole.GPUs[3].Binding {
		t.Error("GPU 3 is bound again, and has the same binding")
	}
	whole.GPUs = slices.Clone(whole.GPUs)
	whole.GPUs[3].Binding = back.GPUs[3].Binding
	compare(t, "with GPU 3 back", whole, back)
	r.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "3"}, simulator.Fault{Kind: simulator.KindAdd, GPU: "3"})
	reopen() // though nobody saw that it was gone
}

// TestScanAgain makes sure that a look that finds nothing new gives the same Snapshot, not a copy,
// and that one that does leaves the earlier one as it was.
func TestScanAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	first := r.scan()
	copied := slices.Clone(first.GPUs)
	if second := r.scan(); &second.GPUs[0] != &first.GPUs[0] {
		t.Error("the second Snapshot is a copy of the first")
	}
	r.inject(
		simulator.Fault{Kind: simulator.KindMIG, GPU: "3", Profiles: []string{"7g.80gb"}},
		simulator.Fault{Kind: simulator.KindNVLink, GPU: "0", Link: new(int)},
	)
	third := r.scan()
	if third.Equal(first) {
		t.Error("a changed node gave an equal Snapshot")
	}
	if &third.GPUs[4].MIGDevices[0] != &first.GPUs[4].MIGDevices[0] ||
		&third.GPUs[4].Links[0] != &first.GPUs[4].Links[0] {
		t.Error("MIG devices and links that did not change were created again")
	}
	compare(t, "the first Snapshot after the third", copied, first.GPUs)
}

// TestScanDisplay has an adapter that runs no work: it is neither served nor reported.
func TestScanDisplay(t *testing.T) {
	t.Parallel()
	r := newRig(t, `
description: a workstation with a display adapter between two GPUs
driver: 580.95.05
cuda: "13.0"
models:
  display: {name: NVIDIA DGX Display, architecture: turing, compute: "7.5", memoryMiB: 4096, pci: 1FB010DE}
gpus:
- {bdf: "0000:01:00.0", pcie: 0/0/0, model: a100-sxm4-80gb}
- {bdf: "0000:02:00.0", pcie: 0/0/1, model: display}
- {bdf: "0000:03:00.0", pcie: 0/1/0, model: a100-sxm4-80gb}
`)
	s := r.scan()
	compare(t, "indexes", []int{0, 2}, each(s, func(g inventory.GPU) int { return g.Index }))
	compare(t, "links", []string{"X - NODE", "NODE - X"}, each(s, func(g inventory.GPU) string { return links(g, 3) }))
	if len(s.LeftOut) > 0 {
		t.Errorf("left out: %v", s.LeftOut)
	}
}

// BenchmarkScan measures a look that finds nothing new.
func BenchmarkScan(b *testing.B) {
	for _, profile := range []string{"dgx-h100", "h100-mig-1g"} {
		b.Run(profile, func(b *testing.B) {
			r := newRig(b, profile)
			r.scan()
			b.ReportAllocs()
			for b.Loop() {
				r.scan()
			}
		})
	}
}

// TestScanAsksAGPUThatHungLast: who does not answer in time keeps the others waiting least.
func TestScanAsksAGPUThatHungLast(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked []int
		r := newRigWith(t, "dgx-h100", hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
			asked = append(asked, index)
			return d
		}}))
		r.inject(hang("3", "DeviceGetMinorNumber"))
		r.scan()
		r.inject(restore)
		synctest.Wait() // the call has returned
		r.scan()        // takes over what it found
		asked = nil
		r.scan()
		compare(t, "order", []int{0, 1, 2, 4, 5, 6, 7, 3}, asked)
	})
}

// TestScanWhileACallHangs: a session that cannot be closed goes on with the GPUs that it has.
func TestScanWhileACallHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.inject(hang("3", "DeviceGetMemoryInfo"))
		r.scan()
		r.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "5"})
		compare(t, "GPUs while a call hangs", 8, len(r.scan().GPUs))
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		synctest.Wait()
		if _, err := r.Scan(r.ctx); !errors.Is(err, inventory.ErrNewSession) {
			t.Errorf("after it has returned: got error %v, want ErrNewSession", err)
		}
	})
}
