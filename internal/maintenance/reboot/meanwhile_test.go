package reboot_test

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reboot"
)

// TestConcurrentWriter: a file written by another program, such as apt, while this program removes
// its own file, is never lost. The critical moment between check and removal lasts a few
// microseconds, so the test needs many tries.
func TestConcurrentWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "reboot-required")
	var steps atomic.Int64
	now := make(chan struct{})
	close(now)
	a := &reboot.Asker{Clock: clock.RealClock{}, Wanted: func() (reboot.Sentinel, [3]<-chan struct{}) {
		return reboot.Sentinel{Path: path, Known: true, Reason: []string{reason, ""}[steps.Add(1)%2]}, [3]<-chan struct{}{now}
	}}
	ctx, end := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	defer func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	pass := func(n int64) { // until the program has begun so many steps more
		for until := steps.Load() + n; steps.Load() < until; {
			runtime.Gosched()
		}
	}
	const tries = 150 // every tenth to thirtieth try hits the moment
	lost := 0
	for range tries {
		write(t, path+".apt", apt)
		pass(1) // now the program writes and removes its own file in turn
		for wait := time.Now().Add(rand.N(200 * time.Microsecond)); time.Now().Before(wait); {
			runtime.Gosched()
		}
		if err := os.Rename(path+".apt", path); err != nil {
			t.Fatal(err)
		}
		pass(3)
		if text := read(t, path); text != apt {
			lost++
		}
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	if lost > 0 {
		t.Errorf("of %d requests of somebody else %d were lost", tries, lost)
	}
}
