package arch

import (
	"io/fs"
	"strings"
	"testing"
)

// TestRecording: where docs/run.svg is not animated, its last frame is shown and no other, and that
// frame has the reason and the remedy of the fault.
func TestRecording(t *testing.T) {
	t.Parallel()
	text, err := fs.ReadFile(root, "docs/run.svg")
	if err != nil {
		t.Fatal(err)
	}
	_, groups, _ := strings.Cut(string(text), "<g ")
	frames := strings.Split(groups, "<g ")
	for i, frame := range frames {
		if shown := strings.Contains(frame, ` visibility="visible">`); shown != (i == len(frames)-1) ||
			shown == strings.Contains(frame, ` visibility="hidden">`) {
			t.Errorf("frame %d of %d is shown without animation: %t", i, len(frames), shown)
		}
	}
	for _, want := range []string{"XID 79 (GPU fell off the bus): restart the node", "  reboot<", "status says:", ">ready: "} {
		if !strings.Contains(frames[len(frames)-1], want) {
			t.Errorf("the last frame lacks %q", want)
		}
	}
}
