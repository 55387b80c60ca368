package kubelet_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestPodRuns: whether a pod has a process is seen by its cgroup, wherever kubelet makes that.
func TestPodRuns(t *testing.T) {
	t.Parallel()
	const uid = "fc441736-117b-4514-bd97-131200757cde"
	for name, tt := range map[string]struct {
		cgroup, pids string
		want         bool
	}{
		"systemd":            {"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podfc441736_117b_4514_bd97_131200757cde.slice", "3\n", true},
		"systemd, no QoS":    {"kubepods.slice/kubepods-podfc441736_117b_4514_bd97_131200757cde.slice", "1\n", true},
		"cgroupfs":           {"kubepods/besteffort/pod" + uid, "2\n", true},
		"version 1":          {"pids/kubepods/pod" + uid, "2\n", true},
		"below another root": {"kubelet/kubepods/burstable/pod" + uid, "2\n", true},
		"it has ended":       {"kubepods/besteffort/pod" + uid, "0\n", false},
		"another pod":        {"kubepods/besteffort/pod00000000-117b-4514-bd97-131200757cde", "2\n", false},
		"too deep":           {"a/b/c/d/e/pod" + uid, "2\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			folder := filepath.Join(root, tt.cgroup)
			if err := os.MkdirAll(filepath.Join(folder, "container"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "pids.current"), []byte(tt.pids), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := kubelet.PodRuns(root, uid); got != tt.want {
				t.Errorf("PodRuns() = %v", got)
			}
		})
	}
	if kubelet.PodRuns(filepath.Join(t.TempDir(), "none"), uid) {
		t.Error("without cgroups a pod runs")
	}
}
