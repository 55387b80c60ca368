package nvidia_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestScanWrongIdentity has one device of a node with a name or number that cannot be right, from
// the start and all of a sudden: it is left out, and all others are as they were.
func TestScanWrongIdentity(t *testing.T) {
	t.Parallel()
	answer := func(device, call, value string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindAnswer, GPU: device, Call: call, Value: value}
	}
	other := newNode(t, "a100-mig-mixed").List()
	for name, test := range map[string]struct {
		fault simulator.Fault
		want  string // part of the reason
		gpus  int
		mig   int // MIG devices, of 21
	}{
		"empty UUID":            {answer("0", "DeviceGetUUID", `""`), "its UUID", 7, 21},
		"UUID of another GPU":   {answer("0", "DeviceGetUUID", other[1].UUID), "that of another device", 7, 21},
		"UUID not UTF-8":        {answer("0", "DeviceGetUUID", `"GPU-\xff\xfe"`), `"GPU-\xff\xfe"`, 7, 21},
		"UUID with a newline":   {answer("0", "DeviceGetUUID", `"GPU-0\n1"`), `"GPU-0\n1"`, 7, 21},
		"UUID with a comma":     {answer("0", "DeviceGetUUID", "GPU-0,GPU-1"), "its UUID", 7, 21},
		"UUID with a slash":     {answer("0", "DeviceGetUUID", "GPU-0/1"), "its UUID", 7, 21},
		"UUID with a colon":     {answer("0", "DeviceGetUUID", "GPU-0::1"), "its UUID", 7, 21},
		"UUID that ends in a -": {answer("0", "DeviceGetUUID", "GPU-"), "its UUID", 7, 21},
		"UUID of a megabyte":    {answer("0", "DeviceGetUUID", strings.Repeat("x", 1<<20)), "(1048576 bytes)", 7, 21},
		"model of a megabyte":   {answer("0", "DeviceGetName", strings.Repeat("x", 1<<20)), "", 8, 21},
		"model with a newline":  {answer("0", "DeviceGetName", `"A100\n"`), "", 8, 21},
		"minor of 2^32-1": {answer("0", "DeviceGetMinorNumber", "4294967295"), "its minor number 4294967295", 7,
			21},
		"2^32-1 GPUs":        {answer("", "DeviceGetCount", "4294967295"), "", 8, 21},
		"2^32-1 MIG devices": {answer("2", "DeviceGetMaxMigDeviceCount", "4294967295"), "", 8, 21},
		"empty UUID of a MIG device": {answer("2:0", "DeviceGetUUID", `""`), "MIG device 2:0 cannot be identified", 8,
			20},
		"comma in a MIG device's UUID": {answer("2:0", "DeviceGetUUID", "MIG-1,MIG-2"), "MIG device 2:0", 8, 20},
		"slash in a MIG device's UUID": {answer("2:0", "DeviceGetUUID", "MIG-1/2"), "MIG device 2:0", 8, 20},
		"old UUID of a MIG device":     {answer("2:0", "DeviceGetUUID", "MIG-GPU-0a/1/0"), "", 8, 21},
		"UUID of another MIG device": {answer("2:0", "DeviceGetUUID", other[3].MIG[0].UUID), "that of another device",
			8, 20},
		"MIG device with a GPU's UUID": {answer("2:0", "DeviceGetUUID", other[7].UUID), "which begin with MIG-", 8, 20},
		"UUID of a GPU that has others": {answer("2", "DeviceGetUUID", other[1].UUID), "that of another device", 7,
			21 - len(other[2].MIG)},
	} {
		check := func(t *testing.T, s inventory.Snapshot) {
			t.Helper()
			mig := 0
			for _, g := range s.GPUs {
				mig += len(g.MIGDevices)
				if slices.ContainsFunc(g.Links, func(l inventory.Link) bool { _, ok := s.GPU(l.Peer); return !ok }) {
					t.Errorf("GPU %d has a link to a GPU that is not there", g.Index)
				}
			}
			compare(t, "GPUs and MIG devices", fmt.Sprint(test.gpus, test.mig), fmt.Sprint(len(s.GPUs), mig))
			if test.want == "" {
				compare(t, "left out", 0, len(s.LeftOut))
				return
			}
			if len(s.LeftOut) != 1 || !strings.Contains(s.LeftOut[0].Reason, test.want) ||
				len(s.LeftOut[0].Reason) > 300 {
				t.Errorf("left out: got %.500v, want one with %q", s.LeftOut, test.want)
			}
		}
		bubble(t, name+" from the start", func(t *testing.T) {
			r := newRig(t, "a100-mig-mixed", test.fault)
			check(t, r.scan())
			check(t, r.scan())
		})
		bubble(t, name+" all of a sudden", func(t *testing.T) {
			if test.fault.Call == "DeviceGetName" {
				t.Skip("a model is read once in a session")
			}
			r := newRig(t, "a100-mig-mixed")
			before := r.scan()
			r.inject(test.fault)
			after := r.scan()
			check(t, after)
			for _, g := range after.GPUs {
				reading, err := r.Read(r.ctx, g.UUID)
				if err != nil || reading.Contact != inventory.ContactGood {
					t.Errorf("Read GPU %d: %v, %v", g.Index, reading.Contact, err)
				}
			}
			r.inject(simulator.Fault{Kind: simulator.KindRestore})
			compare(t, "the node once the fault is gone", before, r.scan())
		})
	}
}

// TestScanDoubledUUIDKeepsItsOwner gives GPU 0 the UUID that GPU 5 had: the ID goes on being GPU
// 5's.
func TestScanDoubledUUIDKeepsItsOwner(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	uuid := r.scan().GPUs[5].UUID
	r.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceGetUUID", Value: uuid})
	for range 2 {
		s := r.scan()
		if g, ok := s.GPU(uuid); !ok || g.Minor != 5 || len(s.GPUs) != 7 {
			t.Errorf("UUID of GPU 5: got minor %d (%v) of %d GPUs", g.Minor, ok, len(s.GPUs))
		}
	}
}
