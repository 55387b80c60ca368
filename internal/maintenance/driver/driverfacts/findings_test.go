package driverfacts_test

import (
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

var update = flag.Bool("update", false, "rewrite testdata/findings.txt")

// examine judges a fixture with much free space.
func examine(t *testing.T, f fixture) preflight.Report {
	t.Helper()
	return examineWith(t, f, func(fs.FS, string) (uint64, error) { return 3 << 30, nil })
}

// examineWith judges a fixture with the free space of each folder.
func examineWith(t *testing.T, f fixture, free func(fs.FS, string) (uint64, error)) preflight.Report {
	t.Helper()
	tree := f.node.tree()
	facts := driverfacts.Places{Kernel: tree, Host: tree, Free: free}.ReadAll(t.Context())
	if strings.HasPrefix(f.to, "/") {
		folder, err := fs.Sub(tree, f.to[1:])
		if err != nil {
			t.Fatal(err)
		}
		facts.Target = driverfacts.Target(f.to, folder)
	} else if f.to != "" {
		target, err := driverfacts.VersionTarget(f.to)
		if err != nil {
			t.Fatal(err)
		}
		facts.Target = target
	}
	if f.name == "pods, processes and modules" {
		facts.Devices.Value = []preflight.PodDevice{
			{Namespace: "team", Pod: "train-0", Container: "main", Resource: "example.com/fast-gpu"},
			{Namespace: "team", Pod: "idle", Container: "main", Claim: "team/idle-claim"},
		}
		facts.Claims.Value = []preflight.Claim{{Namespace: "team", Name: "idle-claim"}, {Namespace: "team",
			Name: "left-over"}}
	}
	return preflight.Examine(facts)
}

// TestFindings holds the findings and holders on nodes of each distribution to
// testdata/findings.txt. Findings that are ok are counted only. `go test
// ./internal/maintenance/driver/driverfacts -run TestFindings -update` rewrites the file: read what
// changes.
func TestFindings(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, f := range fixtures {
		r := examine(t, f)
		fmt.Fprintf(&b, "## %s\n", f.name)
		if f.to != "" {
			fmt.Fprintf(&b, "--to %s\n", f.to)
		}
		fmt.Fprintf(&b, "%s\nowners: %s; next boot: %s\n", r.Summary, strings.Join(r.Owners, ", "), r.NextKernel)
		well := 0
		for _, finding := range r.Findings {
			if finding.Severity == diagnosis.OK {
				well++
				continue
			}
			if finding.Severity >= diagnosis.Warning && finding.Remedy == nil && !strings.HasPrefix(finding.Message,
				"The driver is in use by ") {
				t.Errorf("%s: no remedy: %+v", f.name, finding)
			}
			fmt.Fprintf(&b, "%s %s %s: %s\n", finding.Severity, finding.Check, finding.Code, finding.Message)
			for _, e := range finding.Evidence {
				fmt.Fprintf(&b, "    seen: %s\n", e)
			}
			for _, command := range finding.Remedy {
				fmt.Fprintf(&b, "    $ %s\n", command)
			}
		}
		for _, h := range r.Holders {
			fmt.Fprintf(&b, "%s %s %v %v %v %v\n    to let go: %s\n", h.Kind, h.Name, h.Containers, h.Resources,
				h.PIDs, h.Uses, h.Release)
		}
		fmt.Fprintf(&b, "ok: %d\n\n", well)
	}
	const golden = "testdata/findings.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("the findings (-want +got):\n%s", diff)
	}
}

// TestSpace: a version is installed into /usr, and a folder is placed by gpu-driver below /var/lib.
func TestSpace(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		to, full string // the full folder
		bare     bool   // there is no /var
		want     diagnosis.Severity
		says     string
	}{
		"a version":                 {to: v570, want: diagnosis.OK, says: "There is space for a driver"},
		"a version, /usr full":      {to: v570, full: "usr", want: diagnosis.Warning, says: "/usr has 5 MiB free, and a driver needs about 2048 MiB"},
		"a version, /boot full":     {to: v570, full: "boot", want: diagnosis.Warning, says: "/boot has 5 MiB free, and a driver needs about 256 MiB"},
		"a version, /var/lib full":  {to: v570, full: "var/lib", want: diagnosis.OK, says: "There is space for a driver"},
		"a folder, /usr full":       {to: "/opt/driver", full: "usr", want: diagnosis.OK, says: "There is space for a driver"},
		"a folder, /var/lib full":   {to: "/opt/driver", full: "var/lib", want: diagnosis.Warning, says: "/var/lib has 5 MiB free, and a driver needs about 2048 MiB"},
		"the present driver":        {full: "usr", want: diagnosis.OK, says: "Nothing is to be installed on the node"},
		"a folder without /var/lib": {to: "/opt/driver", bare: true, want: diagnosis.NotChecked, says: "The free space for a driver is not known"},
	} {
		node := ubuntu.with(files{"opt/driver/x": ""})
		if tt.bare {
			maps.DeleteFunc(node, func(name, _ string) bool { return strings.HasPrefix(name, "var/") })
		}
		r := examineWith(t, fixture{node: node, to: tt.to}, func(_ fs.FS, folder string) (uint64, error) {
			if folder == tt.full {
				return 5 << 20, nil
			}
			return 3 << 30, nil
		})
		at := slices.IndexFunc(r.Findings, func(f diagnosis.Finding) bool { return f.Check == "space" })
		if at < 0 || r.Findings[at].Severity != tt.want || r.Findings[at].Message != tt.says {
			t.Errorf("%s: %+v", name, r.Findings[max(at, 0):])
		}
	}
}
