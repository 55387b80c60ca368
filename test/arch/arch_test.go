// Package arch holds the test that keeps the architecture: who may import whom, which package is
// the only home of what, that policy stays pure, and the shape of files and folders.
// docs/dev/architecture.md explains the reasons.
package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const (
	module   = "github.com/gpu-device-plugin/gpu-device-plugin/"
	maxLines = 600 // a file that passes this is two ideas
)

// root is the root of the repository, which the tests name all paths from. They do not change to
// it: go test would then look for changed files in another folder, and show old results.
var root = os.DirFS("../..")

// wing is a folder of internal/: a part of the architecture.
type wing struct {
	name string
	// uses are the packages of the wings before it that its packages may import: "base/..." is each
	// package of a wing, "gpu/inventory" one package. Packages of one wing may import each other.
	uses string
}

// wings are the folders of internal/ from the ground up: imports go up this table only.
var wings = []wing{
	{"base", ""},
	{"gpu", "base/..."},
	{"plan", "base/... gpu/inventory gpu/topology"},
	{"config", "base/... gpu/inventory gpu/health plan/..."},
	{"kubelet", "base/... gpu/inventory plan/... config"},
	{"mps", "base/... gpu/inventory plan/resource"},
	{"mig", "base/... gpu/inventory plan/... config kubelet"},
	{"dra", "base/... gpu/inventory plan/... config kubelet mps mig"},
	{"maintenance", "base/... gpu/inventory gpu/cuda plan/repair plan/driverchange config"},
	{"report", "base/... gpu/... plan/... kubelet"},
	{"app", "base/... gpu/... plan/... config kubelet/... mps mig/... dra/claims dra/owner dra/pool maintenance/... report/..."},
	{"cluster", "base/... gpu/inventory plan/... config kubelet mig/... dra/... report/... app/daemon"},
}

// programs are the folders outside of internal/ that have a row of their own, and what of internal/
// they may import. Packages below test and hack import what they need, and so do tests.
var programs = map[string]string{
	"cmd/gpu-device-plugin": "app/cli",
	"cmd/gpu-node-agent":    "app/cli cluster",
	"cmd/gpu-driver":        "app/drivercli",
	"cmd/kubectl-gpu":       "base/terminal base/version base/wording gpu/inventory plan/driverchange plan/repair plan/slots report/status", // a module of its own: ADR 57
	"api/config/v1":         "",
}

// narrower are packages that may import less than their wing.
var narrower = map[string]string{
	"internal/base/feed":       "",
	"internal/base/statefile":  "",
	"internal/base/supervise":  "",
	"internal/gpu/inventory":   "",
	"internal/kubelet":         "base/... kubelet/checkpoint",             // an adapter knows no plan
	"internal/kubelet/serve":   "base/... plan/... kubelet kubelet/yield", // nor a server the configuration
	"internal/dra/draplugin":   "base/... gpu/inventory plan/dra kubelet",
	"internal/cluster/kubeapi": "base/...",
}

// lean is the program that does not talk to the API server, and what it may not link.
const lean = "cmd/gpu-device-plugin"

var notLean = []string{"k8s.io/client-go", "k8s.io/dynamic-resource-allocation", module + "internal/cluster",
	module + "internal/dra/draplugin", module + "internal/maintenance/driver/driverpack",
	module + "internal/maintenance/driver/driverhost", module + "internal/maintenance/driver/driverkernel",
	module + "internal/maintenance/driver/driverstore", module + "internal/maintenance/driver/driverfetch"}

