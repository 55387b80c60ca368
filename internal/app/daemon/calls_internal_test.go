package daemon

import (
	"net"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestKubeletIsSeen: each socket of the kubelet counts as a kubelet, and its record of device
// plugins is read from its checkpoint.
func TestKubeletIsSeen(t *testing.T) {
	t.Parallel()
	folder := loopback.Folder(t)
	socket := filepath.Join(folder, "kubelet.sock")
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--kubelet-socket", socket)...))
	if _, err := (devicePlugins{d.kubelet.account, d.kubelet.directory}).Remembered(); err == nil {
		t.Error("a checkpoint that is not there is read")
	}
	running(t, d.kubelet.watchKubelet)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	poll.Until(t, "a kubelet is seen", func() bool {
		seen := d.kubelet.kubelets.Value()
		s, err := d.status(t.Context())
		return err == nil && seen > 0 && s.Kubelets == seen
	})
}

func TestHolder(t *testing.T) {
	t.Parallel()
	for want, h := range map[string]mig.Holder{
		"pod a/b":        {Pod: mig.Pod{Namespace: "a", Name: "b", UID: "c"}},
		"pod with UID c": {Pod: mig.Pod{UID: "c"}, PID: 3},
		"process 3":      {PID: 3},
	} {
		if got := holder(h); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestCallsThatHang: every call is shown, and only the wait for events affects the events of all
// GPUs.
func TestCallsThatHang(t *testing.T) {
	t.Parallel()
	var s status.Status
	addCalls(&s, []inventory.Call{{Function: "nvmlInit", GPU: inventory.NoGPU},
		{Function: "nvmlEventSetWait", GPU: inventory.NoGPU}, {Function: "nvmlDeviceGetName", GPU: 0}})
	if s.Hanging != 3 || len(s.Calls) != 3 || s.Calls[0].GPU != nil || s.Calls[2].GPU == nil || *s.Calls[2].GPU != 0 {
		t.Errorf("%d calls: %+v", s.Hanging, s.Calls)
	}
	if diff := cmp.Diff([]string{"all GPUs: no driver events; faults are found by polling only (nvmlEventSetWait " +
		"does not return)"}, s.Unwatched); diff != "" {
		t.Errorf("without events (-want +got):\n%s", diff)
	}
}
