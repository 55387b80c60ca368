package devicemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

// TestCheckpointOfTheOther holds the stand-in's checkpoint true, its checksum included: each of the
// two kubelets starts from the file that the other left, and knows what the pod holds.
func TestCheckpointOfTheOther(t *testing.T) {
	for _, standInFirst := range []bool{true, false} {
		t.Run(fmt.Sprint("stand-in first ", standInFirst), func(t *testing.T) {
			root, err := os.MkdirTemp("", "k")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(root) })
			dir := filepath.Join(root, "device-plugins")

			first := allocatedOnce(t, dir, filepath.Join(root, "first.sock"), standInFirst)
			second := allocatedOnce(t, dir, filepath.Join(root, "second.sock"), !standInFirst)
			if !slices.Equal(first.IDs, second.IDs) || second.Response.GetEnvs()["SERVED_BY"] != "first.sock" {
				t.Errorf("the pod has %v, want %v as answered by the first plugin", second, first)
			}
		})
	}
}

// allocatedOnce starts a kubelet and a plugin, admits a pod and ends both.
func allocatedOnce(t *testing.T, dir, podResources string, standIn bool) kubelet.Allocation {
	t.Helper()
	const name = "nvidia.com/gpu"
	var subject scenario.Subject
	if standIn {
		k, err := kubelet.Start(kubelet.Options{Dir: dir, PodResourcesSocket: podResources, Version: version})
		if err != nil {
			t.Fatal(err)
		}
		defer k.Stop()
		subject = k
	} else {
		n := startNode(t, dir, podResources)
		defer n.stop()
		subject = n
	}
	plugin, err := scenario.StartPlugin(dir, filepath.Base(podResources), name, scenario.Script{})
	if err != nil {
		t.Fatal(err)
	}
	defer plugin.Stop()
	var devices []*v1beta1.Device
	for _, id := range []string{"a", "b", "c", "d"} {
		devices = append(devices, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	plugin.Send(devices...)
	if err := plugin.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	deadline, look := time.NewTimer(patience), time.NewTicker(lookEvery)
	defer deadline.Stop()
	defer look.Stop()
	for subject.Resources()[name].Allocatable != len(devices) {
		select {
		case <-deadline.C:
			t.Fatalf("the node shows %v", subject.Resources())
		case <-look.C:
		}
	}
	got, err := subject.Admit(t.Context(), kubelet.Container{Pod: "pod", Name: "main", Resource: name, Count: 2})
	if err != nil {
		t.Fatal(err)
	}
	return got
}
