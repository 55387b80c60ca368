package mps

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"
)

func TestReadingAnswers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		read       func(string) string
		text, want string
	}{
		{percentage, "33", "33"}, {percentage, "33.0", "33"}, {percentage, "Invalid", ""}, {percentage, "", ""},
		{memory, "20480M", "20G"}, {memory, "20G", "20G"}, {memory, "20000M", "19G"}, {memory, "1023M", "1023M"},
		{memory, "1024M", "1G"},
		{memory, strings.Repeat("9", 30) + "M", ""}, {memory, "512M", "512M"},
		{memory, "Default limit: 512 M", "512M"}, {memory, "Memory limit is not set", ""},
	} {
		if got := tt.read(tt.text); got != tt.want {
			t.Errorf("%q is read as %q, want %q", tt.text, got, tt.want)
		}
	}
}

// TestOutputLimit: an endless line, and endless lines.
func TestOutputLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		l := &logger{log: log}
		longest := strings.Repeat("x", maxLine)
		for _, text := range []string{"one\ntw", "o\n", "\n", longest, "\n", "left ", strings.Repeat(longest, 100),
			"\n"} {
			if n, err := fmt.Fprint(l, text); err != nil || n != len(text) {
				t.Fatalf("Write: %d, %v", n, err)
			}
			if len(l.partial) > maxLine {
				t.Fatalf("%d bytes are kept", len(l.partial))
			}
		}
		for range 100 {
			if _, err := fmt.Fprintln(l, "again"); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		text, err := os.ReadFile("testdata/client.log")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(l, "[Control 1] Accepting connection...\n%slast\n", text); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, line := range log.GetSink().(ktesting.Underlier).GetBuffer().Data() {
			got = append(got, fmt.Sprint(append([]any{line.Message}, line.ParameterKVList...)...))
		}
		// In a second, a hundred lines, of which one is empty; the long line has 101 parts, and there are
		// 105 other lines.
		want := []string{"MPS outputlineone", "MPS outputlinetwo", "MPS outputline" + longest,
			"MPS outputlineleft " + longest[5:]}
		for range maxLines - 5 {
			want = append(want, "MPS outputline"+longest)
		}
		want = append(want, "MPS output was not logged in fulldropped105", "MPS outputlinelast")
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("what is logged (-want +got):\n%s", diff)
		}
	})
}