// homes names, for an import path and all below it, the only packages that may import it.
var homes = []struct {
	path  string
	homes []string
}{
	{"github.com/NVIDIA/go-nvml", []string{"internal/gpu/nvidia", "internal/gpu/simulator"}},
	{"github.com/fsnotify/fsnotify", []string{"internal/kubelet", "internal/config", "internal/base/control"}},
	{"github.com/spf13/cobra", []string{"internal/app/cli", "internal/app/drivercli", "internal/cluster", "cmd/kubectl-gpu"}},
	{"github.com/spf13/pflag", []string{"internal/app/cli", "internal/config", "internal/cluster"}},
	{"github.com/prometheus", []string{"internal/report/telemetry", "cmd/kubectl-gpu"}}, // which reads metrics
	{"net/http", []string{"internal/report/telemetry", "internal/cluster/kubeapi", "internal/maintenance/driver"}},
	{"log/slog", []string{"internal/base/logwriter"}}, // its JSON; messages go through klog
	{"google.golang.org/grpc", []string{"internal/kubelet/serve", "internal/kubelet", "internal/dra/draplugin",
		"internal/cluster/healthevents"}},
	{"k8s.io/kubelet/pkg/apis/deviceplugin", []string{"internal/kubelet/serve", "internal/kubelet"}},
	{"k8s.io/kubelet/pkg/apis/podresources", []string{"internal/kubelet"}},
	{"k8s.io/kubelet/pkg/apis/dra", []string{"internal/dra/draplugin"}},
	{"k8s.io/kubelet/pkg/apis/dra-health", []string{"internal/dra/draplugin"}},
	{"k8s.io/kubelet/pkg/apis/pluginregistration", []string{"internal/dra/draplugin"}},
	{"tags.cncf.io/container-device-interface", []string{"internal/plan/cdi"}},
	{"github.com/NVIDIA/nvidia-container-toolkit", []string{}}, // ADR 11
	{"sigs.k8s.io/yaml", []string{
		"internal/config", "internal/gpu/simulator", "api/config/v1", "internal/app/cli", // cli prints it
		"internal/report/nodefacts", "internal/plan/layout", // read CDI specs, those of others too, and mig-parted's file
		"cmd/kubectl-gpu", // prints it
	}},
	{"go.yaml.in/yaml", []string{"internal/config", "internal/gpu/simulator", "api/config/v1", "cmd/kubectl-gpu"}},
	{"gopkg.in/yaml.v3", []string{}},
	{"github.com/pelletier/go-toml", []string{"internal/report/nodefacts"}},
	{"k8s.io/client-go", []string{"internal/cluster/kubeapi", "cmd/kubectl-gpu"}}, // law 16
	{"k8s.io/dynamic-resource-allocation", []string{"cmd/kubectl-gpu"}},           // ADR 44
}

// callHomes names, for a function of an imported package, the only packages that may mention it.
var callHomes = []struct {
	path, name string
	homes      []string
}{
	{"os", "Exit", []string{"cmd/gpu-device-plugin", "cmd/gpu-node-agent", "cmd/gpu-driver", "cmd/kubectl-gpu"}},
	{"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1", "RegisterDevicePluginServer", []string{"internal/kubelet/serve"}},
	{"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1", "NewRegistrationClient", []string{"internal/kubelet"}},
}

// pure packages hold values and policy: the same input gives the same answer, and nothing happens.
// They import no other packages of the project than pure ones and those of pureReads.
var pure = []string{
	"internal/base/diagnosis", "internal/base/order", "internal/base/wording",
	"internal/gpu/inventory", "internal/gpu/health", "internal/gpu/topology",
	"internal/kubelet/yield", "internal/maintenance/driver/preflight",
	"internal/plan/containeredits", "internal/plan/dra", "internal/plan/driverchange", "internal/plan/holders", "internal/plan/labels",
	"internal/plan/layout", "internal/plan/listing", "internal/plan/resource", "internal/plan/slots", "internal/plan/repair",
	"internal/report/doctor", "internal/report/nodeevents", "internal/report/status", "internal/report/unitreport",
}

// pureReads are packages of which pure ones may use values.
var pureReads = []string{"internal/kubelet"} // unitreport: the kubelet's account of containers

// impure imports and calls are those that read or change the world, tell the time or log.
var (
	impureImports = []string{
		"context", "io/fs", "io/ioutil", "log", "log/slog", "math/rand", "math/rand/v2", "net", "os", "os/exec", "syscall",
		"golang.org/x/sys/unix", "k8s.io/klog/v2", "k8s.io/utils/clock",
	}
	impureTime = []string{"After", "AfterFunc", "NewTicker", "NewTimer", "Now", "Since", "Tick", "Until"}
)

// vague names say nothing about what a folder holds.
var vague = []string{
	"common", "helper", "helpers", "manager", "managers", "misc", "type", "types", "util", "utils",
}

