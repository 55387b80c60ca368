package field_test

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const wholeGPU = "nvidia.com/gpu"

// A station is a folder with a kubelet and room for daemons.
type station struct {
	*kubelet.Kubelet
	folder string
}

func newStation(t testing.TB, version kubelet.Version) *station {
	t.Helper()
	folder := loopback.Folder(t)
	plugins := filepath.Join(folder, "d")
	if err := os.Mkdir(plugins, 0o750); err != nil {
		t.Fatal(err)
	}
	k, err := kubelet.Start(kubelet.Options{Dir: plugins, PodResourcesSocket: filepath.Join(folder, "p.sock"),
		Version: version})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the kubelet saw %v", k.Events(0))
		}
		k.Stop()
	})
	return &station{k, folder}
}

// serve starts a daemon under a name, and returns when it says that the kubelet counts its GPUs.
func (s *station) serve(t testing.TB, name string, args ...string) *host {
	t.Helper()
	h := &host{t: t, folder: filepath.Join(s.folder, name), socket: filepath.Join(s.folder, name+".sock")}
	h.start(append([]string{
		"--simulate=dgx-h100", "--kubelet-socket", filepath.Join(s.folder, "d", "kubelet.sock"),
		"--pod-resources-socket", filepath.Join(s.folder, "p.sock"),
	}, args...)...)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := h.do("status")
			t.Logf("%s says:\n%s\nand has logged:\n%s", name, text, h.log.String())
		}
	})
	poll.Until(t, name+" is ready", func() bool { _, status := h.do("ready"); return status == 0 })
	return h
}

// TestARollOutOvertakesTheOneBefore: the pod of the overtaken revision, which is deleted, has the
// old pod serve again before it ends (A4). A process that is alone, as after the DaemonSet has been
// deleted, does not wait for another one.
func TestARollOutOvertakesTheOneBefore(t *testing.T) {
	t.Parallel()
	for _, version := range []kubelet.Version{kubelet.V136, kubelet.V137} {
		t.Run(string(version), func(t *testing.T) {
			t.Parallel()
			s := newStation(t, version)
			old := s.serve(t, "old")
			overtaken := s.serve(t, "overtaken")
			var least atomic.Int64
			least.Store(int64(s.Allocatable(wholeGPU)))
			watching, watched := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(watched)
				ticker := time.NewTicker(time.Millisecond)
				defer ticker.Stop()
				for {
					select {
					case <-watching:
						return
					case <-ticker.C:
						least.Store(min(least.Load(), int64(s.Allocatable(wholeGPU))))
					}
				}
			}()
			overtaken.stop()
			next := s.serve(t, "next")
			old.stop()
			poll.Until(t, "the next one is ready", func() bool { _, status := next.do("ready"); return status == 0 })
			close(watching)
			<-watched
			if least := least.Load(); least < 8 {
				t.Errorf("the kubelet counted %d GPUs, want 8 throughout", least)
			}
			began := time.Now()
			next.stop()
			if took := time.Since(began); took > 4*time.Second { // it waits for five where it waits
				t.Errorf("the last process ended after %v", took)
			}
			poll.Until(t, "no GPU is allocatable", func() bool { return s.Allocatable(wholeGPU) == 0 })
		})
	}
}
