package nvidia

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
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
				fail("0", "DeviceGetNvLinkRemotePciInfo", "UNKNOWN"), fail("3", "DeviceGetNvLinkRemoteDeviceType", "NOT_SUPPORTED"),
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
	compare(t, "links of GPU 2", "NODE NODE X NODE SYS SYS SYS SYS", links(r.scan().GPUs[2], 8))
}

// TestLinksToLostGPU loses a GPU: the links of which nothing new can be read stay as they were, and those into a switch
// stay too.
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
