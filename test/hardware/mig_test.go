package hardware_test

import (
	_ "embed"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// h200 is what nvidia-smi mig -lgip and -lgipp of driver 580.159.04 print of an H200.
//
//go:embed testdata/mig-h200.txt
var h200 string

// TestMIGProfilesOfAnH200: the simulator and the tables of package layout say of an H200 what its
// driver says.
func TestMIGProfilesOfAnH200(t *testing.T) {
	t.Parallel()
	node, session := simulated.Open(t, "dgx-h200")
	if _, err := session.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := session.Partitions(t.Context(), node.List()[0].UUID)
	if err != nil {
		t.Fatal(err)
	}
	compareProfiles(t, parseProfiles(t, h200, 0), p)
}

// TestMIGProfiles: package nvidia and the tables of package layout say of this machine's GPUs what
// nvidia-smi says. It only asks.
func TestMIGProfiles(t *testing.T) {
	needGPU(t)
	var text strings.Builder
	for _, g := range query(t).GPUs {
		if g.MIG == "N/A" {
			t.Skipf("%s has no MIG", g.Product)
		}
	}
	text.Write(smi(t, "mig", "-lgip"))
	text.Write(smi(t, "mig", "-lgipp"))
	session, err := nvidia.New(nvidia.Options{}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := session.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	snapshot, err := session.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range snapshot.GPUs {
		p, err := session.Partitions(t.Context(), g.UUID)
		if err != nil {
			t.Fatal(err)
		}
		compareProfiles(t, parseProfiles(t, text.String(), g.Index), p)
		t.Logf("%s: the %d profiles, with their numbers, sizes, multiprocessors and places, are those of nvidia-smi", g.Model,
			len(p.Profiles))
	}
}

var (
	profileLine   = regexp.MustCompile(`\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+\d+/(\d+)\s+([\d.]+)\s+\S+\s+(\d+)\s+(\d+)\s+\d+\s+\|`)
	placementLine = regexp.MustCompile(`GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*: \{([\d,]+)\}:(\d+)`)
)

// parseProfiles reads the profiles of a GPU that nvidia-smi mig -lgip and -lgipp print.
func parseProfiles(t *testing.T, text string, index int) (profiles []inventory.MIGProfile) {
	t.Helper()
	whole := func(digits string) int {
		n, err := strconv.Atoi(digits)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, f := range profileLine.FindAllStringSubmatch(text, -1) {
		gib, err := strconv.ParseFloat(f[5], 64)
		if err != nil {
			t.Fatal(err)
		}
		if whole(f[1]) == index {
			p := inventory.MIGProfile{Name: f[2], ID: whole(f[3]), Count: whole(f[4]), MemoryBytes: uint64(gib * (1 << 30))}
			p.Attributes.Multiprocessors, p.Attributes.Decoders = whole(f[6]), whole(f[7])
			profiles = append(profiles, p)
		}
	}
	for _, f := range placementLine.FindAllStringSubmatch(text, -1) {
		for i := range profiles {
			if p := &profiles[i]; whole(f[1]) == index && whole(f[2]) == p.ID {
				p.Size = whole(f[4])
				for start := range strings.SplitSeq(f[3], ",") {
					p.Starts = append(p.Starts, whole(start))
				}
			}
		}
	}
	if len(profiles) == 0 {
		t.Fatalf("no profile can be read:\n%s", text)
	}
	return profiles
}

// compareProfiles compares the profiles that nvidia-smi prints with those of a GPU, and with the
// tables of package layout for it.
func compareProfiles(t *testing.T, want []inventory.MIGProfile, p inventory.Partitions) {
	t.Helper()
	got := map[int]inventory.MIGProfile{}
	for _, profile := range p.Profiles {
		a := profile.Attributes
		profile.Attributes = inventory.MIGAttributes{Multiprocessors: a.Multiprocessors, Decoders: a.Decoders}
		profile.MemoryBytes = profile.MemoryBytes >> 20 / 10 // nvidia-smi prints GiB with two digits
		got[profile.ID] = profile
	}
	told := map[int]inventory.MIGProfile{}
	for _, profile := range want {
		profile.MemoryBytes = profile.MemoryBytes >> 20 / 10
		told[profile.ID] = profile
	}
	if diff := cmp.Diff(told, got); diff != "" {
		t.Errorf("(-nvidia-smi +ours):\n%s", diff)
	}
	for _, profile := range want {
		for n := range profile.Count + 2 {
			plan := func(profiles []inventory.MIGProfile) string {
				g := layout.GPU{UUID: "GPU", InUse: map[int]bool{}, Partitions: inventory.Partitions{
					PCIDevice: p.PCIDevice, Mode: inventory.MIGEnabled, Pending: inventory.MIGEnabled, Profiles: profiles,
				}}
				item := layout.Item{All: true, Enabled: true, Devices: map[string]int{profile.Name: n}}
				c := layout.Plan(layout.Layout{Name: "test", Items: []layout.Item{item}}, []layout.GPU{g}).GPUs[0]
				var calls []string
				for _, s := range c.Steps {
					calls = append(calls, fmt.Sprintf("%+v", s.Call(0)))
				}
				return strings.Join(append(calls, c.Reason), "\n")
			}
			if diff := cmp.Diff(plan(want), plan(nil)); diff != "" {
				t.Errorf("%d of %s (-by nvidia-smi +by our tables):\n%s", n, profile.Name, diff)
			}
		}
	}
}
