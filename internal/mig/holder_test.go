package mig_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

func TestHolder(t *testing.T) {
	t.Parallel()
	for want, h := range map[string]mig.Holder{
		"pod a/b":        {Pod: mig.Pod{Namespace: "a", Name: "b", UID: "c"}},
		"pod with UID c": {Pod: mig.Pod{UID: "c"}, PID: 3},
		"process 3":      {PID: 3},
	} {
		if got := h.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
