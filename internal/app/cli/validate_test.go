package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
)

// validate runs the command and returns its output and exit status.
func validate(t *testing.T, args ...string) (string, int) {
	t.Helper()
	var out bytes.Buffer
	err := cli.DevicePlugin().Execute(t.Context(), "gpu-device-plugin", append([]string{"validate"}, args...), &out)
	var status cli.ExitStatus
	if err != nil && !errors.As(err, &status) {
		return err.Error(), 1
	}
	return out.String(), int(status)
}

const (
	good, wrong = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
	busy        = "GPU-cccccccc-0000-0000-0000-000000000000"
)

// TestValidate: each GPU and MIG device is checked unless in use. A GPU that computes wrongly fails
// alone.
func TestValidate(t *testing.T) {
	t.Parallel()
	folder, root := t.TempDir(), t.TempDir()
	node := filepath.Join(folder, "node.yaml")
	const text = `description: Three GPUs
driver: 580.95.05
cuda: "13.0"
model: a100-sxm4-80gb
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0, uuid: ` + good + `}
- {bdf: "0000:18:00.0", pcie: 0/0/1, uuid: ` + wrong + `}
- {bdf: "0000:19:00.0", pcie: 0/0/2, uuid: ` + busy + `, mig: [3g.40gb, 1c.3g.40gb]}
faults:
- {kind: processes, gpu: "2:0", count: 1}
`
	if err := os.WriteFile(node, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	library := cuda.Install(t, root)
	library.Fail(t, wrong, "cuMemcpyHtoD", "wrong")
	here := []string{"--simulate", node, "--driver-root-ctr-path", root}

	printed, status := validate(t, append(here, "-o", "json")...)
	var got struct {
		Devices []struct{ Index, Result, Reason string }
	}
	if err := json.Unmarshal([]byte(printed), &got); err != nil || status != 3 {
		t.Fatalf("status %d, %v: %s", status, err, printed)
	}
	results := map[string]string{}
	for _, d := range got.Devices {
		results[d.Index] = d.Result
	}
	if diff := cmp.Diff(map[string]string{"0": "proven", "1": "failed", "2:0": "not tried", "2:1": "proven"},
		results); diff != "" {
		t.Errorf("results (-want +got):\n%s%s", diff, printed)
	}
	if library.Count(t, busy, "cuInit") > 0 {
		t.Error("a GPU in MIG mode was tried")
	}
	for _, want := range []string{"the GPU computes wrongly: number 262143 of 262144", "in use by process "} {
		if !strings.Contains(printed, want) {
			t.Errorf("printed %s, want %q", printed, want)
		}
	}
	if printed, status := validate(t, append(here, "--gpu", "0,2:1")...); status != 0 ||
		strings.Count(printed, " proven ") != 2 {
		t.Errorf("those that work: status %d: %s", status, printed)
	}
	if printed, status := validate(t, append(here, "--gpu", "2:0")...); status != 2 {
		t.Errorf("one in use: status %d: %s", status, printed)
	}
	if printed, status := validate(t, append(here, "--gpu", "7")...); status != 1 ||
		!strings.Contains(printed, `--gpu: "7" is the index or UUID of no MIG device`) {
		t.Errorf("one that is not there: status %d: %s", status, printed)
	}
	if printed, status := validate(t, "--simulate", "t4", "--driver-root-ctr-path", t.TempDir()); status != 0 {
		t.Errorf("a simulated node without libcuda: status %d: %s", status, printed)
	}
}
