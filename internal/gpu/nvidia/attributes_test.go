package nvidia_test

import (
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const cliqueNode = `
description: two GPUs of a multi-node fabric, the second a virtual one
driver: 580.95.05
cuda: "13.0"
model: h100-sxm5-80gb
nvswitches: ["0000:07:00.0"]
fabric: {cluster: 3a1f2b4c-0d5e-4f60-8172-93a4b5c6d7e8, clique: 5}
gpus:
- {bdf: "0000:1b:00.0", pcie: 0/0/0}
- {bdf: "0000:43:00.0", pcie: 0/1/0, vgpu: {hostDriver: 550.90.05, hostBranch: r550_00}}
`

// TestScanAttributes: what only labels tell of GPUs is read: class, clique, hypervisor and the
// engines of MIG devices.
func TestScanAttributes(t *testing.T) {
	t.Parallel()
	r := newRig(t, cliqueNode)
	s := r.scan()
	const clique = "3a1f2b4c-0d5e-4f60-8172-93a4b5c6d7e8.5"
	compare(t, "classes", []string{"0x030200", "0x030200"}, each(s, func(g inventory.GPU) string { return g.Class }))
	compare(t, "cliques", []string{clique, clique}, each(s, func(g inventory.GPU) string { return g.Clique }))
	compare(t, "hypervisors", []inventory.VGPU{{}, {Present: true, HostDriver: "550.90.05", HostBranch: "r550_00"}},
		each(s, func(g inventory.GPU) inventory.VGPU { return g.VGPU }))
	r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"1c.3g.40gb"}})
	compare(t, "MIG device", inventory.MIGAttributes{
		Multiprocessors: 20, GISlices: 3, CISlices: 1, CopyEngines: 3, Decoders: 3, JPEGs: 3,
	}, r.scan().GPUs[0].MIGDevices[0].Attributes)

	r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetGpuFabricInfo", Return: "UNKNOWN"})
	_, _ = r.Read(r.ctx, s.GPUs[0].UUID)
	compare(t, "clique while the driver does not tell", clique, r.scan().GPUs[0].Clique)
	r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"},
		simulator.Fault{Kind: simulator.KindFabric, GPU: "0", State: "in-progress"})
	_, _ = r.Read(r.ctx, s.GPUs[0].UUID)
	compare(t, "clique of a GPU that is joining", "", r.scan().GPUs[0].Clique)

	compare(t, "cliques within a machine", make([]string, 8),
		each(newRig(t, "dgx-h100").scan(), func(g inventory.GPU) string { return g.Clique }))
}

// TestVGPU reads configuration spaces, those that make no sense too.
func TestVGPU(t *testing.T) {
	t.Parallel()
	space := func(capability ...byte) []byte {
		b := make([]byte, 256)
		b[0x06], b[0x34] = 0x10, 0x40
		copy(b[0x40:], capability)
		return b
	}
	text := func(s string) []byte { return append([]byte(s), make([]byte, 10-len(s))...) }
	record := append(append([]byte{0, 22}, text("550.90.05")...), text("r550_00")...)
	host := inventory.VGPU{Present: true, HostDriver: "550.90.05", HostBranch: "r550_00"}
	present := inventory.VGPU{Present: true}
	behindOthers := space(0x01, 0xd0)
	copy(behindOthers[0xd0:], append([]byte{0x09, 0, 27, 'V', 'F'}, record...))
	without := space(append([]byte{0x09, 0, 27, 'V', 'F'}, record...)...)
	without[0x06] = 0
	at44 := space()
	at44[0x34] = 0x47 // the two lowest bits have no meaning
	copy(at44[0x44:], append([]byte{0x09, 0, 27, 'V', 'F'}, record...))
	atTheEnd := space(0x05, 0xfc)
	copy(atTheEnd[0xfc:], []byte{0x09, 0, 27, 'V'})
	for name, test := range map[string]struct {
		space []byte
		want  inventory.VGPU
	}{
		"elsewhere":                {at44, host},
		"without room for records": {atTheEnd, inventory.VGPU{}},
		"of an extended space": {append(space(append([]byte{0x09, 0, 27, 'V', 'F'}, record...)...),
			make([]byte, 3840)...), host},
		"behind an empty record":    {space(append([]byte{0x09, 0, 29, 'V', 'F', 3, 2}, record...)...), host},
		"too short for a signature": {space(0x09, 0, 2, 'V', 'F'), inventory.VGPU{}},
		"a list of others":          {space(0x05, 0), inventory.VGPU{}},
		"record of another kind":    {space(append([]byte{0x09, 0, 27, 'V', 'F', 1}, record[1:]...)...), present},
		"record one byte too short": {space(append([]byte{0x09, 0, 27, 'V', 'F', 0, 21}, record[2:]...)...), present},
		"first record":              {space(append([]byte{0x09, 0, 27, 'V', 'F'}, record...)...), host},
		"second record":             {space(append([]byte{0x09, 0, 31, 'V', 'F', 3, 4, 1, 1}, record...)...), host},
		"behind another capability": {behindOthers, host},
		"unprivileged": {space(append([]byte{0x09, 0, 27, 'V', 'F'}, record...)...)[:64],
			inventory.VGPU{}},
		"no capabilities":          {without, inventory.VGPU{}},
		"another vendor's":         {space(0x09, 0, 20, 1, 0, 0), inventory.VGPU{}},
		"list that has no end":     {space(0x05, 0x40), inventory.VGPU{}},
		"no record":                {space(0x09, 0, 5, 'V', 'F'), present},
		"record without an end":    {space(0x09, 0, 12, 'V', 'F', 7, 0), present},
		"record that is too long":  {space(0x09, 0, 9, 'V', 'F', 0, 200, 1, 1), present},
		"record that is too short": {space(0x09, 0, 12, 'V', 'F', 0, 5, 1, 1, 1), present},
		"longer than the space":    {space(0x05, 0xfc)[:256], inventory.VGPU{}},
		"empty":                    {nil, inventory.VGPU{}},
	} {
		root := fstest.MapFS{folderOfT4 + "/config": {Data: test.space}}
		compare(t, name, test.want, scanWith(t, "t4", root, "").GPUs[0].VGPU)
	}
	compare(t, "no file", inventory.VGPU{}, scanWith(t, "t4", fstest.MapFS{}, "").GPUs[0].VGPU)
}
