package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func TestWrap(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		text         string
		width        int
		more, indent string
		want         string
	}{
		"nothing":                       {"", 10, "", "", "\n"},
		"short words":                   {"a b c", 10, "", "", "a b c\n"},
		"as wide as may be":             {"aaaa bbbbb", 10, "", "", "aaaa bbbbb\n"},
		"one column more":               {"aaaaa bbbbb", 10, "", "", "aaaaa\nbbbbb\n"},
		"later lines have four less":    {"aaaa bbbbb cc dd ee", 10, "", "    ", "aaaa bbbbb\n    cc dd\n    ee\n"},
		"ends of lines":                 {"aaaa bbb cc", 10, " \\", "  ", "aaaa bbb \\\n  cc\n"},
		"a word that is too long":       {"abcdefghij", 10, "", "", "abcde…\n"},
		"a word that is just not":       {"abcdef", 10, "", "", "abcdef\n"},
		"characters, and not bytes":     {"ääääää", 10, "", "", "ääääää\n"},
		"what is no text":               {"a\x1bb\tc\n", 10, "", "", "a?b?c?\n"},
		"more than one space is a word": {"a   b", 10, "", "", "a b\n"},
	} {
		if got := wrap(tt.text, tt.width, tt.more, tt.indent); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// TestMPSRoot: the control daemons need no directory of the host, and accept a given directory.
func TestMPSRoot(t *testing.T) {
	t.Setenv("MPS_ROOT", "")
	if root, given := mpsEnv("MPS_ROOT"); root != "/run/nvidia/mps" || !given {
		t.Errorf("got %q, %v", root, given)
	}
	t.Setenv("MPS_ROOT", "/mine")
	if root, given := mpsEnv("MPS_ROOT"); root != "/mine" || !given {
		t.Errorf("got %q, %v", root, given)
	}
	if other, given := mpsEnv("NO_SUCH_VARIABLE"); other != "" || given {
		t.Errorf("got %q, %v", other, given)
	}
}

// TestAge: a duration has one unit, with a value of at least two.
func TestAge(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 2*time.Minute - 1: "119s", 2 * time.Minute: "2m", 2*time.Hour - 1: "119m",
		2 * time.Hour:    "2h",
		48*time.Hour - 1: "47h", 48 * time.Hour: "2d", 95 * time.Hour: "3d",
	} {
		if got := age(d); got != want {
			t.Errorf("%v is %s, want %s", d, got, want)
		}
	}
}

// TestRetries: the reason is omitted if the state of the GPU has it.
func TestRetries(t *testing.T) {
	t.Parallel()
	next := status.Moment(statusTime.Add(90 * time.Second))
	s := status.Status{
		GPUs: []status.Device{{Index: "1", Reason: "gone"}, {Index: "2", Reason: "gone"}, {Index: "4", Reason: "gone"}},
		Retries: []status.Retry{{Index: 1, Reason: "gone", Next: next}, {Index: 2, Reason: "lost", Next: next},
			{Index: 3, Reason: "gone"}, {Index: 4, Reason: "gone", Next: next}},
	}
	if diff := cmp.Diff([]string{"GPU 2 in 90s: lost", "GPU 3 at -: gone", "GPU 1 in 90s, GPU 4 in 90s"},
		retries(s, view{now: statusTime})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	s.Retries = s.Retries[:1]
	if diff := cmp.Diff([]string{"GPU 1 at 2026-11-22T01:03:33Z"},
		retries(s, view{now: statusTime, wide: true})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestReadinessLine: the line is printed if it differs from the summary, or has a reason.
func TestReadinessLine(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		status status.Status
		want   string // empty for nothing
	}{
		"all served, ready": {status.Status{Summary: status.Summary{State: status.AllServed},
			Readiness: status.Readiness{Ready: true}}, ""},
		"degraded, ready": {status.Status{Summary: status.Summary{State: status.Degraded},
			Readiness: status.Readiness{Ready: true}}, ""},
		"starting, not ready": {status.Status{Summary: status.Summary{State: status.Starting}}, ""},
		"degraded, not ready": {status.Status{Summary: status.Summary{State: status.Degraded}}, "\nready: no\n"},
		"starting, ready": {status.Status{Summary: status.Summary{State: status.Starting},
			Readiness: status.Readiness{Ready: true}}, "\nready: yes\n"},
		"all served, with reason": {status.Status{Summary: status.Summary{State: status.AllServed},
			Readiness: status.Readiness{Ready: true, Reason: "r"}}, "\nready: yes: r\n"},
	} {
		var b strings.Builder
		printStatus(&b, tt.status, view{now: statusTime})
		if !strings.Contains(b.String(), tt.want) || tt.want == "" && strings.Contains(b.String(), "\nready: ") {
			t.Errorf("%s: %s", name, b.String())
		}
	}
}

// TestCut: the middle is removed. Characters count, not bytes.
func TestCut(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text  string
		width int
		want  string
	}{{"abcdef", 6, "abcdef"}, {"abcdef", 5, "ab…ef"}, {"abcdef", 4, "a…ef"}, {"ääääää", 6, "ääääää"}, {"äbcdeö", 3,
		"ä…ö"}} {
		if got := cut(tt.text, tt.width); got != tt.want {
			t.Errorf("%s in %d columns is %s, want %s", tt.text, tt.width, got, tt.want)
		}
	}
}

// TestFold: lines have at most 100 columns, and break at spaces, or in a word that is longer than a
// line.
func TestFold(t *testing.T) {
	t.Parallel()
	x := strings.Repeat("x", 98)
	for _, tt := range []struct{ text, indent, want string }{
		{x + " y", "", x + " y"},
		{x + " yz", "", x + "\n  yz"},
		{x + "yyz", "", x + "yy\n  z"},
		{"  a \n b ", "", "a b"},
		{x, " ", " " + x},
		{"a " + x, "   ", "   a " + x[:95] + "\n     xxx"},
	} {
		if got := (view{}).fold(tt.text, tt.indent); got != tt.want {
			t.Errorf("%q is\n%q, want\n%q", tt.text, got, tt.want)
		}
	}
}

// TestTable: the flexible column gets the remaining width of 100 columns, but at least eight.
func TestTable(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		first int // columns of the first cell
		view  view
		want  int // columns of the second
	}{"fits": {88, view{}, 10}, "one too many": {89, view{}, 9}, "least": {90, view{}, 8}, "wide": {120, view{wide: true},
		10}} {
		var b strings.Builder
		first := strings.Repeat("x", tt.first)
		(table{titles: []string{"A", "B"}, flexible: 1, rows: []row{{cells: []string{first, "0123456789"}}}}).print(&b,
			tt.view)
		if lines, want := strings.Split(b.String(), "\n"), first+"  "+cut("0123456789", tt.want); len(lines) != 4 ||
			lines[2] != want {
			t.Errorf("%s: %q, want %q", name, lines, want)
		}
	}
}

