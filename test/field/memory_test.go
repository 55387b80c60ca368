package field_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// newCgroup makes a cgroup with a limit of memory, in MB. It goes with the test.
func newCgroup(t *testing.T, limit int) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	parent, file := "/sys/fs/cgroup", "memory.max"
	for line := range strings.Lines(string(own)) {
		if _, at, found := strings.Cut(strings.TrimSpace(line), ":memory:"); found { // version 1
			parent, file = filepath.Join("/sys/fs/cgroup/memory", at), "memory.limit_in_bytes"
		}
	}
	folder, err := os.MkdirTemp(parent, "gpu-device-plugin-test-")
	if err == nil {
		t.Cleanup(func() { _ = os.Remove(folder) })
		// The file is there where the parent controls memory.
		var f *os.File
		if f, err = os.OpenFile(filepath.Join(folder, file), os.O_WRONLY, 0); err == nil {
			_, err = f.WriteString(strconv.Itoa(limit << 20))
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		t.Skipf("no cgroup with a limit of memory can be made here: %v", err)
	}
	return folder
}

// sixteen is a machine with sixteen GPUs, each divided into seven MIG devices.
func sixteen(t *testing.T) string {
	t.Helper()
	text := "description: sixteen A100, each divided into seven MIG devices\ndriver: 580.95.05\ncuda: \"13.0\"\nmodel: a100-sxm4-40gb\ngpus:\n"
	for i := range 16 {
		mig := strings.TrimSuffix(strings.Repeat("1g.5gb, ", 7), ", ")
		text += fmt.Sprintf("- {bdf: \"0000:%02x:00.0\", pcie: %d/%d, mig: [%s]}\n", 16+4*i, i/8, i, mig)
	}
	path := filepath.Join(t.TempDir(), "sixteen.yaml")
	put(t, path, text)
	return path
}

// TestLimitsOfMemory: within the limits that the page on sizing names, all devices are offered and
// the kernel kills nothing (E10).
func TestLimitsOfMemory(t *testing.T) {
	t.Parallel()
	if raceDetector {
		t.Skip("the race detector takes several times as much memory")
	}
	replicas := filepath.Join(t.TempDir(), "config.yaml")
	put(t, replicas, "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1000}]}}\n")
	for name, tt := range map[string]struct {
		limit, devices int
		args           []string
	}{
		"16 GPUs":             {32, 16, []string{"--simulate=dgx-2"}},
		"112 MIG devices":     {32, 112, []string{"--simulate=" + sixteen(t), "--mig-strategy=single"}},
		"16 GPUs shared 1000": {64, 16_000, []string{"--simulate=dgx-2", "--config-file", replicas}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cgroup := newCgroup(t, tt.limit)
			k, args := withKubelet(t)
			h := newHostIn(t, cgroup, append(append(args, "-v=2"), tt.args...)...)
			has(t, k, "nvidia.com/gpu", tt.devices)
			poll.Until(t, "the kubelet's account agrees", func() bool { _, status := h.do("ready"); return status == 0 })
			most := h.most()
			if log := h.stop(); !strings.Contains(log, fmt.Sprintf("bytes=%d ", tt.limit<<20)) {
				t.Errorf("the daemon does not know its limit:\n%s", log)
			}
			t.Logf("the daemon had %d MB of %d, its code included", most, tt.limit)
		})
	}
}
