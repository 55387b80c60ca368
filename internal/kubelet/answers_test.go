package kubelet_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// TestAnswers: what a container was given is read from kubelet's checkpoint, and one answer that
// cannot be read hides no other.
func TestAnswers(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	file := filepath.Join(d.Path(), "kubelet_internal_checkpoint")
	if _, err := d.Answers(); err == nil {
		t.Error("no error without a checkpoint")
	}
	text := standin.SavedCheckpoint(map[string][]byte{
		"volcano.sh/gpu-mem.1Gi": []byte("\x0a\x06\n\x01A\x12\x01b" + "\x22\x06\n\x01k\x12\x01v" + "\x2a\x05\n\x03x=y"),
		"other.org/x":            {0xff},
	})
	for _, tt := range []struct {
		text string
		want []kubelet.Answer
		err  string
	}{
		{text: text, want: []kubelet.Answer{{
			Resource: "volcano.sh/gpu-mem.1Gi", PodUID: "uid", Container: "c", IDs: []string{"d"},
			Env: map[string]string{"A": "b"}, Annotations: map[string]string{"k": "v"}, CDIDevices: []string{"x=y"},
		}}},
		{text: savedWithoutPods, want: []kubelet.Answer{}},
		{text: strings.Replace(savedWithPod, "GPU-c", "GPU-d", 1), err: "checksum"},
	} {
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time from memory
			got, err := d.Answers()
			if diff := cmp.Diff(tt.want, got); diff != "" || (err == nil) != (tt.err == "") {
				t.Errorf("Answers() = %v (-want +got):\n%s", err, diff)
			}
		}
	}
}
