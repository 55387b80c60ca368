package nodefacts_test

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/doctor"
)

// programs returns what makes programs: that of this test, in which the path of its package is another, or a script.
func programs(t *testing.T) func(path string) string {
	t.Helper()
	file, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(program, []byte(thisProgram)) {
		t.Fatalf("this program does not have %q", thisProgram)
	}
	return func(path string) string {
		if path == "" {
			return "#!/bin/sh\n"
		}
		return string(bytes.ReplaceAll(program, []byte(thisProgram), []byte(path+strings.Repeat("x", len(thisProgram)-len(path)))))
	}
}

const (
	thisProgram = "github.com/gpu-device-plugin/gpu-device-plugin/internal/nodefacts.test"
	programOf1  = "github.com/containerd/containerd/cmd/containerd"
	programOf2  = "github.com/containerd/containerd/v2/cmd/containerd"
)

// TestContainerdTellsItsVersion: the packages that a program was built from say which containerd it is.
func TestContainerdTellsItsVersion(t *testing.T) {
	t.Parallel()
	program := programs(t)
	for _, tt := range []struct {
		name, path string
		major      int
	}{
		{"containerd 1", programOf1, 1},
		{"containerd 2", programOf2, 2},
		{"another program", thisProgram, 0},
		{"no program", "", 0},
	} {
		facts := placesOf(newNode(changes{config: gone, dropIn: gone, "usr/bin/containerd": program(tt.path)})).Gather(t.Context())
		if runtimes := facts.Runtimes.Value; len(runtimes) != 1 || runtimes[0].Name != doctor.Containerd || runtimes[0].Major != tt.major {
			t.Errorf("%s: got %+v", tt.name, facts.Runtimes)
		}
	}
}

// TestImportedSectionsOfContainerd: version 1 puts a section in the place of one that was read before, and version 2 adds to it.
func TestImportedSectionsOfContainerd(t *testing.T) {
	t.Parallel()
	program := programs(t)
	const section = "[plugins.'io.containerd.grpc.v1.cri']\n"
	for path, want := range map[string]bool{programOf1: false, programOf2: true} {
		runtimes := placesOf(newNode(changes{
			config: "imports = ['conf.d/*.toml']\n" + section + "enable_cdi = true\n", dropIn: section + "cdi_spec_dirs = ['/cdi']\n",
			"usr/bin/containerd": program(path),
		})).Gather(t.Context()).Runtimes.Value
		if len(runtimes) != 1 || !slices.Equal(runtimes[0].CDIFolders, []string{"/cdi"}) || (runtimes[0].CDI != nil) != want {
			t.Errorf("%s: %+v", path, runtimes)
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
