package field_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestSharedMemoryBesideTheVolumeOfAPod: an emptyDir of the pod at /dev/shm beside a GPU that is
// shared by MPS (kdp#805, C6). A device plugin's mounts come before it, so it hides them, and no
// device list strategy brings MPS as a CDI device. A claim's CDI device replaces it.
func TestSharedMemoryBesideTheVolumeOfAPod(t *testing.T) {
	t.Parallel()
	const root, own = "/run/nvidia/mps", "/var/lib/kubelet/pods/7/volumes/kubernetes.io~empty-dir/shm"
	shared := containeredits.Mount{HostPath: root + "/shm", ContainerPath: "/dev/shm"}
	gpu := resource.Device{ID: "GPU-a::0", UUID: "GPU-a", GPU: "GPU-a", Index: "0", Resource: "nvidia.com/gpu",
		Sharing: resource.MPS, Healthy: true}
	for _, s := range []containeredits.Strategy{containeredits.EnvVar, containeredits.VolumeMounts,
		containeredits.CDIAnnotations, containeredits.CDICRI} {
		given, err := containeredits.For([]resource.Device{gpu},
			containeredits.Options{Strategies: []containeredits.Strategy{s}, MPSRoot: root})
		if err != nil {
			t.Fatal(err)
		}
		if last := given.Mounts[len(given.Mounts)-1]; last != shared {
			t.Errorf("%s: the last mount of the answer is %v, want %v", s, last, shared)
		}
	}
	claim := &specs.ContainerEdits{}
	for _, m := range containeredits.MPSClient(root, "claims/7").Mounts {
		claim.Mounts = append(claim.Mounts, &specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath,
			Options: []string{"rbind"}})
	}
	spec := &oci.Spec{Mounts: []oci.Mount{{Destination: "/dev", Source: "tmpfs"}, {Destination: "/dev/shm", Source: own}}}
	if err := (&cdilib.ContainerEdits{ContainerEdits: claim}).Apply(spec); err != nil {
		t.Fatal(err)
	}
	var at []string
	for _, m := range spec.Mounts {
		if m.Destination == "/dev/shm" {
			at = append(at, m.Source)
		}
	}
	if len(at) != 1 || at[0] != shared.HostPath {
		t.Errorf("a claim's container has %v at /dev/shm, want %s alone", at, shared.HostPath)
	}
}

// TestStatusSaysWhatIsSharedByMPS: kubectl gpu why finds by it the pods whose own volume hides the
// shared memory (kdp#805, C6).
func TestStatusSaysWhatIsSharedByMPS(t *testing.T) {
	t.Parallel()
	for kind, byMPS := range map[string]bool{"mps": true, "timeSlicing": false} {
		folder := t.TempDir()
		file := filepath.Join(folder, "config.yaml")
		text := "version: v1\nsharing:\n  " + kind + ":\n    resources:\n    - {name: nvidia.com/gpu, replicas: 2}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		h := newHost(t, "--config-file", file, "--kubelet-socket", filepath.Join(folder, "kubelet.sock"), "--mps-root",
			folder, "--mps-root-ctr-path", folder)
		var s status.Status
		poll.Until(t, "the plan has a resource", func() bool {
			answer, _ := h.do("status", "-o", "json")
			return json.Unmarshal([]byte(answer), &s) == nil && len(s.Resources) == 1 && s.Resources[0].Planned
		})
		if s.Resources[0].MPS != byMPS {
			t.Errorf("%s: the status says by MPS: %v", kind, s.Resources[0].MPS)
		}
	}
}
