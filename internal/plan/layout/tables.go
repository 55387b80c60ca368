package layout

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// The tables contain the driver's answers about each model, for use without the privileges to call
// the driver. Profiles and counts are from "Supported MIG Profiles" in NVIDIA's MIG User Guide
// (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html), numbers
// and placements from nvidia-smi mig -lgip and -lgipp, for A100 and H100 from the guide's "Getting
// Started with MIG".

// models are the profiles by PCI device ID.
var models = map[uint32][]inventory.MIGProfile{
	0x20B0: seven(5, 10, 10, 20, 20, 40), 0x20B1: seven(5, 10, 10, 20, 20, 40), // A100 40 GB
	0x20F1: seven(5, 10, 10, 20, 20, 40), 0x20F6: seven(5, 10, 10, 20, 20, 40), // A100 PCIe, A800 40 GB
	0x20B2: seven(10, 20, 20, 40, 40, 80), 0x20B5: seven(10, 20, 20, 40, 40, 80), // A100 80 GB
	0x20F3: seven(10, 20, 20, 40, 40, 80), 0x20F5: seven(10, 20, 20, 40, 40, 80), // A800 80 GB
	0x2330: seven(10, 20, 20, 40, 40, 80), 0x2331: seven(10, 20, 20, 40, 40, 80), // H100 80 GB
	0x2322: seven(10, 20, 20, 40, 40, 80), 0x2324: seven(10, 20, 20, 40, 40, 80), // H800 80 GB
	0x2321: seven(12, 24, 24, 47, 47, 94), 0x233A: seven(12, 24, 24, 47, 47, 94), // H100 NVL, H800 NVL
	0x2342: seven(12, 24, 24, 48, 48, 96), 0x233D: seven(12, 24, 24, 48, 48, 96), // GH200 96 GB, H100 96 GB
	0x20B6: seven(12, 24, 24, 48, 48, 96), 0x2329: seven(12, 24, 24, 48, 48, 96), // PG506, H20
	0x2335: seven(18, 35, 35, 71, 71, 141), 0x233B: seven(18, 35, 35, 71, 71, 141), // H200, H200 NVL
	0x2348: seven(18, 36, 36, 72, 72, 144),   // GH200 144 GB
	0x2901: seven(23, 45, 45, 90, 90, 180),   // B200
	0x2941: seven(23, 47, 47, 93, 93, 186),   // GB200
	0x3182: seven(34, 67, 67, 135, 135, 269), // B300
	0x31C2: seven(35, 70, 70, 139, 139, 278), // GB300
	0x20B7: a30,                              // A30
	0x2BB5: rtxPRO6000,                       // RTX PRO 6000 Blackwell Server Edition
}

// seven returns the profiles of a GPU with seven compute slices and eight memory slices, by the GB
// in their names.
func seven(one, oneDouble, two, three, four, full int) []inventory.MIGProfile {
	name := func(slices, gb int) string { return fmt.Sprintf("%dg.%dgb", slices, gb) }
	return []inventory.MIGProfile{
		{Name: name(1, one), ID: 19, Count: 7, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{Name: name(1, one) + "+me", ID: 20, Count: 1, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{Name: name(1, oneDouble), ID: 15, Count: 4, Size: 2, Starts: []int{0, 2, 4, 6}},
		{Name: name(2, two), ID: 14, Count: 3, Size: 2, Starts: []int{0, 2, 4}},
		{Name: name(3, three), ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}},
		{Name: name(4, four), ID: 5, Count: 1, Size: 4, Starts: []int{0}},
		{Name: name(7, full), ID: 0, Count: 1, Size: 8, Starts: []int{0}},
	}
}

var a30 = []inventory.MIGProfile{
	{Name: "1g.6gb", ID: 14, Count: 4, Size: 1, Starts: []int{0, 1, 2, 3}},
	{Name: "1g.6gb+me", ID: 21, Count: 1, Size: 1, Starts: []int{0, 1, 2, 3}},
	{Name: "2g.12gb", ID: 5, Count: 2, Size: 2, Starts: []int{0, 2}},
	{Name: "2g.12gb+me", ID: 6, Count: 1, Size: 2, Starts: []int{0, 2}},
	{Name: "4g.24gb", ID: 0, Count: 1, Size: 4, Starts: []int{0}},
}

// The driver counts twelve memory slices on this model.
var rtxPRO6000 = []inventory.MIGProfile{
	{Name: "1g.24gb", ID: 14, Count: 4, Size: 3, Starts: []int{0, 3, 6, 9}},
	{Name: "1g.24gb+me", ID: 21, Count: 1, Size: 3, Starts: []int{0, 3, 6, 9}},
	{Name: "1g.24gb+gfx", ID: 47, Count: 4, Size: 3, Starts: []int{0, 3, 6, 9}},
	{Name: "1g.24gb+me.all", ID: 65, Count: 1, Size: 3, Starts: []int{0, 3, 6, 9}},
	{Name: "1g.24gb-me", ID: 67, Count: 4, Size: 3, Starts: []int{0, 3, 6, 9}},
	{Name: "2g.48gb", ID: 5, Count: 2, Size: 6, Starts: []int{0, 6}},
	{Name: "2g.48gb+gfx", ID: 35, Count: 2, Size: 6, Starts: []int{0, 6}},
	{Name: "2g.48gb+me.all", ID: 64, Count: 1, Size: 6, Starts: []int{0, 6}},
	{Name: "2g.48gb-me", ID: 66, Count: 2, Size: 6, Starts: []int{0, 6}},
	{Name: "4g.96gb", ID: 0, Count: 1, Size: 12, Starts: []int{0}},
	{Name: "4g.96gb+gfx", ID: 32, Count: 1, Size: 12, Starts: []int{0}},
}

// computeStarts are the possible first compute slices of a compute instance in a GPU instance, by
// the slices of both, as in the mock GPUs of NVIDIA's go-nvml.
var computeStarts = map[[2]int][]int{
	{1, 1}: {0},
	{2, 1}: {0, 1}, {2, 2}: {0},
	{3, 1}: {0, 1, 2}, {3, 2}: {0}, {3, 3}: {0},
	{4, 1}: {0, 1, 2, 3}, {4, 2}: {0, 2}, {4, 4}: {0},
	{7, 1}: {0, 1, 2, 3, 4, 5, 6}, {7, 2}: {0, 2, 4}, {7, 3}: {0, 4}, {7, 4}: {0}, {7, 7}: {0},
}
