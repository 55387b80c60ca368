//go:build containerd

// Package containerd_test holds the table by which internal/report/nodefacts reads configurations
// of containerd to containerd's own loader. Each version is a module of its own, as two of them
// cannot be in one program: v17, v22 and v24. `make containerd` runs the test.
package containerd_test

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// A loaded is what the program of a version prints.
type loaded struct {
	Disabled []string `json:"disabled"`
	CRI      struct {
		CDI        *bool    `json:"enableCDI"`
		Folders    []string `json:"cdiSpecDirs"`
		Containerd struct {
			Default  string `json:"defaultRuntimeName"`
			Runtimes map[string]struct {
				Options map[string]any `json:"options"`
			} `json:"runtimes"`
		} `json:"containerd"`
	} `json:"cri"`
}

// A madeOf is what a version makes of its files, as the table has it.
type madeOf struct {
	Refused  bool     `json:"refused"`
	Disabled bool     `json:"disabled"`
	CDI      bool     `json:"cdi"`
	Folders  []string `json:"folders"`
	Default  string   `json:"default"`
	Handlers []string `json:"handlers"`
}

// of returns what was loaded in the form of the table. containerd does not start its CRI plugin
// with a default that no runtime has.
func of(l loaded) madeOf {
	containers := l.CRI.Containerd
	for _, name := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		if slices.Contains(l.Disabled, name) {
			return madeOf{Disabled: true}
		}
	}
	if _, has := containers.Runtimes[containers.Default]; !has {
		return madeOf{Refused: true}
	}
	got := madeOf{CDI: l.CRI.CDI == nil || *l.CRI.CDI, Default: containers.Default, Folders: l.CRI.Folders}
	if slices.Equal(got.Folders, []string{"/etc/cdi", "/var/run/cdi"}) { // the default
		got.Folders = nil
	}
	for _, name := range slices.Sorted(maps.Keys(containers.Runtimes)) {
		options := containers.Runtimes[name].Options
		program, _ := options["BinaryName"].(string)
		text := strings.TrimSpace(name + " " + program)
		if systemd, _ := options["SystemdCgroup"].(bool); systemd {
			text += " systemd"
		}
		got.Handlers = append(got.Handlers, text)
	}
	return got
}

// TestTableIsContainerds: each version of containerd makes of the files what the table says.
func TestTableIsContainerds(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../internal/report/nodefacts/testdata/containerd.yaml")
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
	for folder, version := range map[string]string{"v17": "1.7", "v22": "2.2", "v24": "2.4"} {
		program := filepath.Join(t.TempDir(), folder)
		build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
		build.Dir = folder
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", folder, err, out)
		}
		for _, tt := range cases {
			t.Run(version+" "+tt.Name, func(t *testing.T) {
				t.Parallel()
				got := load(t, program, tt.Files)
				if diff := cmp.Diff(tt.Want[version], got); diff != "" {
					t.Errorf("(-table +containerd):\n%s", diff)
				}
			})
		}
	}
}

// load has a program read the files of a node.
func load(t *testing.T, program string, files map[string]string) madeOf {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		file := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(file), 0o700)
		if err == nil {
			err = os.WriteFile(file, []byte(strings.ReplaceAll(text, "/etc/containerd", root+"/etc/containerd")), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), program, filepath.Join(root, "etc/containerd/config.toml"))
	out, err := cmd.Output()
	if err != nil {
		t.Logf("containerd says: %v", err)
		return madeOf{Refused: true}
	}
	var l loaded
	if err := json.Unmarshal(out, &l); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return of(l)
}
