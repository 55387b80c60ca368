package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// claimManifests has manifests as users write them, in several versions of the API.
const claimManifests = `
apiVersion: v1
kind: Pod
metadata: {name: other}
spec: {devices: 1}
---
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: mps}
spec:
  spec:
    devices:
      requests:
      - {name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}
      - {name: either, firstAvailable: [{name: part, deviceClassName: mig.nvidia.com}]}
      config:
      - requests: [gpu]
        opaque:
          driver: gpu.nvidia.com
          parameters:
            apiVersion: resource.nvidia.com/v1beta1
            kind: GpuConfig
            sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50, defaultPinnedDeviceMemoryLimit: 10Gi}}
      - requests: [either/part]
        opaque:
          driver: gpu.nvidia.com
          parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig}
      - opaque: {driver: other.example.com, parameters: {apiVersion: none}}
---
apiVersion: v1
kind: List
items:
- apiVersion: resource.k8s.io/v1beta1
  kind: ResourceClaim
  metadata: {name: old}
  spec:
    devices:
      requests: [{name: gpu, deviceClassName: gpu.nvidia.com}]
      config:
      - opaque:
          driver: gpu.nvidia.com
          parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeslicing: {}}}
- apiVersion: resource.k8s.io/v1
  kind: DeviceClass
  metadata: {name: long}
  spec:
    config:
    - opaque:
        driver: gpu.nvidia.com
        parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}
`

func TestClaimCheck(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want, problem string }{
		"claims": {claimManifests, `ResourceClaimTemplate mps, config 0 (requests gpu): GpuConfig: MPS, 50 % of the threads, 10240 MiB of pinned memory
ResourceClaimTemplate mps, config 1: requests: either/part is of the class mig.nvidia.com, and the configuration is a GpuConfig
ResourceClaim old, config 0: sharing.timeslicing: is not known
DeviceClass long, config 0: GpuConfig: time-slicing, interval Long
`, "2 problems were found"},
		"parts of GPUs": {`kind: ResourceClaim
metadata: {name: part}
spec:
  devices:
    requests:
    - {name: a, exactly: {deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 20Gi}}}}
    - {name: b, firstAvailable: [{name: large, deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 30Gi}}}, {name: whole, deviceClassName: gpu.nvidia.com}]}
    - {name: c, exactly: {deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 10Gi}}}}
    - {name: d, exactly: {deviceClassName: another.example.com, capacity: {requests: {memory: 10Gi}}}}
    config:
    - {requests: [a], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig}}}
    - {requests: [b], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS}}}}
`, `ResourceClaim part, config 0 (requests a): GpuConfig: time-slicing, interval Default
ResourceClaim part, config 1 (requests b): GpuConfig: MPS
ResourceClaim part, request a: 20Gi of the memory of a GPU; nothing keeps processes to it without MPS
ResourceClaim part, request b/large: 30Gi of the memory of a GPU; MPS keeps each process to it
ResourceClaim part, request c: 10Gi of the memory of a GPU; nothing keeps processes to it, unless the DeviceClass wants MPS
`, ""},
		"nothing": {"kind: Pod\n", "FILE: no configuration for gpu.nvidia.com\n", ""},
		"a key twice": {"kind: Pod\nkind: Pod\n", "", `read manifest FILE: yaml: unmarshal errors:
  line 2: key "kind" already set in map`},
		"no manifest": {"kind: ResourceClaim\nspec: 3\n", "", "read manifest FILE: json: cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "claims.yaml")
			if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := newClaimCommand()
			var out bytes.Buffer
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs([]string{"check", file})
			problem := ""
			if err := cmd.ExecuteContext(t.Context()); err != nil {
				problem = err.Error()
			}
			named := func(text string) string { return string(bytes.ReplaceAll([]byte(text), []byte(file), []byte("FILE"))) }
			if diff := cmp.Diff(test.want, named(out.String())); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if got := named(problem); len(got) < len(test.problem) || got[:len(test.problem)] != test.problem || (got == "") != (test.problem == "") {
				t.Errorf("error %q, want %q", got, test.problem)
			}
		})
	}
}
