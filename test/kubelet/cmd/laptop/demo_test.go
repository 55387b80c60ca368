package main

import (
	"strings"
	"testing"
	"time"
)

// TestLine: a result that does not fit beside its chapter has lines of its own, and no word is cut.
func TestLine(t *testing.T) {
	t.Parallel()
	const ids = "NVIDIA_VISIBLE_DEVICES=GPU-787a37b7-5768-8cbb-b621-369a695c93a0, GPU-61313477-0e8d-87f7-ac46-372e96f2f690"
	for result, want := range map[string]int{"capacity 8": 1, ids: 3} {
		text := line("a pod gets two GPUs", 1100*time.Microsecond, result, 80)
		lines := strings.Split(text, "\n")
		for _, one := range lines {
			if len(one) > 80 {
				t.Errorf("longer than 80 columns: %s", one)
			}
		}
		if len(lines) != want || !strings.Contains(strings.Join(strings.Fields(text), " "), "1.1 ms "+result) {
			t.Errorf("%d lines, want %d:\n%s", len(lines), want, text)
		}
	}
}
