package logwriter_test

import (
	"encoding/json"
	"errors"
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/logwriter"
)

// level is a Stringer, like the states in log messages.
type level int

func (level) String() string { return "Lost" }

// TestJSON checks the keys known to log collectors from Kubernetes' own components, and that each
// line is an object.
func TestJSON(t *testing.T) {
	out := &failing{}
	out.mended.Store(true)
	w := logwriter.New(out)
	log := w.JSON().WithName("monitor").WithValues("resource", "a/b", "endpoint", "one.sock")
	log.Info("Health changed", "to", level(1), "endpoint", "two.sock", "devices", []string{"GPU-0", "a\nb"}, "n",
		uint64(79))
	log.Error(errors.New("busy"), "Cannot do it", "since", time.Unix(1, 0).UTC(), "after", time.Second)
	log.V(2).Info("Not shown")
	var settings flag.FlagSet
	klog.InitFlags(&settings)
	if err := settings.Set("v", "2"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = settings.Set("v", "0") }()
	log.V(2).Info("Shown")
	log.V(4).Info("Not shown")
	w.FlushWithin(patience)
	out.mended.Store(false)
	if _, err := w.Write([]byte("one\ntwo\nthree\n")); err != nil {
		t.Fatal(err)
	}
	w.FlushWithin(patience)
	out.mended.Store(true)
	w.FlushWithin(patience)

	want := []map[string]any{
		{"v": 0.0, "msg": "Health changed", "logger": "monitor", "resource": "a/b", "to": "Lost",
			"endpoint": "two.sock", "devices": []any{"GPU-0", "a\nb"}, "n": 79.0},
		{"msg": "Cannot do it", "logger": "monitor", "resource": "a/b", "endpoint": "one.sock", "err": "busy",
			"since": "1970-01-01T00:00:01Z", "after": "1s"},
		{"v": 2.0, "msg": "Shown", "logger": "monitor", "resource": "a/b", "endpoint": "one.sock"},
		{"v": 0.0, "msg": "Dropped log lines that could not be written", "lines": 3.0},
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d lines:\n%s", len(lines), out.String())
	}
	for i, line := range lines {
		var got map[string]any
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if strings.Count(line, `"endpoint"`) > 1 {
			t.Errorf("a key is there twice: %s", line)
		}
		at, _ := got["ts"].(float64)
		if age := time.Since(time.UnixMilli(int64(at))); age < -time.Minute || age > time.Minute {
			t.Errorf("the time of %s is %v ago", line, age)
		}
		if caller, _ := got["caller"].(string); !strings.HasPrefix(caller, "json_test.go:") &&
			!strings.HasPrefix(caller, "logwriter.go:") {
			t.Errorf("the caller of %s", line)
		}
		delete(got, "ts")
		delete(got, "caller")
		if diff := cmp.Diff(want[i], got); diff != "" {
			t.Errorf("line %d (-want +got):\n%s", i, diff)
		}
	}
}
