package nvidia_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestLinks(t *testing.T) {
	t.Parallel()
	lane := func(gpu string, link int) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindNVLink, GPU: gpu, Link: &link}
	}
	fail := func(gpu, call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: gpu, Call: call, Return: ret}
	}
	for name, test := range map[string]struct {
		profile string
		faults  []simulator.Fault
		want    map[int]string // rows
	}{
		"a lane into the switch is cut": {
			profile: "dgx-h100", faults: []simulator.Fault{lane("2", 5)},
			want: map[int]string{
				0: "X SW18/NODE SW17/NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS",
				2: "SW17/NODE SW17/NODE X SW17/NODE SW17/SYS SW17/SYS SW17/SYS SW17/SYS",
			},
		},
		"all lanes into the switch are cut": {
			profile: "dgx-h100", faults: []simulator.Fault{{Kind: simulator.KindNVLink, GPU: "2"}},
			want: map[int]string{
				0: "X SW18/NODE NODE SW18/NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS",
				2: "NODE NODE X NODE SYS SYS SYS SYS",
			},
		},
		"all lanes to other GPUs are cut": {
			profile: "dgx-1", faults: []simulator.Fault{{Kind: simulator.KindNVLink, GPU: "0"}},
			want: map[int]string{0: "X PIX PHB PHB SYS SYS SYS SYS", 4: "SYS SYS SYS SYS X NV1/PIX NV1/PHB NV2/PHB"},
		},
		"one end does not say which lanes are active": {
			profile: "dgx-1", faults: []simulator.Fault{fail("0", "DeviceGetNvLinkState", "UNKNOWN")},
			want: map[int]string{
				0: "X NV1/PIX NV1/PHB NV2/PHB NV2/SYS SYS SYS SYS",
				4: "NV2/SYS SYS SYS SYS X NV1/PIX NV1/PHB NV2/PHB",
			},
		},
		"one end does not say where its lanes lead": {
			profile: "dgx-1", faults: []simulator.Fault{fail("0", "DeviceGetNvLinkRemotePciInfo", "UNKNOWN")},
			want: map[int]string{
				0: "X NV1/PIX NV1/PHB NV2/PHB NV2/SYS SYS SYS SYS",
				3: "NV2/PHB NV1/PHB NV2/PIX X SYS SYS SYS NV1/SYS",
			},
		},
		"neither end says where its lanes lead": {
			profile: "dgx-1",
			faults: []simulator.Fault{
				fail("0", "DeviceGetNvLinkRemotePciInfo", "UNKNOWN"),
				fail("3", "DeviceGetNvLinkRemoteDeviceType", "NOT_SUPPORTED"),
			},
			want: map[int]string{0: "X NV1/PIX NV1/PHB PHB NV2/SYS SYS SYS SYS"},
		},
		"one end does not know the way by PCIe": {
			profile: "l40s-x8", faults: []simulator.Fault{fail("0", "DeviceGetTopologyCommonAncestor", "UNKNOWN")},
			want: map[int]string{0: "X PIX NODE NODE SYS SYS SYS SYS", 7: "SYS SYS SYS SYS NODE NODE PIX X"},
		},
		"nobody knows the way by PCIe": {
			profile: "l40s-x8", faults: []simulator.Fault{fail("", "DeviceGetTopologyCommonAncestor", "UNKNOWN")},
			want: map[int]string{0: "X - - - - - - -"},
		},
		"nobody knows the way by PCIe, but there is NVLink": {
			profile: "dgx-a100", faults: []simulator.Fault{fail("", "DeviceGetTopologyCommonAncestor", "UNKNOWN")},
			want: map[int]string{1: "SW12/? X SW12/? SW12/? SW12/? SW12/? SW12/? SW12/?"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check := func(s inventory.Snapshot) {
				t.Helper()
				for i, row := range test.want {
					compare(t, "a row", row, links(s.GPUs[i], len(s.GPUs)))
				}
			}
			r := newRig(t, test.profile, test.faults...)
			check(r.scan())
			r.inject(simulator.Fault{Kind: simulator.KindRestore})
			r.retry()
			whole := newRig(t, test.profile).scan()
			compare(t, "once the faults are gone", whole, r.scan())
			r.inject(test.faults...)
			compare(t, "what nobody asks for", whole, r.scan())
			r.retry()
			if test.faults[0].Kind == simulator.KindNVLink {
				check(r.scan())
			} else {
				known := r.scan()
				known.LinksDue = whole.LinksDue // some cannot be read
				compare(t, "what is known already", whole, known)
			}
		})
	}
}