func TestArchitecture(t *testing.T) {
	problems, err := judge(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
}

// TestWings: the table has the folders of internal/ and no others, each row uses rows above it only,
// and the doc of a wing names each of its packages.
func TestWings(t *testing.T) {
	t.Parallel()
	folders, err := fs.ReadDir(root, "internal")
	if err != nil {
		t.Fatal(err)
	}
	var names, want []string
	for _, f := range folders {
		want = append(want, f.Name())
	}
	for _, w := range wings {
		for pattern := range strings.FieldsSeq(w.uses) {
			if used, _, _ := strings.Cut(pattern, "/"); !slices.Contains(names, used) {
				t.Errorf("%s uses %s, which is no package of a wing above it", w.name, pattern)
			}
		}
		names = append(names, w.name)
		doc := packageDoc(t, path.Join("internal", w.name))
		packages, err := fs.Glob(root, path.Join("internal", w.name, "*", "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		named := map[string]bool{}
		for _, file := range packages {
			name := path.Base(path.Dir(file))
			if name != "testdata" && !named[name] && !strings.Contains(doc, name) {
				t.Errorf("the package doc of internal/%s does not name its package %s", w.name, name)
			}
			named[name] = true
		}
	}
	if diff := cmp.Diff(want, slices.Sorted(slices.Values(names))); diff != "" {
		t.Errorf("the folders of internal/ are not the rows of the table (-folders +table):\n%s", diff)
	}
}

// packageDoc returns the documentation of the package in a folder.
func packageDoc(t *testing.T, folder string) string {
	t.Helper()
	files, err := fs.Glob(root, path.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		source, err := fs.ReadFile(root, name)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		if isPackageDoc(file) {
			return file.Doc.Text()
		}
	}
	return ""
}

// grouped are the wings that join many parts. Their structs have at most maxFields fields, of which an
// embedded struct counts as one.
var grouped = []string{"internal/app/daemon", "internal/cluster", "internal/dra", "internal/kubelet", "internal/mig"}

const maxFields = 15

// judgeFields judges the number of fields of a struct. The structs of files and messages are free: their
// fields have tags, because other programs know them.
func judgeFields(pkg string, t *ast.TypeSpec) string {
	s, ok := t.Type.(*ast.StructType)
	if !ok || !slices.ContainsFunc(grouped, func(wing string) bool { return isBelow(pkg, wing) }) ||
		slices.ContainsFunc(s.Fields.List, func(f *ast.Field) bool { return f.Tag != nil }) {
		return ""
	}
	if n := s.Fields.NumFields(); n > maxFields {
		return fmt.Sprintf("%s has %d fields, more than %d: group them by what they are", t.Name.Name, n, maxFields)
	}
	return ""
}

// TestJudgeFindsProblems breaks each rule once, so that the test above is known to fail where it
// should.
func TestJudgeFindsProblems(t *testing.T) {
	file := func(pkg, rest string) string { return "// Package " + pkg + " is here.\npackage " + pkg + "\n" + rest }
	tests := []struct {
		name, path, source, want string
	}{
		{"forbidden import", "internal/plan/resource/a.go", file("resource", `import _ "`+module+`internal/config"`),
			"internal/plan/resource/a.go: internal/plan/resource may not import internal/config"},
		{"import of test code", "internal/app/cli/a.go", file("cli", `import _ "`+module+`test/kubelet"`),
			"internal/app/cli/a.go: internal/app/cli may not import test/kubelet"},
		{"package that the table lacks", "internal/gadget/a.go", file("gadget", ""),
			"internal/gadget/a.go: internal/gadget is in none of the twelve wings"},
		{"the API server in the lean program", "internal/app/cli/a.go", file("cli", `import _ "`+module+`internal/cluster"`),
			"internal/app/cli/a.go: internal/app/cli may not import internal/cluster"},
		{"go-nvml outside its home", "internal/gpu/monitor/a.go",
			file("monitor", `import _ "github.com/NVIDIA/go-nvml/pkg/nvml"`),
			"internal/gpu/monitor/a.go: internal/gpu/monitor may not import github.com/NVIDIA/go-nvml/pkg/nvml"},
		{"exit outside main", "internal/app/daemon/a.go", file("daemon", `import "os"; func f() { os.Exit(1) }`),
			"internal/app/daemon/a.go: internal/app/daemon may not use os.Exit"},
		{"exit under another name", "internal/app/daemon/a.go", file("daemon", `import x "os"; func f() { x.Exit(1) }`),
			"internal/app/daemon/a.go: internal/app/daemon may not use os.Exit"},
		{"second home of a client", "internal/kubelet/serve/a.go", file("plugin",
			`import api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"; var f = api.NewRegistrationClient`),
			"internal/kubelet/serve/a.go: internal/kubelet/serve may not use k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1.NewReg"},
		{"policy that reads the clock", "internal/gpu/health/a.go", file("health", `import "time"; var f = time.Now`),
			"internal/gpu/health/a.go: internal/gpu/health may not use time.Now"},
		{"policy that does input", "internal/plan/containeredits/a.go", file("edits", `import _ "os"`),
			"internal/plan/containeredits/a.go: internal/plan/containeredits may not import os"},
		{"policy that starts a goroutine", "internal/gpu/topology/a.go", file("topology", `func f() { go f() }`),
			"internal/gpu/topology/a.go: internal/gpu/topology may not start a goroutine"},
		{"fixed sleep in a test", "internal/kubelet/serve/a_test.go",
			file("plugin", `import "time"; func f() { time.Sleep(1) }`),
			"internal/kubelet/serve/a_test.go: sleeps for a fixed time"},
		{"sleeping loop in the daemon", "internal/kubelet/serve/a.go",
			file("plugin", `import "time"; func f() { for { time.Sleep(1) } }`),
			"internal/kubelet/serve/a.go: sleeps for a fixed time"},
		{"message that varies", "internal/app/daemon/a.go", file("daemon", `func f(l logger, m string) { l.Info(m) }`),
			"internal/app/daemon/a.go: logs a message that is not constant"},
		{"level between the levels", "internal/app/daemon/a.go", file("daemon", `func f(l logger) { l.V(3).Info("Here") }`),
			"internal/app/daemon/a.go: logs at a level that is none of 2, 4 and 6"},
		{"no package doc", "internal/base/feed/a.go", "package feed\n",
			"internal/base/feed: no package doc"},
		{"long file", "test/kubelet/a.go", file("kubelet", strings.Repeat("\n", maxLines)),
			"test/kubelet/a.go: 602 lines"},
		{"struct of many fields", "internal/mig/a.go",
			file("mig", "type many struct { "+strings.Repeat("a int; ", maxFields+1)+"}"),
			"internal/mig/a.go: many has 16 fields"},
		{"vague folder", "internal/app/cli/util/a.go", file("util", ""),
			"internal/app/cli/util: a folder name that says nothing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			problems, err := judge(fstest.MapFS{tt.path: {Data: []byte(tt.source)}})
			if err != nil {
				t.Fatal(err)
			}
			if len(problems) != 1 || !strings.HasPrefix(problems[0], tt.want) {
				t.Errorf("problems: %q, want one that starts with %q", problems, tt.want)
			}
		})
	}
}

func TestJudgeAllowsWhatTheTableAllows(t *testing.T) {
	t.Parallel()
	source := func(pkg, rest string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte("// Package " + pkg + " is here.\npackage " + pkg + "\n" + rest)}
	}
	tree := fstest.MapFS{
		"internal/app/cli/a.go": source("cli",
			`import _ "`+module+`internal/app/daemon"; import _ "github.com/spf13/cobra"; func f(l logger, err error) {
				l.V(2).Info("Here", "n", 1); l.Error(err, "There"); entry.Info() }`),
		"internal/app/cli/a_test.go": source("cli", `import _ "net/http"`),
		"internal/base/feed/a_test.go": source("feed",
			`import ("time"; "testing/synctest"); var f = synctest.Test; func g() { time.Sleep(1) }`),
		"internal/kubelet/serve/a_test.go":       source("plugin", `import "time"; func f() { for { time.Sleep(1) } }`),
		"internal/gpu/nvidia/a.go":               source("nvidia", `import _ "`+module+`internal/gpu/nvidia/internal/stub"`),
		"internal/gpu/nvidia/internal/stub/a.go": source("stub", ""),
		"internal/gpu/nvidia/testdata/util/a.go": {Data: []byte("no Go at all")},
	}
	problems, err := judge(tree)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string(nil), problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

// judge returns what in the tree breaks the architecture, one sentence for each, in the order of
// the paths.
func judge(tree fs.FS) ([]string, error) {
	var problems []string
	documented := map[string]bool{} // folder → one of its files has a package doc
	err := fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		switch base := path.Base(name); {
		case err != nil:
			return err
		case entry.IsDir() && (base == "testdata" || base == "bin" || base == "dist" || len(base) > 1 && base[0] == '.'):
			return fs.SkipDir
		case entry.IsDir() && slices.Contains(vague, base):
			problems = append(problems, name+": a folder name that says nothing: name it after what it holds")
			return fs.SkipDir
		case entry.IsDir() || path.Ext(name) != ".go":
			return nil
		}
		source, err := fs.ReadFile(tree, name)
		if err != nil {
			return fmt.Errorf("read source: %w", err)
		}
		lines := bytes.Count(source, []byte("\n"))
		if lines > maxLines {
			problems = append(problems, fmt.Sprintf(
				"%s: %d lines, and more than %d are two ideas: split it by concept", name, lines, maxLines))
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse source: %w", err)
		}
		dir := path.Dir(name)
		isTest := strings.HasSuffix(name, "_test.go")
		judgement := judgeSleep(file, isTest || isBelow(dir, "test"))
		if !isTest {
			documented[dir] = documented[dir] || isPackageDoc(file)
			judgement = append(judgement, judgeFile(owner(dir), file)...)
		}
		for _, p := range judgement {
			problems = append(problems, name+": "+p)
		}
		return nil
	})
	for dir, ok := range documented {
		if !ok {
			problems = append(problems, dir+": no package doc: begin one file with "+
				"\"// Package <name> …\" (or \"// Command <name> …\") that says what it is and who may import it")
		}
	}
	slices.Sort(problems)
	return problems, err
}

