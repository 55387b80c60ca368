package nodefacts_test

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/doctor"
)

// TestContainerdTellsItsVersion: the packages that a program was built from say which containerd it is. The program is that of this test,
// in which the path of its package is another.
func TestContainerdTellsItsVersion(t *testing.T) {
	t.Parallel()
	file, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const one = "github.com/gpu-device-plugin/gpu-device-plugin/internal/nodefacts.test"
	if !bytes.Contains(program, []byte(one)) {
		t.Fatalf("this program does not have %q", one)
	}
	for _, tt := range []struct {
		name, path string
		major      int
	}{
		{"containerd 1", "github.com/containerd/containerd/cmd/containerd", 1},
		{"containerd 2", "github.com/containerd/containerd/v2/cmd/containerd", 2},
		{"another program", one, 0},
		{"no program", "", 0},
	} {
		node := newNode(changes{config: gone, dropIn: gone})
		content := []byte("#!/bin/sh\n")
		if tt.path != "" {
			content = bytes.ReplaceAll(program, []byte(one), []byte(tt.path+strings.Repeat("x", len(one)-len(tt.path))))
		}
		node["usr/bin/containerd"] = &fstest.MapFile{Data: content}
		facts := placesOf(node).Gather(t.Context())
		if runtimes := facts.Runtimes.Value; len(runtimes) != 1 || runtimes[0].Name != doctor.Containerd || runtimes[0].Major != tt.major {
			t.Errorf("%s: got %+v", tt.name, facts.Runtimes)
		}
	}
}

// TestRuntimesWithoutProcesses: where processes are not visible, files and sockets tell which runtime the node has.
func TestRuntimesWithoutProcesses(t *testing.T) {
	t.Parallel()
	without := changes{"proc/1/comm": gone, "proc/700/comm": gone, "proc/700/cmdline": gone, "proc/701/comm": gone}
	for _, tt := range []struct {
		name   string
		change changes
		want   []string
	}{
		{"containerd's file", changes{}, []string{doctor.Containerd}},
		{"CRI-O's socket", changes{config: gone, dropIn: gone, "run/crio/crio.sock": ""}, []string{doctor.CRIO}},
		{"nothing", changes{config: gone, dropIn: gone}, nil},
	} {
		maps.Copy(tt.change, without)
		facts := placesOf(newNode(tt.change)).Gather(t.Context())
		var got []string
		for _, r := range facts.Runtimes.Value {
			got = append(got, r.Name)
		}
		if !slices.Equal(got, tt.want) || (facts.Runtimes.Missing == "") != (tt.want != nil) {
			t.Errorf("%s: got %v (%s), want %v", tt.name, got, facts.Runtimes.Missing, tt.want)
		}
	}
}
