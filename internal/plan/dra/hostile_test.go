package dra_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestHostileConfig: whatever a user writes is refused in a few short lines that can be printed.
func TestHostileConfig(t *testing.T) {
	t.Parallel()
	const head = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",`
	limits := func(of string) string { return head + `"sharing":{"strategy":"MPS","mpsConfig":{` + of + `}}}` }
	many := ""
	for i := range 1000 {
		many += fmt.Sprintf(`"unknown-%d":1,`, i)
	}
	long := strings.Repeat("9", 9000)
	for name, parameters := range map[string]string{
		"many unknown fields":      head + many + `"imex":{}}`,
		"control characters":       head + `"a\u001b[2J\nb":1}`,
		"control characters twice": head + `"\u0007":1,"\u0007":2}`,
		"a long name":              head + fmt.Sprintf(`%q:1}`, strings.Repeat("é", 4000)),
		"a long kind":              fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"%s\n"}`, long),
		"a huge percentage":        limits(`"defaultActiveThreadPercentage":` + long),
		"a negative percentage":    limits(`"defaultActiveThreadPercentage":-1`),
		"a negative memory":        limits(`"defaultPinnedDeviceMemoryLimit":"-` + long + `Gi"`),
		"memory that is an object": limits(`"defaultPinnedDeviceMemoryLimit":{"a":[` + strings.Repeat(`"b",`, 2000) +
			`1]}`),
		"a long device":           limits(`"defaultPerDevicePinnedMemoryLimit":{"GPU-` + long + `":"1Gi"}`),
		"a device with a newline": limits(`"defaultPerDevicePinnedMemoryLimit":{"GPU-a\n":"1Gi"}`),
		"a megabyte":              head + `"imex":"` + strings.Repeat("x", 1<<20) + `"}`,
		"a megabyte of depth":     strings.Repeat("[", 1<<20),
		"depth":                   strings.Repeat("[", 60<<10),
		"no UTF-8":                head + "\"\xff\x00\":1}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, problems := dra.ParseConfig([]byte(parameters))
			text := strings.Join(problems, "; ")
			if len(problems) == 0 || len(text) > 2500 || strings.ContainsFunc(text,
				func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%d problems in %d bytes: %.300q", len(problems), len(text), text)
			}
		})
	}
}
