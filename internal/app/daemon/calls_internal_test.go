package daemon

import (
	"net"
	"path/filepath"
	"slices"
	"testing"

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
