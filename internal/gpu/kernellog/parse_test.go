package kernellog_test

import (
	"bytes"
	"context"
	"io"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/kernellog"
)

// lastXID is the XID of a record after those that a test is about.
const lastXID = 4711

// told returns the events of a log that has some text and then ends.
func told(t *testing.T, text []byte) []inventory.Event {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var events []inventory.Event
	log := io.MultiReader(bytes.NewReader(text), bytes.NewReader([]byte("\n"+record(lastXID))))
	r := kernellog.Reader{
		Open:  func() (io.ReadCloser, error) { return io.NopCloser(log), nil },
		Clock: clock.RealClock{},
		Deliver: func(_ context.Context, e inventory.Event) error {
			if e.XID == lastXID {
				cancel()
				return nil
			}
			events = append(events, e)
			return nil
		},
	}
	_ = r.Run(ctx) // it ends because ctx does, or the log
	if ctx.Err() == nil {
		t.Fatal("the last record is not told")
	}
	return events
}

func TestParse(t *testing.T) {
	t.Parallel()
	const none = inventory.Unattributed
	at := func(bdf string, xid uint64, gi, ci int) *inventory.Event {
		return &inventory.Event{Kind: inventory.EventXID, BDF: bdf, XID: xid, GI: gi, CI: ci, Logged: true}
	}
	for name, tt := range map[string]struct {
		line string
		want *inventory.Event // nil: no XID
	}{
		"XID 79": {
			"4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n",
			at("0000:3b:00.0", 79, none, none),
		},
		"without a process": {"4,1,2,-;NVRM: Xid (PCI:0000:C1:00): 119, Timeout waiting for RPC\n",
			at("0000:c1:00.0", 119, none, none)},
		"nothing after the code": {"4,1,2,-;NVRM: Xid (PCI:0000:01:00): 62", at("0000:01:00.0", 62, none, none)},
		"of a GPU instance": {"4,1,2,-;NVRM: Xid (PCI:0000:07:00 GPU-I:05): 31, pid=1\n",
			at("0000:07:00.0", 31, 5, none)},
		"of a compute instance": {"4,1,2,-;NVRM: Xid (PCI:0000:07:00 GPU-I:13 GPU-CI:02): 94, x\n",
			at("0000:07:00.0", 94, 13, 2)},
		"long domain": {"4,1,2,-;NVRM: Xid (PCI:00010000:01:1f): 48, x\n",
			at("10000:01:1f.0", 48, none, none)},
		"with a function": {"4,1,2,-;NVRM: Xid (PCI:0000:01:00.0): 48, x\n", at("0000:01:00.0", 48, none, none)},
		"before R352": {"4,1,2,-;NVRM: Xid (0000:03:00): 8, Channel 00000001\n",
			at("0000:03:00.0", 8, none, none)},
		"more fields of the record": {"3,1,2,c,caller=T1;NVRM: Xid (PCI:0000:01:00): 48, x\n",
			at("0000:01:00.0", 48, none, none)},
		"least urgent of the kernel": {"7,1,2,-;NVRM: Xid (PCI:0000:01:00): 48, x\n",
			at("0000:01:00.0", 48, none, none)},

		"written by a process":     {"8,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"written by another one":   {"12,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"inside another message":   {"4,1,2,-;python: NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"without a record's head":  {"NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"a record's second line":   {" NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"no code":                  {"4,1,2,-;NVRM: Xid (PCI:0000:01:00): , x\n", nil},
		"code that is no number":   {"4,1,2,-;NVRM: Xid (PCI:0000:01:00): x79\n", nil},
		"code that is too long":    {"4,1,2,-;NVRM: Xid (PCI:0000:01:00): 79797979797979797979, x\n", nil},
		"address that is none":     {"4,1,2,-;NVRM: Xid (PCI:0000:01): 79, x\n", nil},
		"address that is too long": {"4,1,2,-;NVRM: Xid (PCI:0000000001:01:00): 79, x\n", nil},
		"priority that is no one":  {"x,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, x\n", nil},
		"another of the driver's":  {"4,1,2,-;NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n", nil},
		"cut":                      {"4,1,2,-;NVRM: Xid (PCI:0000", nil},
		"empty":                    {"", nil},
		"no text":                  {"\xff\xfe\x00;NVRM: Xid (\x00", nil},
	} {
		var want []inventory.Event
		if tt.want != nil {
			want = append(want, *tt.want)
		}
		if diff := cmp.Diff(want, told(t, []byte(tt.line))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:01): 79, pid=1234\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if slices.ContainsFunc(told(t, line), func(e inventory.Event) bool {
			return e.BDF == "" || e.GI < inventory.Unattributed || e.CI < inventory.Unattributed || !e.Logged
		}) {
			t.Errorf("%q", line)
		}
	})
}