// judgeFile judges one file's imports, calls and statements; pkg is the package of the table that
// the file belongs to.
func judgeFile(pkg string, file *ast.File) []string {
	if strings.HasPrefix(pkg, "test") || strings.HasPrefix(pkg, "hack") {
		return nil
	}
	allowed, ok := mayImport(pkg)
	if !ok {
		return []string{pkg + " is in none of the twelve wings: put the code into the wing that has this job; " +
			"docs/dev/architecture.md says what each is for"}
	}
	var problems []string
	names := importNames(file)
	for _, target := range names {
		if problem := judgeImport(pkg, target, allowed); problem != "" {
			problems = append(problems, problem)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			if problem := judgeFields(pkg, n); problem != "" {
				problems = append(problems, problem)
			}
		case *ast.GoStmt:
			if slices.Contains(pure, pkg) {
				problems = append(problems, pkg+" may not start a goroutine: it is pure; an owner such as monitor runs things")
			}
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && names[x.Name] != "" {
				if problem := judgeCall(pkg, names[x.Name], n.Sel.Name); problem != "" {
					problems = append(problems, problem)
				}
			}
		case *ast.CallExpr:
			problems = append(problems, judgeLog(names, n)...)
		}
		return true
	})
	return problems
}

// judgeSleep judges waiting. A sleep is deaf to a context, so the daemon has none. In test code it
// is the pace of a loop that waits for a condition, or runs on the virtual clock of a synctest
// bubble; elsewhere it is a guess.
func judgeSleep(file *ast.File, isTest bool) []string {
	names := importNames(file)
	if isTest && names["synctest"] == "testing/synctest" {
		return nil
	}
	var problems []string
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ForStmt:
			return !isTest
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && names[x.Name] == "time" && n.Sel.Name == "Sleep" {
				problems = append(problems, "sleeps for a fixed time: wait for the condition itself, "+
					"beside ctx.Done() in one select")
			}
		}
		return true
	})
	return problems
}

