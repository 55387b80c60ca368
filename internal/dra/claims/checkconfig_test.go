package claims_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestCheckConfig: what is refused on every node is told before there are devices; what depends on
// the node is not judged.
func TestCheckConfig(t *testing.T) {
	t.Parallel()
	gpus := func(name string, count int) claims.RequestedDevices {
		return claims.RequestedDevices{Name: name, Kind: dra.GPUConfig, Count: count}
	}
	unknown, looks, shares, migs := gpus("any", 1), gpus("any", 1), gpus("any", 2), gpus("gpu", 2)
	unknown.Kind, looks.Admin, shares.Part, migs.Kind = "", true, true, dra.MIGConfig
	byMPS := func(limits string, requests ...string) dra.OpaqueConfig {
		return dra.OpaqueConfig{Source: dra.FromClaim, Requests: requests, Parameters: fmt.Appendf(nil,
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{%s}}}`, limits)}
	}
	const noDevice = "the claim has no such device"
	fourth := `"defaultPerDevicePinnedMemoryLimit":{"3":"1Gi"}`
	third, named := `"defaultPerDevicePinnedMemoryLimit":{"2":"1Gi"}`, `"defaultPerDevicePinnedMemoryLimit":{"GPU-x":"1Gi"}`
	for name, tt := range map[string]struct {
		requests []claims.RequestedDevices
		configs  []dra.OpaqueConfig
		want     string // empty for nothing
	}{
		"no configuration": {[]claims.RequestedDevices{gpus("gpu", 1), unknown}, nil, ""},
		"time slices":      {[]claims.RequestedDevices{gpus("gpu", 1)}, sliced("uid").Configs, ""},
		"MPS":              {[]claims.RequestedDevices{gpus("gpu", 2)}, []dra.OpaqueConfig{byMPS("")}, ""},
		"no JSON": {[]claims.RequestedDevices{gpus("gpu", 1)},
			[]dra.OpaqueConfig{{Parameters: []byte("{")}}, "is refused"},
		"another kind": {[]claims.RequestedDevices{migs}, []dra.OpaqueConfig{byMPS("", "gpu")},
			"its device gpu[0] needs a MigDeviceConfig"},
		"another kind, of no request":    {[]claims.RequestedDevices{migs}, []dra.OpaqueConfig{byMPS("")}, ""},
		"of a request that is not known": {[]claims.RequestedDevices{unknown}, []dra.OpaqueConfig{byMPS("", "any")}, ""},
		"the third of two GPUs": {[]claims.RequestedDevices{gpus("gpu", 2)}, []dra.OpaqueConfig{byMPS(third)},
			noDevice},
		"the third of three GPUs": {[]claims.RequestedDevices{gpus("gpu", 3)}, []dra.OpaqueConfig{byMPS(third)}, ""},
		"the third of two and some": {[]claims.RequestedDevices{gpus("gpu", 2), unknown},
			[]dra.OpaqueConfig{byMPS(third)}, ""},
		"the fourth of two and some": {[]claims.RequestedDevices{gpus("gpu", 2), unknown},
			[]dra.OpaqueConfig{byMPS(fourth)}, ""},
		"the third of two and two shares": {[]claims.RequestedDevices{gpus("gpu", 2), shares},
			[]dra.OpaqueConfig{byMPS(third)}, ""},
		"a UUID": {[]claims.RequestedDevices{gpus("gpu", 2)}, []dra.OpaqueConfig{byMPS(named)}, ""},
		"different settings": {
			[]claims.RequestedDevices{gpus("a", 1), gpus("b", 1)},
			[]dra.OpaqueConfig{byMPS(`"defaultActiveThreadPercentage":30`, "a"),
				byMPS(`"defaultActiveThreadPercentage":40`, "b")}, "the requests a and b",
		},
		"different settings of who only looks": {
			[]claims.RequestedDevices{gpus("a", 1), looks},
			[]dra.OpaqueConfig{byMPS(`"defaultActiveThreadPercentage":30`, "a"),
				byMPS(`"defaultActiveThreadPercentage":40`, "any")}, "",
		},
		"different settings of shares": {
			[]claims.RequestedDevices{gpus("a", 1), shares},
			[]dra.OpaqueConfig{byMPS(`"defaultActiveThreadPercentage":30`, "a"),
				byMPS(`"defaultActiveThreadPercentage":40`, "any")}, "",
		},
	} {
		err := claims.CheckConfig(tt.requests, tt.configs)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}
