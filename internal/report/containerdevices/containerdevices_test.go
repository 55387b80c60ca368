package containerdevices_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/containerdevices"
)

const visibleMounts = "/var/run/nvidia-container-devices"

func TestCheck(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, visible string
		nodes, mounts []string
		simulated     bool
		want          string // in the error; empty for none
		devices       int
	}{
		{name: "one GPU", visible: "GPU-a", nodes: []string{"nvidia3", "nvidiactl", "nvidia-uvm"}, devices: 1},
		{name: "two MIG devices of one GPU", visible: "MIG-a,MIG-b", nodes: []string{"nvidia0"}, devices: 2},
		{name: "by CDI", visible: "void", nodes: []string{"nvidia0", "nvidia1"}, devices: 2},
		{name: "by volume mounts", visible: visibleMounts, mounts: []string{"GPU-a"}, nodes: []string{"nvidia0"}, devices: 1},
		{name: "simulated", visible: "GPU-a", simulated: true, devices: 1},
		{name: "simulated by CDI", visible: "void", simulated: true, devices: 1},
		{name: "none", devices: 1, want: "no device node"},
		{name: "without NVIDIA's runtime", visible: "GPU-a", devices: 1, want: "RuntimeClass"},
		{name: "one too few", visible: "GPU-a", nodes: []string{"nvidia0"}, devices: 2, want: "requested 2"},
		{name: "one too many", visible: "GPU-a,GPU-b", nodes: []string{"nvidia0", "nvidia1"}, devices: 1,
			want: "requested 1"},
		{name: "one too many by CDI", visible: "void", nodes: []string{"nvidia0", "nvidia1"}, devices: 1,
			want: "requested 1"},
		{name: "one twice", visible: "GPU-a,GPU-a", nodes: []string{"nvidia0"}, devices: 2, want: "named twice"},
		{name: "nodes of others", visible: "GPU-a", nodes: []string{"nvidia0", "nvidia1"}, devices: 1, want: "did not get"},
		{name: "all, from the image", visible: "all", nodes: []string{"nvidia0"}, devices: 1, want: "no devices were allocated"},
		{name: "no mounts", visible: visibleMounts, nodes: []string{"nvidia0"}, devices: 1, want: "read the names"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			for folder, names := range map[string][]string{"dev": append(tt.nodes, "null"), visibleMounts: tt.mounts} {
				if len(names) == 0 {
					continue
				}
				if err := os.MkdirAll(filepath.Join(root, folder), 0o700); err != nil {
					t.Fatal(err)
				}
				for _, name := range names {
					if err := os.WriteFile(filepath.Join(root, folder, name), nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			got, err := containerdevices.Read(root, tt.visible)
			if err == nil {
				err = got.Check(tt.devices, tt.simulated)
			}
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestString(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ node, visible, want string }{
		{"null", "void", "devices: none; device nodes: none"},
		{"nvidia0", "GPU-a", "devices: GPU-a; device nodes: /dev/nvidia0"},
		{"nvidia1", "GPU-a,GPU-b", "devices: GPU-a, GPU-b; device nodes: /dev/nvidia0, /dev/nvidia1"},
	} {
		if err := os.WriteFile(filepath.Join(root, "dev", test.node), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := containerdevices.Read(root, test.visible); err != nil || got.String() != test.want {
			t.Errorf("%q, %v, want %q", got, err, test.want)
		}
	}
}

// TestCheckOpensNodes: a device node that the container cannot open is reported.
func TestCheckOpensNodes(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "dev", "nvidia0"), 0o700); err != nil { // a folder cannot be opened for writing
		t.Fatal(err)
	}
	got, err := containerdevices.Read(root, "GPU-a")
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Check(1, false); err == nil || !strings.Contains(err.Error(), "nvidia0") {
		t.Errorf("error %v, want one about nvidia0", err)
	}
}