// mayImport returns the patterns of what a package may import of internal/; ok is false where no
// table has the package.
func mayImport(pkg string) (patterns string, ok bool) {
	if patterns, ok = narrower[pkg]; ok {
		return patterns, true
	}
	if patterns, ok = programs[pkg]; ok {
		return patterns, true
	}
	for _, w := range wings {
		if isBelow(pkg, "internal/"+w.name) {
			return w.uses + " " + w.name + "/...", true
		}
	}
	return "", false
}

// judgeImport says why pkg may not import target, and what to do; it is empty where pkg may.
func judgeImport(pkg, target, allowed string) string {
	if ours, ok := strings.CutPrefix(target, module); ok {
		ours = owner(ours)
		switch {
		case ours == pkg, ours == "api/config/v1" && pkg == "internal/config":
			return ""
		case !matches(strings.TrimPrefix(ours, "internal/"), allowed):
			return fmt.Sprintf("%s may not import %s: declare an interface in %[1]s and pass the value in from "+
				"internal/app, or move the value to a package that both may import", pkg, ours)
		case slices.Contains(pure, pkg) && !slices.Contains(pure, ours) && !slices.Contains(pureReads, ours):
			return fmt.Sprintf("%s may not import %s: it is pure, and that package is not", pkg, ours)
		}
		return ""
	}
	if slices.Contains(pure, pkg) && slices.Contains(impureImports, target) {
		return fmt.Sprintf("%s may not import %s: it is pure; read the world in an adapter and pass the value in", pkg,
			target)
	}
	for _, h := range homes {
		if isBelow(target, h.path) && !slices.Contains(h.homes, pkg) {
			return fmt.Sprintf("%s may not import %s: only %s may; call them, or move the code there",
				pkg, target, strings.Join(append(h.homes, "a test"), ", "))
		}
	}
	return ""
}

