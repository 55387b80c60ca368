package dra_test

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestIMEXOfConfig: the configuration of a claim asks for channel 0 or for none.
func TestIMEXOfConfig(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ fields, want, problems string }{
		{`"kind":"GpuConfig","imex":{"channelIDs":[0]}`, "GpuConfig: time-slicing, interval Default, IMEX channel 0",
			""},
		{`"kind":"MigDeviceConfig","imex":{"channelIDs":[0]},"sharing":{"strategy":"MPS"}`,
			"MigDeviceConfig: MPS, IMEX channel 0", ""},
		{`"kind":"GpuConfig","imex":{"channelIDs":[]}`, "GpuConfig: time-slicing, interval Default", ""},
		{`"kind":"GpuConfig","imex":{"channelIDs":[1]}`, "", "imex.channelIDs: must be [] or [0]"},
		{`"kind":"GpuConfig","imex":{"channelIDs":[0,0]}`, "", "imex.channelIDs: must be [] or [0]"},
		{`"kind":"GpuConfig","imex":{"channelIDs":0,"x":1}`, "",
			"imex.channelIDs: is not a list\nimex.x: is not known"},
	} {
		got, problems := dra.ParseConfig([]byte(`{"apiVersion":"resource.nvidia.com/v1beta1",` + tt.fields + `}`))
		if all := strings.Join(problems, "\n"); all != tt.problems || all == "" && got.String() != tt.want {
			t.Errorf("%s: got %s, problems %q; want %s, %q", tt.fields, got, all, tt.want, tt.problems)
		}
	}
}
