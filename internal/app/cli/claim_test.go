package cli_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
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

// claimsRefused has claims with configurations that are valid separately, except for a percentage,
// and a claim that will be prepared.
const claimsRefused = `
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: index}, spec: {devices: {
  requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}],
  config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
    sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"2": 1Gi}}}}}}]}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: alternatives}, spec: {devices: {
  requests: [{name: gpu, firstAvailable: [{name: whole, deviceClassName: gpu.nvidia.com}, {name: part, deviceClassName: mig.nvidia.com}]}],
  config: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig}}}]}}}
---
{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: settings}, spec: {devices: {
  requests: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: gpu.nvidia.com}],
  config: [
  {requests: [a], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
    sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 10}}}}},
  {requests: [b], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
    sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 20}}}}}]}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: zero}, spec: {devices: {
  requests: [{name: gpu, exactly: {deviceClassName: mig.nvidia.com}}],
  config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig,
    sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 0}}}}}]}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: fine}, spec: {devices: {
  requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, allocationMode: All}}],
  config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
    sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"31": 1Gi, GPU-x: 1Gi}}}}}}]}}}
`

func TestClaimCheck(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want, problem string }{
		"claims": {claimManifests, `ResourceClaimTemplate mps, config 0 (requests gpu): GpuConfig: MPS, 50 % of the threads, 10240 MiB of pinned memory
ResourceClaimTemplate mps, config 1 (requests either/part): GpuConfig: time-slicing, interval Default
ResourceClaimTemplate mps: the configuration for request either/part is a GpuConfig, and its device either/part[0] needs a MigDeviceConfig
ResourceClaim old, config 0: sharing.timeslicing: is not known
DeviceClass long, config 0: GpuConfig: time-slicing, interval Long
`, "2 problems found"},
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
		"what only devices show": {claimsRefused, `ResourceClaim index, config 0: GpuConfig: MPS, 1024 MiB on device 2
ResourceClaim index: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.2: the claim has no such device
ResourceClaim alternatives, config 0 (requests gpu): GpuConfig: time-slicing, interval Default
ResourceClaim alternatives: the configuration for request gpu/part is a GpuConfig, and its device gpu/part[0] needs a MigDeviceConfig
ResourceClaim settings, config 0 (requests a): GpuConfig: MPS, 10 % of the threads
ResourceClaim settings, config 1 (requests b): GpuConfig: MPS, 20 % of the threads
ResourceClaim settings: sharing.mpsConfig: the requests a and b have different settings; the GPUs of a claim have one MPS control daemon
ResourceClaim zero, config 0: sharing.mpsConfig.defaultActiveThreadPercentage: 0 is not a whole number from 1 to 100
ResourceClaim fine, config 0: GpuConfig: MPS, 1024 MiB on device 31, 1024 MiB on device GPU-x
`, "4 problems found"},
		"one problem": {"kind: DeviceClass\nmetadata: {name: a}\n" +
			"spec: {config: [{opaque: {driver: gpu.nvidia.com, parameters: {kind: GpuConfig}}}]}\n",
			"DeviceClass a, config 0: apiVersion: \"\" is not known; use resource.nvidia.com/v1beta1\n", "1 problem found"},
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
			out, err := printed(t, "claim", "check", file)
			problem := ""
			if err != nil {
				problem = err.Error()
			}
			named := func(text string) string { return string(bytes.ReplaceAll([]byte(text), []byte(file), []byte("FILE"))) }
			if diff := cmp.Diff(test.want, named(out)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if got := named(problem); len(got) < len(test.problem) || got[:len(test.problem)] != test.problem ||
				(got == "") != (test.problem == "") {
				t.Errorf("error %q, want %q", got, test.problem)
			}
		})
	}
}

// TestSharingOfARequest: MPS keeps a request to its memory by the last valid GpuConfig of the driver
// that is for the request, for its parent or for all requests.
func TestSharingOfARequest(t *testing.T) {
	t.Parallel()
	const (
		header  = "apiVersion: resource.nvidia.com/v1beta1, kind: "
		mps     = header + "GpuConfig, sharing: {strategy: MPS}"
		slicing = header + "GpuConfig, sharing: {strategy: TimeSlicing}"

		byMPS      = "MPS keeps each process to it"
		byNothing  = "nothing keeps processes to it without MPS"
		byTheClass = "nothing keeps processes to it, unless the DeviceClass wants MPS"
	)
	for name, test := range map[string]struct{ configs, want string }{
		"none":              {"", byTheClass},
		"for all":           {"{opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}", byMPS},
		"for it":            {"{requests: [a/b], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}", byMPS},
		"for its parent":    {"{requests: [x, a], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}", byMPS},
		"for another":       {"{requests: [b, a/c], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}", byTheClass},
		"of another driver": {"{opaque: {driver: other, parameters: {" + mps + "}}}", byTheClass},
		"that is wrong":     {"{opaque: {driver: gpu.nvidia.com, parameters: {" + mps + ", colour: 1}}}", byTheClass},
		"for MIG devices":   {"{opaque: {driver: gpu.nvidia.com, parameters: {" + header + "MigDeviceConfig}}}", byTheClass},
		"the last of two": {"{opaque: {driver: gpu.nvidia.com, parameters: {" + mps +
			"}}}, {opaque: {driver: gpu.nvidia.com, parameters: {" + slicing + "}}}", byNothing},
	} {
		file := write(t, "claim.yaml", "kind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, "+
			"firstAvailable: [{name: b, deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 10Gi}}}]}], config: ["+
			test.configs+"]}}\n")
		text, _ := printed(t, "claim", "check", file) // which may find problems
		if want := "request a/b: 10Gi of the memory of a GPU; " + test.want + "\n"; !strings.Contains(text, want) {
			t.Errorf("%s: there is no %q in:\n%s", name, want, text)
		}
	}
}
