package driverswap_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverhost"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

const (
	versionBefore = "570.86.15"
	versionAfter  = "580.95.05"
	ownPID        = 7
)

// newRealNode returns a node with the real part of gpu-driver at its socket, on a stand-in kernel with
// the old driver. The process of Swaps has the driver open until it releases it. The new driver is among
// the sources, or may be downloaded from a server.
func newRealNode(t *testing.T, from ...string) (n *node, kernel *standinkernel.Kernel, restart func(boot bool)) {
	t.Helper()
	kernel = standinkernel.New(t)
	sources := t.TempDir()
	before := standinkernel.Driver(t, sources, "old", versionBefore, standinkernel.Release)
	if len(from) == 0 {
		standinkernel.Driver(t, sources, "new", versionAfter, standinkernel.Release)
	}
	n = &node{clock: clocktest.NewFakeClock(time.Now()), socket: filepath.Join(t.TempDir(), "driver.sock"),
		wanted: feed.New(versionAfter)}
	n.opens = func(is bool) {
		kernel.Release(ownPID)
		if is {
			kernel.Hold(ownPID, "gpu-node-agent", "")
		}
		kernel.Refresh()
	}
	serve := func() (stop func()) {
		host, err := driverhost.New(driverhost.Options{
			Directory: filepath.Join(kernel.Root, "var/lib/gpu-device-plugin/driver"), Sources: sources, Pause: 10 * time.Millisecond,
			Kernel: &driverkernel.Kernel{Root: kernel.Root, Calls: kernel}, DownloadFrom: from,
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- host.Run(ctx, n.socket) }()
		return sync.OnceFunc(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			host.Close()
		})
	}
	stop := serve()
	t.Cleanup(func() { stop() })
	call := func(name string) driverapi.Status {
		s, err := driverapi.Call(t.Context(), n.socket, name, driverapi.Arguments{Digest: before})
		if err != nil && name != driverapi.CallStatus {
			t.Fatal(err)
		}
		return s
	}
	poll.Until(t, "gpu-driver", func() bool { return call(driverapi.CallStatus).Kernel != "" })
	call(driverapi.CallSwap)
	poll.Until(t, "the first driver", func() bool {
		c := call(driverapi.CallStatus).Change
		return c != nil && c.Step == driverapi.StepUnproven
	})
	call(driverapi.CallConfirm)
	n.opens(true)
	n.runClock(t)
	n.stop = n.start(t)
	return n, kernel, func(boot bool) {
		stop()
		if boot {
			n.stop()
			kernel.Release(ownPID)
			kernel.Boot()
			stop = serve()
			n.change(func() { n.released = false })
			n.stop = n.start(t)
			return
		}
		stop = serve()
	}
}

func (n *node) awaitModules(t *testing.T, kernel *standinkernel.Kernel, version string) {
	t.Helper()
	for _, module := range kernel.Modules() {
		if !strings.HasSuffix(module, "="+version) {
			t.Errorf("%s is loaded, want %s", module, version)
		}
	}
	if len(kernel.Modules()) < 2 {
		t.Errorf("modules %v", kernel.Modules())
	}
}

// TestWithGPUDriver: the loop changes the driver with the real part of the host, which restarts in the
// middle.
func TestWithGPUDriver(t *testing.T) {
	t.Parallel()
	n, kernel, restart := newRealNode(t)
	n.change(func() { n.problem = "GPU 0 is Unknown" })
	n.await(t, "changing", "does not work yet")
	restart(false)
	n.change(func() { n.problem = "" })
	n.await(t, "done", "")
	n.awaitModules(t, kernel, versionAfter)
}

// TestRefusedByKernel: the kernel refuses the new driver, and the node uses the old one.
func TestRefusedByKernel(t *testing.T) {
	t.Parallel()
	n, kernel, _ := newRealNode(t)
	kernel.Refuse("nvidia="+versionAfter, unix.ENODEV)
	s := n.await(t, "failed", "found no GPU that it supports")
	if s.Withholds || !s.NeedsSlot {
		t.Errorf("status %+v", s)
	}
	poll.Until(t, "the use of the old driver", func() bool { return locked(n, func() bool { return !n.released }) })
	n.awaitModules(t, kernel, versionBefore)
	if _, loads, _ := strings.Cut(kernel.Calls(), versionAfter); strings.Contains(loads, versionAfter) {
		t.Errorf("the bad driver was loaded twice:\n%s", kernel.Calls())
	}
}

// TestUserUntilBoot: a process keeps the old driver, and the next boot has the new one.
func TestUserUntilBoot(t *testing.T) {
	t.Parallel()
	n, kernel, restart := newRealNode(t)
	kernel.Hold(99, "train", "")
	kernel.Refresh()
	n.await(t, "next-boot", "the driver is changed at the next boot")
	n.awaitModules(t, kernel, versionBefore)
	kernel.Release(99)
	restart(true)
	n.await(t, "done", "")
	n.awaitModules(t, kernel, versionAfter)
	n.did(t, "release", "use")
}

// TestByURL: the new driver is downloaded before the node has a slot, and nothing else is. A driver that
// cannot be downloaded takes no slot.
func TestByURL(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	standinkernel.Driver(t, folder, "new", versionAfter, standinkernel.Release)
	content, digest := standinkernel.Archive(t, filepath.Join(folder, "new"))
	serves := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-serves:
			_, _ = w.Write(content)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	n, kernel, restart := newRealNode(t, server.URL+"/drivers/")
	want := func(file, digest string) {
		n.change(func() { n.source, n.archive = server.URL+file, digest })
		n.wanted.Publish("")
		n.wanted.Publish(versionAfter)
	}
	n.change(func() { n.slot = errors.New("all slots are in use") })
	want("/other/580", digest)
	n.await(t, policy.Blocked, "the driver cannot be downloaded: "+server.URL+"/other/580 is not below the URLs of --download-from")
	want("/drivers/580", digest)
	s := n.await(t, policy.Blocked, "the driver cannot be downloaded: the server answers 404 Not Found")
	if s.NeedsSlot || s.Withholds {
		t.Errorf("status %+v", s)
	}
	close(serves)
	restart(false) // the next try would be in some minutes
	n.await(t, policy.Waiting, "all slots are in use")
	n.awaitModules(t, kernel, versionBefore)
	n.change(func() { n.slot = nil })
	n.await(t, policy.Done, "")
	n.awaitModules(t, kernel, versionAfter)
}