// TestSlicesTable: a slice without devices is one line, and taints have their effects.
func TestSlicesTable(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	slicesTable(&b, dra.Pool{Name: "n", Slices: []dra.Slice{{}, {Devices: []dra.Device{{Name: "gpu-0", Taints: []dra.Taint{
		{Key: dra.TaintXID, Value: "48", Effect: "NoSchedule"}, {Key: dra.TaintLeaving, Effect: "NoSchedule"},
	}}}}}})
	const want = "pool n, slice 1 of 2: 0 devices\npool n, slice 2 of 2: 1 device\n" +
		"  DEVICE\tPROFILE\tPRODUCT\tGROUP OF 2\tOF 4\tOF 8\tTAINT\n" +
		"  gpu-0\t-\t-\t-\t-\t-\tgpu.nvidia.com/xid=48:NoSchedule,gpu.nvidia.com/leaving:NoSchedule\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestStepsInAnInstanceThatStays: compute instances are created in the instance, in one sentence
// for all of them.
func TestStepsInAnInstanceThatStays(t *testing.T) {
	t.Parallel()
	id := 2
	there := layout.PlannedInstance{ID: &id, Profile: "3g.40gb", Start: 4, Size: 4,
		Devices: []string{"1c.3g.40gb", "1c.3g.40gb"}}
	g := layout.PlannedGPU{Steps: []layout.PlannedStep{{Action: inventory.MIGCreateCompute, GPU: &there},
		{Action: inventory.MIGCreateCompute, GPU: &there}}}
	if diff := cmp.Diff([]string{"create 2 x 1c.3g.40gb in GPU instance 2, 3g.40gb at slices 4 to 7"},
		stepsOf(g)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	g = layout.PlannedGPU{Resets: true, Steps: []layout.PlannedStep{{Action: inventory.MIGEnable},
		{Action: inventory.MIGDestroyInstance, GPU: &layout.PlannedInstance{Profile: "1g.10gb", Size: 1, InUse: true}}}}
	want := []string{"enable MIG mode while nothing uses the GPU; the driver resets it",
		"destroy GPU instance 1g.10gb at slice 0, once nothing uses it"}
	if diff := cmp.Diff(want, stepsOf(g)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestMIGStatusText: progress, awaited conditions, and the present and wanted division of each GPU.
func TestMIGStatusText(t *testing.T) {
	t.Parallel()
	whole, empty := &layout.PlannedPartitions{MIG: "disabled"}, &layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8}
	half := &layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
		Instances: []layout.PlannedInstance{{Profile: "3g.40gb", Start: 4, Size: 4, Devices: []string{"3g.40gb"}}}}
	s := daemon.MIGProgress{Layout: "mine", From: "label", State: "pending", Reason: "GPU 0 waits", GPUs: []daemon.MIGGPU{
		{Index: 0, Model: "H100", UUID: "GPU-0", Phase: "waiting", Reason: "in use by pod a/b", Before: whole, After: half},
		{Index: 1, Model: "H100", UUID: "GPU-1", Phase: "failed", Retry: time.Unix(0, 0), Before: empty, After: empty},
		{Index: 2, Model: "H100", UUID: "GPU-2", Phase: "done", Before: whole, After: whole},
		{Index: 3, Model: "T4", UUID: "GPU-3", Phase: "kept"},
	}}
	var b strings.Builder
	printMIGStatus(&b, s)
	const want = `Layout mine of label: pending: GPU 0 waits

GPU 0  H100  GPU-0
  waiting: in use by pod a/b
  slice    0          1          2          3          4          5          6          7
  before  MIG disabled
  after   |          |          |          |          |3g.40gb                                    |

GPU 1  H100  GPU-1
  failed; tried again at 1970-01-01T00:00:00Z
  slice    0          1          2          3          4          5          6          7
  now     |          |          |          |          |          |          |          |          |

GPU 2  H100  GPU-2
  done
  now     MIG disabled

GPU 3  T4  GPU-3
  kept
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if got := migLine(daemon.MIGProgress{}); got != "No layout is selected. GPUs stay unchanged." {
		t.Errorf("without a layout: %q", got)
	}
}