// TestLinksAfterAnXID has lanes cut, which an XID tells.
func TestLinksAfterAnXID(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	before := r.scan()
	r.inject(simulator.Fault{Kind: simulator.KindNVLink, GPU: "2"})
	compare(t, "links before the XID", before, r.scan())
	r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 31})
	r.next()
	compare(t, "links after another XID", before, r.scan())
	r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 74, Action: "none"})
	r.next()
	r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 31})
	r.next() // it takes nothing back
	compare(t, "links of GPU 2", "NODE NODE X NODE SYS SYS SYS SYS", links(r.scan().GPUs[2], 8))
}

// TestLinksToLostGPU loses a GPU: the links of which nothing new can be read stay as they were, and
// those into a switch stay too.
func TestLinksToLostGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	before := r.scan()
	r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "3"})
	r.retry()
	after := r.scan()
	for i := range before.GPUs {
		compare(t, "links", before.GPUs[i].Links, after.GPUs[i].Links)
	}
}

// TestLinksThatCouldNotBeRead: the next scan asks again for what a GPU failed to tell, and not for
// what it does not support.
func TestLinksThatCouldNotBeRead(t *testing.T) {
	t.Parallel()
	for profile, calls := range map[string][]string{
		"dgx-1": {"DeviceGetNvLinkState", "DeviceGetNvLinkRemoteDeviceType", "DeviceGetNvLinkRemotePciInfo",
			"DeviceGetTopologyCommonAncestor"},
		"l40s-x8": {"DeviceGetTopologyCommonAncestor"},
	} {
		whole := newRig(t, profile).scan()
		for _, call := range calls {
			for ret, again := range map[string]bool{"UNKNOWN": true, "NOT_SUPPORTED": false} {
				r := newRig(t, profile, simulator.Fault{Kind: simulator.KindFail, Call: call, Return: ret})
				compare(t, call+" answers "+ret+": links are due", again, r.scan().LinksDue)
				r.inject(restore)
				compare(t, call+" answered "+ret+": all links are known afterwards", again, r.scan().Equal(whole))
			}
		}
	}
}

// TestLinksAfterAHang: lanes may have been cut meanwhile, and so when the MIG mode changes.
func TestLinksAfterAHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.inject(hang("3", "DeviceGetMemoryInfo"))
		r.scan()
		time.Sleep(nodePatience) // the bubble's clock
		_ = r.look()
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"},
			simulator.Fault{Kind: simulator.KindNVLink, GPU: "3"})
		synctest.Wait()
		r.scan()
		if err := r.read(3); err != nil { // it answers again
			t.Error(err)
		}
		compare(t, "links after the hang", "NODE NODE NODE X SYS SYS SYS SYS", links(r.scan().GPUs[3], 8))
		r.inject(simulator.Fault{Kind: simulator.KindNVLink, GPU: "2"})
		compare(t, "links while nothing tells", "SW18/NODE SW18/NODE X NODE SW18/SYS SW18/SYS SW18/SYS SW18/SYS",
			links(r.scan().GPUs[2], 8))
		r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"7g.80gb"}})
		compare(t, "links in MIG mode", "NODE NODE X NODE SYS SYS SYS SYS", links(r.scan().GPUs[2], 8))
	})
}

// TestLinksOfAGPUThatHung: a call that returns late takes back nothing of what was learnt of links
// meanwhile.
func TestLinksOfAGPUThatHung(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.inject(hang("3", "DeviceGetMemoryInfo"))
		r.scan()
		r.inject(simulator.Fault{Kind: simulator.KindNVLink, GPU: "2"},
			simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 74, Action: "none"})
		r.next()
		const want = "SW18/NODE SW18/NODE NODE X SW18/SYS SW18/SYS SW18/SYS SW18/SYS"
		compare(t, "links while the call hangs", want, links(r.scan().GPUs[3], 8))
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		synctest.Wait()
		compare(t, "links when it has returned", want, links(r.scan().GPUs[3], 8))
	})
}

