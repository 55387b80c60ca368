package nodeevents_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// maxText is the greatest size of a message, in bytes.
const maxText = 1024

// TestReasonOfTheDriver: 1024 bytes stay unchanged. Longer text keeps as many complete characters as
// leave room for the mark.
func TestReasonOfTheDriver(t *testing.T) {
	t.Parallel()
	x := strings.Repeat("x", maxText-3)
	for text, want := range map[string]string{
		x + "abc": x + "abc", x + "abcd": x + "…", x + "é": x + "é", "é" + x + "a": "é" + x + "a",
		"é" + x + "ab": "é" + x[:maxText-5] + "…",
		x[1:] + "éabc": x[1:] + "…", "a \n b": "a b", "a\xff": "a?",
	} {
		c, _ := nodeevents.Judge(with(node(gpu(0, "Healthy")), func(s *status.Status) { s.Stale = text }), start, true)
		if got := c.Message; got != want || len(got) > maxText || !utf8.ValidString(got) {
			t.Errorf("%d bytes became %d that end in %q, want %d", len(text), len(got), got[max(0, len(got)-8):], len(want))
		}
	}
}

// TestListOfDevices: text that fits to the byte is complete. Every item but the last leaves room for
// the number of omitted items.
func TestListOfDevices(t *testing.T) {
	t.Parallel()
	x := func(n int) string { return strings.Repeat("x", n) }
	const prefix, more = "no verdict yet: ", len("; and 1000 more")
	const room = maxText - len(prefix)
	for name, tt := range map[string]struct {
		uuids []string
		want  string // without the prefix
	}{
		"two":                     {[]string{"a", "b"}, "a; b"},
		"one that just fits":      {[]string{x(room)}, x(room)},
		"the last fits":           {[]string{"a", x(room - 3)}, "a; " + x(room-3)},
		"the last does not":       {[]string{"a", x(room - 2)}, "a; and 1 more"},
		"another one fits":        {[]string{x(room - more), "y"}, x(room-more) + "; y"},
		"another one does not":    {[]string{x(room - more + 1), "y"}, "and 2 more"},
		"the second of the four":  {[]string{"a", x(maxText), "y", "z"}, "a; and 3 more"},
		"characters of two bytes": {[]string{strings.Repeat("é", 600)}, "and 1 more"},
	} {
		var devices []status.Device
		for i, uuid := range tt.uuids {
			d := gpu(i, "Unknown contact reset")
			d.UUID = uuid
			devices = append(devices, d)
		}
		c, _ := nodeevents.Judge(node(devices...), start, false)
		if got := c.Message; got != prefix+tt.want {
			t.Errorf("%s: %.40q, %d bytes; want %.40q, %d bytes", name, got, len(got), prefix+tt.want, len(prefix+tt.want))
		}
	}
}

// TestRecall: the next process knows from the condition what each device had, so that it reports
// only what is new. What is no entry of a device is no device.
func TestRecall(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"Unhealthy xid 79 reboot", "Lost reset-required drain+reset", "Unhealthy hang reset",
		"Unhealthy"} {
		for _, uuid := range []string{"GPU-5f1f", "MIG-GPU-aaaa-bbbb/1/0"} {
			bad, whole := gpu(0, state), gpu(0, "Healthy")
			bad.UUID, whole.UUID = uuid, uuid
			c, _ := nodeevents.Judge(node(bad), start, false)
			var same, repaired nodeevents.History
			same.Recall(c, true)
			if b := same.Next(node(bad), start, 25); len(b.Events) != 0 {
				t.Errorf("%s, unchanged: %+v", c.Message, b.Events)
			}
			repaired.Recall(c, true)
			b := repaired.Next(node(whole), start, 25)
			if len(b.Events) != 1 || b.Events[0].Reason != nodeevents.GPURecovered || b.Events[0].Devices[0] != uuid {
				t.Errorf("%s, Healthy now: %+v", c.Message, b.Events)
			}
		}
	}
	for _, text := range []string{"", "all GPUs are healthy", "and 5 more", "GPU 3 cannot be read, remedy: reconnect",
		"no verdict yet: GPU-1"} {
		var h nodeevents.History
		h.Recall(nodeevents.Condition{Status: nodeevents.False, Message: text}, true)
		if b := h.Next(node(gpu(0, "Healthy")), start, 25); len(b.Events) != 0 {
			t.Errorf("%q: %+v", text, b.Events)
		}
	}
}
