package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// binary is the path of the daemon's binary, from TestMain on.
var binary string

func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "soak")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(folder, "gpu-device-plugin")
	if output, err := exec.Command("go", "build", "-o", binary,
		"../../cmd/gpu-device-plugin").CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build the daemon: %v\n%s", err, output))
	}
	code := m.Run()
	if err := os.RemoveAll(folder); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// TestShortSoak: nothing is violated in a short time. `make soak` takes longer.
func TestShortSoak(t *testing.T) {
	t.Parallel()
	if err := run(t.Context(), options{daemon: binary, during: 15 * time.Second, seed: 1, slack: 8}); err != nil {
		t.Error(err)
	}
}

// undisturbed makes a stage whose daemon is watched and to which nothing happens.
func undisturbed(t *testing.T) *stage {
	t.Helper()
	s, err := newStage(options{daemon: binary, slack: 2}, plans[0], 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		group.Wait()
		for _, n := range s.running() {
			_ = s.stopDaemon(n, syscall.SIGKILL) // it may have ended
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := replace(s.configFile(), s.setting.file("")); err != nil {
		t.Fatal(err)
	}
	first, err := s.startDaemon(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s.awaitReady(ctx, first)
	group.Go(func() { s.watch(ctx) })
	s.settleNow()
	return s
}

// finds waits until something is violated, and says so.
func (s *stage) finds(t *testing.T, text string) {
	t.Helper()
	if err := node.Poll(t.Context(), 3*time.Minute, nil, func(context.Context) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, v := range s.violations {
			if strings.Contains(v.text, text) {
				return nil
			}
		}
		return errors.New("no violation says it")
	}); err != nil {
		t.Errorf("%q: %v; found: %v", text, err, s.violations)
	}
}

// TestWhatIsWrongIsFound: each of these happens behind the back of the model.
func TestWhatIsWrongIsFound(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(t *testing.T, s *stage) error
		want string
	}{
		"a good GPU is Unhealthy": {func(t *testing.T, s *stage) error {
			return s.call(t.Context(), "simulate.inject", simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
		}, "GPU 3 is well"},
		"a bad GPU is Healthy": {func(_ *testing.T, s *stage) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.gpus[2].problem = problems[0]
			return nil
		}, "GPU 2 is not to be given out: XID 48"},
		"a GPU that nobody offers": {func(_ *testing.T, s *stage) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.gpus[2].removed = true
			return nil
		}, "is Healthy, and nobody offers it"},
		"a device that a pod holds is not listed": {func(_ *testing.T, s *stage) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pods["work"] = []held{{key: key{wholeGPU, "GPU-none"}}}
			return nil
		}, "held by pod work and not listed"},
		"a resource of which pods hold devices is not served for long": {func(_ *testing.T, s *stage) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pods["work"] = []held{{key: key{"nvidia.com/mig-1g.10gb", "MIG-none"}}}
			s.unserved["nvidia.com/mig-1g.10gb"] = time.Now().Add(-time.Hour)
			return nil
		}, "held by pod work and not listed"},
		"the daemon dies": {func(_ *testing.T, s *stage) error { return s.first().Running().Kill() },
			"a daemon ended by itself"},
		"a stream ends": {func(_ *testing.T, s *stage) error { s.DropStream(wholeGPU); return nil },
			"while nothing happened to it"},
		"a GPU in two forms": {func(t *testing.T, s *stage) error {
			s.mu.Lock()
			s.pods["work"] = []held{{key{"nvidia.com/gpu.shared", s.gpus[0].uuid + "::0"}, 0, ""}}
			for _, g := range s.gpus[1:] {
				s.pods[g.uuid] = []held{{key{wholeGPU, g.uuid}, g.slot, ""}}
			}
			s.mu.Unlock()
			for range 8 {
				s.startPod(t.Context(), s.random, fmt.Sprint("pod-", time.Now().UnixNano()))
			}
			return nil
		}, "while pod work holds it as nvidia.com/gpu.shared"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := undisturbed(t)
			if err := tt.do(t, s); err != nil {
				t.Fatal(err)
			}
			s.finds(t, tt.want)
		})
	}
}

func TestSlope(t *testing.T) {
	var samples []sample
	for i := range 12 {
		samples = append(samples, sample{at: time.Duration(i) * 5 * time.Minute, resident: 20 + float64(i), threads: 10})
	}
	if got := slope(samples, limits[0].of) * 3600; got < 11.99 || got > 12.01 {
		t.Errorf("slope = %v an hour, want 12", got)
	}
	lines, wrong := growth(samples)
	if len(lines) != 2 || len(wrong) != 1 || !strings.Contains(wrong[0], "resident memory grows by 12.00 MB an hour") {
		t.Errorf("growth() = %q, %q; want that memory alone grows", lines, wrong)
	}
	if svg := drawing([]curve{{"enduring", samples}}, time.Hour); strings.Count(svg, "<polyline") != 3 ||
		strings.Contains(svg, "NaN") {
		t.Errorf("drawing() = %s", svg)
	}
	// Threads that stay in calls are found by their goroutines.
	for i := range samples {
		samples[i] = sample{at: samples[i].at, threads: 10 + float64(i)/2, goroutines: 56 + float64(i)*7/12}
	}
	if _, wrong := growth(samples); len(wrong) != 1 || !strings.Contains(wrong[0], "goroutines grows by 7.00") {
		t.Errorf("growth() = %q, want that goroutines grow", wrong)
	}
}
