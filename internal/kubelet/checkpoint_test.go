package kubelet_test

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// The files are kubelet's own: one of a pod with an init container, and one of a kubelet that has
// no plugin yet.
const (
	savedWithPod = `{"Data":{"PodDeviceEntries":[` +
		`{"PodUID":"6f7d","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-c"],"0":["GPU-a"],"1":["GPU-b","GPU-a"]},"AllocResp":"CgD/"},` +
		`{"PodUID":"6f7d","ContainerName":"init","ResourceName":"nvidia.com/gpu","DeviceIDs":{"1":["GPU-b"]},"AllocResp":null}],` +
		`"RegisteredDevices":{"nvidia.com/gpu":["GPU-a","GPU-b"],"other.org/x":[]}},"Checksum":2062407968}`
	savedWithoutPods = `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`
)

func TestCheckpoint(t *testing.T) {
	t.Parallel()
	held := []kubelet.HeldDevice{
		{Resource: "nvidia.com/gpu", ID: "GPU-a", Pod: "with UID 6f7d", Container: "c", NUMANodes: []int64{0, 1}},
		{Resource: "nvidia.com/gpu", ID: "GPU-b", Pod: "with UID 6f7d", Container: "c", NUMANodes: []int64{1}},
		{Resource: "nvidia.com/gpu", ID: "GPU-c", Pod: "with UID 6f7d", Container: "c"},
	}
	tests := map[string]struct {
		text string
		want kubelet.Checkpoint
		err  string
	}{
		"of pods":          {text: savedWithPod, want: kubelet.Checkpoint{Healthy: map[string][]string{"nvidia.com/gpu": {"GPU-a", "GPU-b"}, "other.org/x": {}}, Held: held}},
		"without pods":     {text: savedWithoutPods, want: kubelet.Checkpoint{Healthy: map[string][]string{}}},
		"an empty file":    {err: "unexpected end of JSON input"},
		"a part of one":    {text: savedWithPod[:100], err: "unexpected end of JSON input"},
		"a damaged one":    {text: strings.Replace(savedWithPod, "GPU-c", "GPU-d", 1), err: "checksum"},
		"another checksum": {text: strings.Replace(savedWithoutPods, "3467", "3468", 1), err: "checksum"},
		"of kubelet 1.19 and before": {text: strings.Replace(savedWithPod, `{"1":["GPU-b"]}`, `["GPU-b"]`, 1),
			err: "cannot unmarshal"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t, folder(t))
			if err := os.WriteFile(filepath.Join(d.Path(), "kubelet_internal_checkpoint"), []byte(test.text),
				0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				got, err := d.Checkpoint()
				if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
					t.Fatalf("Checkpoint() = %v, want %q", err, test.err)
				}
				slices.SortFunc(got.Held, func(a, b kubelet.HeldDevice) int { return strings.Compare(a.ID, b.ID) })
				if diff := cmp.Diff(test.want, got, cmpopts.SortSlices(func(a, b int64) bool { return a < b })); err == nil &&
					diff != "" {
					t.Errorf("Checkpoint() (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestCheckpointIsReadAgain(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	path := filepath.Join(d.Path(), "kubelet_internal_checkpoint")
	if _, err := d.Checkpoint(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Checkpoint() = %v where there is none", err)
	}
	for _, test := range []struct {
		text  string
		valid bool
		held  int
	}{{savedWithPod, true, 3}, {savedWithPod[:len(savedWithPod)-1], false, 0}, {savedWithoutPods, true, 0}, {savedWithPod,
		true, 3}} {
		if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Checkpoint(); (err == nil) != test.valid || len(got.Held) != test.held {
			t.Errorf("Checkpoint() = %v, %v; want %d devices that are held", got, err, test.held)
		}
	}
}

// The file is read every second while devices are departing, and may stay damaged. It is parsed
// once.
func TestADamagedCheckpointIsParsedOnce(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	path := filepath.Join(d.Path(), "kubelet_internal_checkpoint")
	read := func(text string) error {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := d.Checkpoint()
		return err
	}
	first := read(savedWithPod[1:])
	if again := read(savedWithPod[1:]); first == nil || !errors.Is(again, first) {
		t.Errorf("Checkpoint() = %v and then another %v", first, again)
	}
	if other := read(savedWithPod[2:]); other == nil || errors.Is(other, first) {
		t.Errorf("Checkpoint() of other text = %v", other)
	}
}

// TestPodUIDs: a device has the UID of the pod that the checkpoint has it for. Where that is not
// one pod, or the device is one of a claim, it has none.
func TestPodUIDs(t *testing.T) {
	t.Parallel()
	held := func(resource, id, uid string) kubelet.HeldDevice {
		return kubelet.HeldDevice{Resource: resource, ID: id, Pod: "with UID " + uid}
	}
	c := kubelet.Checkpoint{Held: []kubelet.HeldDevice{
		held("r", "a", "1"), held("r", "b", "2"), held("r", "b", "3"), held("r", "b", "4"),
		held("other", "c", "5"), held("", "", "6"),
	}}
	given := []kubelet.ContainerDevice{{Resource: "r", ID: "a"}, {Resource: "r", ID: "b"}, {Resource: "r", ID: "c"}, {}}
	var got []string
	for _, d := range c.WithPodUIDs(given) {
		got = append(got, d.PodUID)
	}
	if diff := cmp.Diff([]string{"1", "", "", ""}, got); diff != "" {
		t.Errorf("UIDs (-want +got):\n%s", diff)
	}
	if given[0].PodUID != "" {
		t.Error("the devices of the caller were changed")
	}
}

// TestPreparedClaims: the kubelet's checkpoint of claims is read as kubelet 1.36 and 1.37 write it,
// and nothing else counts as one.
func TestPreparedClaims(t *testing.T) {
	t.Parallel()
	const data = `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[` +
		`{"ClaimUID":"u1","ClaimName":"c","Namespace":"ns","PodUIDs":{"p":{}},"DriverState":{` +
		`"gpu.nvidia.com":{"Devices":[{"PoolName":"n","DeviceName":"gpu-3","ShareID":null,"RequestNames":["gpu"],"CDIDeviceIDs":["k8s.gpu.nvidia.com/claim=x"]}]},` +
		`"nic.example.com":{"Devices":null,"skipNodeOperations":["*"]}}}]}`
	file := func(data string, checksum uint32) string {
		return fmt.Sprintf(`{"Data":%q,"Checksum":%d}`, data, checksum)
	}
	sum := func(text string) uint32 { return crc32.ChecksumIEEE([]byte(text)) }
	before, _, _ := strings.Cut(data, `[{"ClaimUID`)
	none := before + "null}"
	for name, tt := range map[string]struct {
		text string
		want []kubelet.PreparedClaim
		err  string
	}{
		"a claim": {text: file(data, sum(data)), want: []kubelet.PreparedClaim{{
			UID: "u1", Namespace: "ns", Name: "c", Devices: map[string][]string{"gpu.nvidia.com": {"gpu-3"},
				"nic.example.com": {}},
		}}},
		"no claim":         {text: file(none, sum(none)), want: []kubelet.PreparedClaim{}},
		"another checksum": {text: file(data, 1), err: "the checksum is wrong"},
		"a part of one":    {text: file(data, sum(data))[:9], err: "unexpected end of JSON input"},
		"another format":   {text: file(`{"version":"v1"}`, sum(`{"version":"v1"}`)), err: "another format"},
		"no JSON":          {text: file("{", sum("{")), err: "unexpected end of JSON input"},
		"no file":          {err: "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			if tt.text != "" {
				if err := os.WriteFile(filepath.Join(root, "dra_manager_state"), []byte(tt.text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := kubelet.PreparedClaims(root)
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("PreparedClaims() = %v, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
