package wording_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

func TestSentences(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"0 GPUs": wording.Count(0, "GPU"), "1 GPU": wording.Count(1, "GPU"), "2 GPUs": wording.Count(2, "GPU"),
		"1 NVSwitch": wording.Count(1, "NVSwitch"), "3 NVSwitches": wording.Count(3, "NVSwitch"),
		"1 process": wording.Count(1, "process"), "2 processes": wording.Count(2, "process"),
		"":                         wording.List(nil),
		"a, b, c, d, e":            wording.List([]string{"e", "d", "c", "b", "a"}),
		"a, b, c, d, e and 2 more": wording.List([]string{"g", "f", "e", "d", "c", "b", "a"}),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