// judgeCall says why pkg may not mention the function name of the package at target; it is empty
// where pkg may.
func judgeCall(pkg, target, name string) string {
	for _, h := range callHomes {
		if target == h.path && name == h.name && !slices.Contains(h.homes, pkg) {
			return fmt.Sprintf("%s may not use %s.%s: only %s may; return a value or an error to it", pkg, target, name,
				strings.Join(h.homes, ", "))
		}
	}
	if target == "time" && slices.Contains(pure, pkg) && slices.Contains(impureTime, name) {
		return fmt.Sprintf("%s may not use time.%s: it is pure; take the time as an argument", pkg, name)
	}
	return ""
}

// judgeLog judges a log call, by the logger's method names: the level is one of docs/monitoring.md
// and the message constant. logcheck judges the rest.
func judgeLog(names map[string]string, call *ast.CallExpr) []string {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	if x, ok := method.X.(*ast.Ident); ok && names[x.Name] != "" {
		return nil // a package's function, such as http.Error
	}
	message := map[string]int{"Info": 0, "Error": 1}
	at, logs := message[method.Sel.Name]
	switch {
	case logs && len(call.Args) > at:
		if text, ok := call.Args[at].(*ast.BasicLit); !ok || text.Kind != token.STRING {
			return []string{"logs a message that is not constant: put what changes into keys and values"}
		}
	case method.Sel.Name == "V" && len(call.Args) == 1:
		if level, ok := call.Args[0].(*ast.BasicLit); !ok || !slices.Contains([]string{"2", "4", "6"}, level.Value) {
			return []string{"logs at a level that is none of 2, 4 and 6: docs/monitoring.md says what each is for"}
		}
	}
	return nil
}

// matches says whether one of the patterns names a package of internal/: "gpu/inventory" itself, or
// "gpu/..." each package of its wing.
func matches(pkg, patterns string) bool {
	return slices.ContainsFunc(strings.Fields(patterns), func(pattern string) bool {
		wing, all := strings.CutSuffix(pattern, "/...")
		return pkg == pattern || all && isBelow(pkg, wing)
	})
}

// owner returns the package that a folder belongs to: internal/gpu/nvidia for what lies below it,
// and a program's own folder for its packages. A pure package is judged by itself.
func owner(dir string) string {
	if slices.Contains(pure, dir) {
		return dir
	}
	for program := range programs {
		if isBelow(dir, program) {
			return program
		}
	}
	if parts := strings.SplitN(dir, "/", 4); parts[0] == "internal" && len(parts) == 4 {
		return path.Join(parts[:3]...)
	}
	return dir
}

// isBelow says whether a path is root or lies below it.
func isBelow(name, root string) bool { return name == root || strings.HasPrefix(name, root+"/") }

// importNames returns a file's imports by the name they have in it: the given one, or the path's
// last element, which is right for every package whose functions are judged.
func importNames(file *ast.File) map[string]string {
	names := map[string]string{}
	for _, spec := range file.Imports {
		target, _ := strconv.Unquote(spec.Path.Value) // the parser has checked it
		switch {
		case spec.Name == nil:
			names[path.Base(target)] = target
		case spec.Name.Name == "_" || spec.Name.Name == ".":
			names[spec.Name.Name+target] = target // no name leads to it, and there may be several
		default:
			names[spec.Name.Name] = target
		}
	}
	return names
}

// isPackageDoc says whether a file carries its package's documentation.
func isPackageDoc(file *ast.File) bool {
	doc := file.Doc.Text()
	isCommand := file.Name.Name == "main" && strings.HasPrefix(doc, "Command ")
	return isCommand || strings.HasPrefix(doc, "Package "+file.Name.Name+" ")
}
