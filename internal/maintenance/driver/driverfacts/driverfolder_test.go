package driverfacts_test

import (
	"runtime"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// TestDriverFolder: a target that gpu-driver has packed.
func TestDriverFolder(t *testing.T) {
	t.Parallel()
	text := ko{version: v580, release: k50}.String()
	good := driverfolder.Manifest{
		Schema: driverfolder.Schema, Version: v580, Architecture: runtime.GOARCH, Source: strings.Repeat("0", 64),
		Kernels: []driverfolder.Kernel{{Release: k50, Open: true}},
		Files: []driverfolder.File{
			{Path: "lib/modules/" + k50 + "/nvidia.ko", Mode: "0644", Size: int64(len(text)), SHA256: strings.Repeat("0", 64)},
			{Path: "usr/lib/libcuda.so.1", Link: "libcuda.so"},
		},
	}
	whole := files{"lib/modules/" + k50 + "/nvidia.ko": text, "usr/lib/libcuda.so.1": "-> libcuda.so"}
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	for name, tt := range map[string]struct {
		change  func(*driverfolder.Manifest)
		with    files
		problem string
	}{
		"good":                 {func(*driverfolder.Manifest) {}, nil, ""},
		"another architecture": {func(m *driverfolder.Manifest) { m.Architecture = other }, nil, "it is for " + other + ", and this node is " + runtime.GOARCH},
		"another size":         {func(m *driverfolder.Manifest) { m.Files[0].Size++ }, nil, "its file lib/modules/" + k50 + "/nvidia.ko is not the one that was packed"},
		"a missing file":       {func(m *driverfolder.Manifest) { m.Files[1].Path = "usr/lib/x" }, nil, "its file usr/lib/x cannot be read: file does not exist"},
		"another version":      {func(m *driverfolder.Manifest) { m.Version = "570.1.1" }, nil, "its files have different versions: " + v580 + " and 570.1.1"},
		"no JSON":              {func(*driverfolder.Manifest) {}, files{"manifest.json": "x"}, "it is no driver folder: manifest.json: not JSON of a driver folder: invalid character 'x'"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := good
			m.Files = append([]driverfolder.File(nil), good.Files...)
			tt.change(&m)
			manifest, err := m.Encode()
			if err != nil {
				t.Fatal(err)
			}
			target := driverfacts.Target("/x", whole.with(files{"manifest.json": string(manifest)}, tt.with).tree())
			if !strings.HasPrefix(target.Problem, tt.problem) || tt.problem == "" && target.Problem != "" ||
				len(target.Files) != 1 || tt.with == nil && target.Version != m.Version {
				t.Errorf("target %+v, want the problem %q", target, tt.problem)
			}
		})
	}
}
