package kubelet_test

import (
	"net"
	"path/filepath"
	"slices"
	"testing"
)

// TestListening: the servers of other GPU device plugins that are there, of whatever resource; not
// those that ended, nor those of other devices.
func TestListening(t *testing.T) {
	t.Parallel()
	path := folder(t)
	d, other := newDirectory(t, path), newDirectory(t, path)
	if got := d.Listening(t.Context()); len(got) > 0 {
		t.Errorf("in an empty directory listen %q", got)
	}
	living := other.NewEndpoint("nvidia.com/gpu")
	for _, socket := range []string{kubeletSocket(d), d.NewEndpoint("nvidia.com/gpu"), filepath.Join(path, "rdma.sock")} {
		listen(t, socket)
	}
	for _, socket := range []string{other.NewEndpoint("nvidia.com/gpu"), filepath.Join(path, "nvidia-dead.sock")} {
		listen(t, socket)()
	}
	for _, socket := range []string{living, filepath.Join(path, "nvidia-gpu.sock")} {
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	if got, want := d.Listening(t.Context()), []string{filepath.Base(living), "nvidia-gpu.sock"}; !slices.Equal(got,
		want) {
		t.Errorf("%q listen, want %q", got, want)
	}
}
