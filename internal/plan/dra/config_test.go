package dra

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// config writes parameters of a kind with the sharing.
func config(kind, sharing string) string {
	return fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":%q%s}`, kind, sharing)
}

func TestParseConfig(t *testing.T) {
	t.Parallel()
	gpu := func(sharing string) string { return config("GpuConfig", `,"sharing":`+sharing) }
	mig := func(sharing string) string { return config("MigDeviceConfig", `,"sharing":`+sharing) }
	for _, test := range []struct{ name, parameters, want, problems string }{
		{"nothing", config("GpuConfig", ""), "GpuConfig: time-slicing, interval Default", ""},
		{"null", gpu(`null`), "GpuConfig: time-slicing, interval Default", ""},
		{"time-slicing", gpu(`{"strategy":"TimeSlicing"}`), "GpuConfig: time-slicing, interval Default", ""},
		{"no interval", gpu(`{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
			"GpuConfig: time-slicing, interval Default", ""},
		{"an interval", gpu(`{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`),
			"GpuConfig: time-slicing, interval Long", ""},
		{"MPS", gpu(`{"strategy":"MPS"}`), "GpuConfig: MPS", ""},
		{"MPS with all", gpu(`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,
			"defaultPinnedDeviceMemoryLimit":"10Gi",
			"defaultPerDevicePinnedMemoryLimit":{"0":"1.5Gi","GPU-a":2147483648},"multiUser":true}}`),
			"GpuConfig: MPS, 50 % of the threads, 10240 MiB of pinned memory, 1536 MiB on device 0, 2048 MiB on " +
				"device GPU-a, several users", ""},
		{"MIG", config("MigDeviceConfig", ""), "MigDeviceConfig: time-slicing", ""},
		{"MIG by MPS", mig(`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":1}}`),
			"MigDeviceConfig: MPS, 1 % of the threads", ""},

		{"no JSON", `{`, "", "parameters: are not JSON: EOF"},
		{"broken in a field", `{"kind":{"a"`, "", "parameters: are not JSON: EOF"},
		{"broken in a list", `{"kind":[1,}`, "",
			"parameters: are not JSON: invalid character '}' looking for beginning of value"},
		{"a name that is none", `{1:2}`, "", "parameters: are not JSON: invalid character '1'"},
		{"a list", `[]`, "", "parameters: are not an object"},
		{"more", config("GpuConfig", "") + "{}", "", "parameters: are not JSON: more follows the object"},
		{"another version", `{"apiVersion":"gpu.nvidia.com/v1alpha1","kind":"GpuConfig"}`, "",
			`apiVersion: "gpu.nvidia.com/v1alpha1" is not known; use resource.nvidia.com/v1beta1`},
		{"another kind", config("VfioDeviceConfig", ""), "",
			`kind: "VfioDeviceConfig" is not supported; use GpuConfig or MigDeviceConfig`},
		{"unknown field", config("GpuConfig", `,"sharin":1`), "", "sharin: is not known"},
		{"case", config("GpuConfig", `,"Sharing":{"strategy":"MPS"}`), "", "Sharing: is not known"},
		{"unknown field inside", gpu(`{"strategy":"MPS","mpsConfig":{"percentage":1}}`), "",
			"sharing.mpsConfig.percentage: is not known"},
		{"twice", gpu(`{"strategy":"MPS","mpsConfig":{"multiUser":true,"multiUser":false}}`), "",
			"sharing.mpsConfig.multiUser: is given twice"},
		{"no strategy", gpu(`{}`), "", `sharing.strategy: "" is not known; use TimeSlicing or MPS`},
		{"types", gpu(`{"strategy":1,"mpsConfig":[]}`), "",
			"sharing.mpsConfig: is not an object\n" + `sharing.strategy: "" is not known; use TimeSlicing or MPS` +
				"\nsharing.strategy: is not a string"},
		{"MPS's field for time-slicing", gpu(`{"strategy":"TimeSlicing","mpsConfig":{}}`), "",
			"sharing.mpsConfig: is not for the strategy TimeSlicing"},
		{"time-slicing's field for MPS", gpu(`{"strategy":"MPS","timeSlicingConfig":{}}`), "",
			"sharing.timeSlicingConfig: is not for the strategy MPS"},
		{"an interval for MIG", mig(`{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), "",
			"sharing.timeSlicingConfig: is not known"},
		{"a field beside the interval", gpu(`{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long","x":1}}`),
			"", "sharing.timeSlicingConfig.x: is not known"},
		{"an unknown interval", gpu(`{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"long"}}`), "",
			`sharing.timeSlicingConfig.interval: "long" is not known; use Default, Short, Medium, Long`},
		{"percentages", gpu(`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":101}}`), "",
			"sharing.mpsConfig.defaultActiveThreadPercentage: 101 is not a whole number from 1 to 100"},
		{"percentage 0", gpu(`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":0}}`), "",
			"sharing.mpsConfig.defaultActiveThreadPercentage: 0 is not a whole number from 1 to 100"},
		{"memory", gpu(`{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"10GB",
			"defaultPerDevicePinnedMemoryLimit":{"0":"1Ki","-1":"1Gi","gpu":true}}}`), "",
			"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.-1: is neither the UUID nor the index of a device\n" +
				"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.0: 1Ki is less than 1Mi\n" +
				"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.gpu: is neither the UUID nor the index of a " +
				"device\n" + "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.gpu: true is not a quantity such " +
				"as 10Gi\n" + "sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 10GB is not a quantity such as 10Gi"},
	} {
		got, problems := ParseConfig([]byte(test.parameters))
		if all := strings.Join(problems, "\n"); all != test.problems {
			t.Errorf("%s: problems:\n%s\nwant:\n%s", test.name, all, test.problems)
		}
		if test.problems == "" && got.String() != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
	}
}

// TestQuantity compares quantities with what Kubernetes reads.
func TestQuantity(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(texts ...string) string { return texts[r.IntN(len(texts))] }
	read := 0
	for range 20_000 {
		text := pick("", "", "", "+", "-", " ") + pick("0", "1", "10", "007", "123456789", "") + pick("", "", ".", ".5",
			".000001", "..") +
			pick("", "n", "u", "m", "k", "K", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "e3", "E-2",
				"e+1", "e", "Zi", "i")
		want, err := resource.ParseQuantity(text)
		got, ok := quantity(text)
		if strings.HasPrefix(text, "-") {
			err = cmp.Or(err, errors.New("negative"))
		}
		if !ok && err == nil && want.IsZero() {
			continue // Kubernetes reads "." as 0; no limit can be that
		}
		if ok != (err == nil) || ok && got != math.MaxInt64 && got != want.Value() { // Kubernetes overflows
			t.Fatalf("%q: got %d, %v; Kubernetes reads %d, %v", text, got, ok, want.Value(), err)
		}
		if ok {
			read++
		}
	}
	if read < 5000 {
		t.Errorf("only %d of the texts were quantities", read)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(config("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"10Gi"}}`))
	f.Fuzz(func(t *testing.T, parameters string) {
		if c, problems := ParseConfig([]byte(parameters)); len(problems) == 0 && c.String() == "" {
			t.Error("a configuration without problems says nothing")
		}
	})
}
