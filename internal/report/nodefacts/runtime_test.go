package nodefacts_test

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// programs returns a function that creates programs: the program of this test with another package
// path, or a script.
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
		return string(bytes.ReplaceAll(program, []byte(thisProgram),
			[]byte(path+strings.Repeat("x", len(thisProgram)-len(path)))))
	}
}

const (
	thisProgram = "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts.test"
	programOf1  = "github.com/containerd/containerd/cmd/containerd"
	programOf2  = "github.com/containerd/containerd/v2/cmd/containerd"
)

// containerdOf returns a function that creates containerd programs of a version: the program of
// this test with two other names.
func containerdOf(t *testing.T) func(version string) string {
	t.Helper()
	program := programs(t)
	// In one piece, the program would also contain the text as a text of this test.
	thisModule := strings.Join([]string{"mod", "github.com/gpu-device-plugin/gpu-device-plugin", ""}, "\t")
	return func(version string) string {
		path, main := programOf2, "github.com/containerd/containerd/v2\tv"+version
		if strings.HasPrefix(version, "1.") {
			path, main = programOf1, "github.com/containerd/containerd\tv"+version
		}
		text := program(path)
		start := strings.Index(text, thisModule)
		if start < 0 {
			t.Fatalf("this program does not have %q", thisModule)
		}
		end := start + len("mod\t")
		end += strings.IndexAny(text[end+strings.IndexByte(text[end:], '\t')+1:], "\t\n") + strings.IndexByte(text[end:],
			'\t') + 1
		was := text[start:end]
		if len(main)+len("mod\t") > len(was) {
			t.Fatalf("%q does not fit into %q", main, was)
		}
		return strings.ReplaceAll(text, was, "mod\t"+main+"-"+strings.Repeat("x", len(was)-len("mod\t")-len(main)-1))
	}
}

// A madeOf is the effective configuration of a version of containerd. The table comes from
// containerd itself by test/containerd.
type madeOf struct {
	Refused  bool     `json:"refused"`
	Disabled bool     `json:"disabled"`
	CDI      bool     `json:"cdi"`
	Folders  []string `json:"folders"`
	Default  string   `json:"default"`
	Handlers []string `json:"handlers"`
}

// TestContainerdConfigurations: for each version, the result of containerd's own loader.
func TestContainerdConfigurations(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/containerd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name  string
		Files map[string]string
		Want  map[string]madeOf
	}
	if err := yaml.UnmarshalStrict(text, &cases); err != nil || len(cases) < 40 {
		t.Fatal(len(cases), err)
	}
	program := containerdOf(t)
	for version, containerd := range map[string]string{"1.7": program("1.7.30"), "2.2": program("2.2.8"),
		"2.4": program("2.4.2")} {
		for _, tt := range cases {
			t.Run(version+" "+tt.Name, func(t *testing.T) {
				node := changes{dropIn: gone, config: gone, "usr/bin/containerd": containerd}
				maps.Copy(node, tt.Files)
				fact := gathered(t, newNode(node)).Runtime
				if len(fact.Value.Readings) != 1 {
					t.Fatalf("readings: %+v", fact)
				}
				one := fact.Value.Readings[0]
				got := madeOf{CDI: one.CDI, Folders: one.CDIFolders, Default: one.Default}
				for _, h := range one.Handlers {
					text := strings.TrimSpace(h.Name + " " + h.Program)
					if h.Systemd {
						text += " systemd"
					}
					got.Handlers = append(got.Handlers, text)
				}
				switch {
				case one.Refused != "":
					got = madeOf{Refused: true}
				case one.Disabled:
					got = madeOf{Disabled: true}
				case slices.Equal(got.Folders, []string{"/etc/cdi", "/var/run/cdi"}):
					got.Folders = nil
				}
				if diff := cmp.Diff(tt.Want[version], got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestVersionOfContainerd: the packages in a program identify its containerd version.
func TestVersionOfContainerd(t *testing.T) {
	t.Parallel()
	program := programs(t)
	for _, tt := range []struct {
		name, path, versions string
	}{
		{"containerd 1", programOf1, "1.7"},
		{"containerd 2", programOf2, "2.0 and newer"},
		{"another program", thisProgram, "1.7, 2.0 and newer"},
		{"no program", "", "1.7, 2.0 and newer"},
	} {
		facts := gathered(t, newNode(changes{config: gone, dropIn: gone,
			"usr/bin/containerd": program(tt.path)}))
		var got []string
		for _, reading := range facts.Runtime.Value.Readings {
			got = append(got, reading.Versions)
		}
		if versions := strings.Join(got, ", "); versions != tt.versions {
			t.Errorf("%s: versions %s, want %s", tt.name, versions, tt.versions)
		}
	}
}

// TestRuntimesWithoutProcesses: without visible processes, files and sockets identify the node's
// runtime.
func TestRuntimesWithoutProcesses(t *testing.T) {
	t.Parallel()
	without := changes{"proc/1/comm": gone, "proc/700/comm": gone, "proc/700/cmdline": gone, "proc/701/comm": gone}
	for _, tt := range []struct {
		name   string
		change changes
		want   string
	}{
		{"containerd's file", changes{}, doctor.Containerd},
		{"CRI-O's socket", changes{config: gone, dropIn: gone, "run/crio/crio.sock": ""}, doctor.CRIO},
		{"nothing", changes{config: gone, dropIn: gone}, ""},
		{"both", changes{"run/crio/crio.sock": ""}, ""},
		{"both, and a kubelet's file", changes{
			"run/crio/crio.sock": "", "var/lib/kubelet/config.yaml": "containerRuntimeEndpoint: " +
				"unix:///var/run/crio/crio.sock\n",
		}, doctor.CRIO},
	} {
		maps.Copy(tt.change, without)
		facts := gathered(t, newNode(tt.change))
		if got := facts.Runtime.Value.Name; got != tt.want || (facts.Runtime.Missing == "") != (tt.want != "") {
			t.Errorf("%s: got %q (%s), want %q", tt.name, got, facts.Runtime.Missing, tt.want)
		}
	}
}
