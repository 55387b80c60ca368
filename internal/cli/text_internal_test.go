package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
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

// TestMPSRoot: the control daemons need no directory of the host, and take one that is given.
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

func TestHolder(t *testing.T) {
	t.Parallel()
	for want, h := range map[string]mig.Holder{
		"pod a/b":        {Pod: mig.Pod{Namespace: "a", Name: "b", UID: "c"}},
		"pod with UID c": {Pod: mig.Pod{UID: "c"}, PID: 3},
		"process 3":      {PID: 3},
	} {
		if got := holder(h); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestCallsThatHang: each is shown, and only the wait for events takes the events of all GPUs.
func TestCallsThatHang(t *testing.T) {
	t.Parallel()
	var s status.Status
	addCalls(&s, []inventory.Call{{Function: "nvmlInit", GPU: inventory.NoGPU}, {Function: "nvmlEventSetWait", GPU: inventory.NoGPU}, {Function: "nvmlDeviceGetName", GPU: 0}})
	if s.Hanging != 3 || len(s.Calls) != 3 || s.Calls[0].GPU != nil || s.Calls[2].GPU == nil || *s.Calls[2].GPU != 0 {
		t.Errorf("%d calls: %+v", s.Hanging, s.Calls)
	}
	if diff := cmp.Diff([]string{"all GPUs: nvmlEventSetWait does not return"}, s.Unwatched); diff != "" {
		t.Errorf("without events (-want +got):\n%s", diff)
	}
}

// TestMIGStatusText: for each GPU how far it is, what it waits for, and how it is and will be divided.
func TestMIGStatusText(t *testing.T) {
	t.Parallel()
	whole, empty := &plannedPartitions{MIG: "disabled"}, &plannedPartitions{MIG: "enabled", MemorySlices: 8}
	half := &plannedPartitions{MIG: "enabled", MemorySlices: 8, Instances: []plannedInstance{{Profile: "3g.40gb", Start: 4, Size: 4, Devices: []string{"3g.40gb"}}}}
	s := migStatus{Layout: "mine", From: "label", State: "pending", Reason: "GPU 0 waits", GPUs: []migGPU{
		{Index: 0, Model: "H100", UUID: "GPU-0", Phase: "waiting", Reason: "in use by pod a/b", Before: whole, After: half},
		{Index: 1, Model: "H100", UUID: "GPU-1", Phase: "failed", Retry: time.Unix(0, 0), Before: empty, After: empty},
		{Index: 2, Model: "H100", UUID: "GPU-2", Phase: "done", Before: whole, After: whole},
		{Index: 3, Model: "T4", UUID: "GPU-3", Phase: "kept"},
	}}
	var b strings.Builder
	s.text(&b)
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
	if got := (migStatus{}).line(); got != "No layout is named. GPUs stay as they are." {
		t.Errorf("without a layout: %q", got)
	}
}