// TestXIDsOfLinks: these XIDs have the links be read again, and those beside them do not.
func TestXIDsOfLinks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // in real time a slow machine leaves links for later
		r := newRig(t, "dgx-1")
		whole := r.scan()
		var got []uint64
		for xid := uint64(70); xid <= 160; xid++ {
			if xid == 79 { // the GPU is lost then
				continue
			}
			r.inject(simulator.Fault{Kind: simulator.KindNVLink, GPU: "0"},
				simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: xid, Action: "none"})
			for r.next().XID != xid {
			}
			if s := r.scan(); !s.Equal(whole) {
				got = append(got, xid)
			}
			r.inject(restore)
			r.retry()
			compare(t, "the node afterwards", whole, r.scan())
		}
		compare(t, "XIDs", []uint64{74, 144, 145, 146, 147, 148, 149, 150, 155}, got)
	})
}

// TestLinksOfAGPUThatIsLostMeanwhile: lanes that were followed hold, though the GPU is lost before
// the last of them.
func TestLinksOfAGPUThatIsLostMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-1")
	before := r.scan()
	r.inject(simulator.Fault{Kind: simulator.KindNVLink, GPU: "0", Link: new(int)},
		simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetNvLinkRemotePciInfo",
			Return: "GPU_IS_LOST"})
	r.retry()
	compare(t, "links", before.GPUs[0].Links, r.scan().GPUs[0].Links)
	if reading, err := r.Read(r.ctx, r.uuid(0)); err != nil || reading.Contact != inventory.ContactLost {
		t.Errorf("the GPU is %v, error %v, want that it is lost", reading.Contact, err)
	}
}

// A linkedDevice says of which version its NVLinks are: an error for 0.
type linkedDevice struct {
	nvml.Device
	version nvml.NvlinkVersion
}

func (d linkedDevice) GetNvLinkVersion(int) (uint32, nvml.Return) {
	if d.version == 0 {
		return 0, nvml.ERROR_UNKNOWN
	}
	return uint32(d.version), nvml.SUCCESS
}

// TestNVLinkGenerations: the generations have the numbers of their names, the smaller steps belong
// to them. Of two ends, the older generation holds, and one that is known.
func TestNVLinkGenerations(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		first, others nvml.NvlinkVersion
		want          int
	}{
		{nvml.NVLINK_VERSION_1_0, nvml.NVLINK_VERSION_1_0, 1}, {nvml.NVLINK_VERSION_2_0, nvml.NVLINK_VERSION_2_2, 2},
		{nvml.NVLINK_VERSION_2_2, nvml.NVLINK_VERSION_6_0, 2}, {nvml.NVLINK_VERSION_3_1, nvml.NVLINK_VERSION_3_0, 3},
		{nvml.NVLINK_VERSION_3_1, nvml.NVLINK_VERSION_3_1, 3}, {nvml.NVLINK_VERSION_6_0, nvml.NVLINK_VERSION_4_0, 4},
		{nvml.NVLINK_VERSION_5_0, nvml.NVLINK_VERSION_5_0, 5}, {nvml.NVLINK_VERSION_6_0, nvml.NVLINK_VERSION_6_0, 6},
		{0, nvml.NVLINK_VERSION_3_0, 3}, {0, 0, 0},
	} {
		r := newRigWith(t, "dgx-a100", hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
			if index == 0 {
				return linkedDevice{d, tt.first}
			}
			return linkedDevice{d, tt.others}
		}}))
		link := r.scan().GPUs[0].Links[0]
		compare(t, fmt.Sprint("NVLink ", tt.first, " to ", tt.others), tt.want, link.NVLinkVersion)
		compare(t, "lanes through a switch", 12, link.NVLinks)
	}
}
