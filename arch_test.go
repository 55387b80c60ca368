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

// everything, in the import table, stands for every package of the table but those of
// notForEverything.
const everything = "*"

// imports is the import table: a package of the project and the packages of the project it may
// import. A package's own folders below it belong to it. Packages below test and hack import what
// they need, and so do tests.
var imports = map[string][]string{
	"cmd/gpu-device-plugin": {"internal/app/cli"},
	"cmd/gpu-node-agent":    {"internal/app/cli", "internal/cluster"},
	// a module of its own: ADR 57
	"cmd/kubectl-gpu": {"internal/gpu/inventory", "internal/report/status", "internal/base/terminal",
		"internal/base/version"},
	"api/config/v1": {},

	"internal/gpu/inventory":  {},
	"internal/base/feed":      {},
	"internal/base/statefile": {},
	"internal/base/logwriter": {},
	"internal/base/supervise": {},
	"internal/base/version":   {}, "internal/base/driverroot": {}, "internal/base/terminal": {},
	"internal/base/lead": {"internal/base/feed", "internal/base/statefile"},

	"internal/gpu/nvidia":    {"internal/gpu/inventory", "internal/base/driverroot", "internal/base/statefile"},
	"internal/gpu/simulator": {"internal/base/statefile"},
	"internal/gpu/kernellog": {"internal/gpu/inventory"},
	"internal/gpu/cuda":      {"internal/base/driverroot", "internal/base/statefile", "internal/gpu/inventory"},
	"internal/kubelet":       {"internal/base/feed", "internal/base/statefile", "internal/base/supervise"},
	"internal/base/control":  {"internal/base/statefile", "internal/base/terminal"},

	"internal/gpu/health":          {"internal/gpu/inventory"},
	"internal/gpu/topology":        {"internal/gpu/inventory"},
	"internal/plan/resource":       {"internal/gpu/inventory", "internal/gpu/topology"},
	"internal/plan/containeredits": {"internal/gpu/inventory", "internal/plan/resource"},
	"internal/plan/layout":         {"internal/gpu/inventory"},
	"internal/plan/labels":         {"internal/gpu/inventory", "internal/plan/resource"},
	"internal/plan/dra":            {"internal/gpu/inventory", "internal/gpu/topology"},

	"internal/plan/cdi": {"internal/gpu/inventory", "internal/plan/resource", "internal/plan/containeredits",
		"internal/base/driverroot", "internal/base/statefile"},
	"internal/plan/devnodes": {"internal/gpu/inventory", "internal/plan/resource", "internal/plan/containeredits",
		"internal/base/statefile"},
	"internal/config": {
		"api/config/v1", "internal/plan/dra", "internal/gpu/health", "internal/plan/resource", "internal/plan/containeredits", "internal/plan/cdi", "internal/base/feed",
		"internal/base/statefile", "internal/gpu/inventory", "internal/base/supervise",
	},
	"internal/gpu/ledger": {"internal/gpu/inventory", "internal/gpu/health", "internal/base/statefile"},
	"internal/gpu/monitor": {"internal/gpu/inventory", "internal/gpu/health", "internal/base/feed", "internal/gpu/ledger",
		"internal/base/statefile"},
	"internal/report/recording": {
		"internal/base/statefile", "internal/gpu/health", "internal/gpu/inventory", "internal/gpu/ledger", "internal/gpu/monitor", "internal/report/nodeevents", "internal/plan/resource",
		"internal/report/status",
	},
	"internal/kubelet/serve": {
		"internal/plan/resource", "internal/plan/containeredits", "internal/base/feed", "internal/base/statefile", "internal/base/supervise",
		"internal/kubelet", // for the values of its accounts
	},
	"internal/mps": {"internal/gpu/inventory", "internal/plan/resource", "internal/base/feed",
		"internal/base/statefile", "internal/base/supervise"},
	"internal/report/featurefile": {"internal/base/feed", "internal/base/statefile"},
	"internal/report/status":      {"internal/gpu/inventory", "internal/gpu/health", "internal/plan/resource"},
	"internal/report/telemetry": {
		"internal/gpu/inventory", "internal/report/status", "internal/base/feed", "internal/base/statefile", "internal/base/supervise",
		"internal/kubelet", // for the values of its accounts
	},
	"internal/report/doctor":     {"internal/gpu/inventory", "internal/report/status"},
	"internal/report/nodeevents": {"internal/gpu/inventory", "internal/report/status"},
	// kubelet's values alone
	"internal/report/unitreport": {"internal/plan/containeredits", "internal/kubelet", "internal/plan/resource",
		"internal/report/status"},
	"internal/report/nodefacts": {"internal/report/doctor", "internal/base/driverroot", "internal/kubelet"},
	"internal/dra/draplugin": {
		"internal/plan/dra", "internal/base/feed", "internal/base/statefile", "internal/gpu/inventory", "internal/base/supervise",
		"internal/kubelet", // for the token of the process in the names of sockets
	},
	"internal/cluster/kubeapi": {"internal/base/feed", "internal/base/supervise"},
	"internal/cluster": {
		"internal/dra/draplugin", "internal/dra/handover",
		"internal/app/daemon", "internal/config", "internal/plan/dra", "internal/report/featurefile", "internal/base/feed", "internal/base/statefile", "internal/gpu/inventory",
		"internal/cluster/kubeapi", "internal/plan/labels", "internal/mig", "internal/mig/choice", "internal/report/nodeevents", "internal/plan/resource",
		"internal/base/lead", "internal/report/status", "internal/base/supervise", "internal/base/version",
		"internal/kubelet", // for the values of its accounts
	},
	"internal/mig": {
		"internal/gpu/inventory", "internal/plan/layout", "internal/plan/resource", "internal/base/feed", "internal/base/statefile", "internal/base/supervise",
		"internal/kubelet", // for the values of its accounts
	},
	"internal/mig/choice": {"internal/config", "internal/base/feed", "internal/base/statefile", "internal/plan/layout",
		"internal/mig"},
	"internal/dra/claims": {
		"internal/plan/cdi", "internal/config", "internal/plan/dra", "internal/gpu/inventory", "internal/plan/resource", "internal/base/feed", "internal/base/statefile",
		"internal/plan/layout", "internal/mig", // MIG devices are made for claims by the steps by which layouts are made
		"internal/kubelet", // for the values of its accounts
		"internal/mps",     // for the values that a control daemon is asked for with
	},
	"internal/maintenance/reset": {"internal/base/feed", "internal/base/statefile",
		"internal/gpu/inventory"}, "internal/maintenance/reboot": {"internal/base/statefile"},
	"internal/maintenance/cudacheck": {"internal/config", "internal/gpu/cuda", "internal/base/feed",
		"internal/base/statefile", "internal/gpu/inventory"},
	"internal/kubelet/offer": {
		"internal/config", "internal/plan/dra", "internal/gpu/inventory", "internal/plan/resource", "internal/kubelet/serve", "internal/base/feed", "internal/base/supervise",
	},
	"internal/dra/handover": {
		"internal/dra/claims", "internal/config", "internal/plan/dra", "internal/base/feed", "internal/base/statefile", "internal/gpu/inventory", "internal/plan/resource",
		"internal/base/supervise", "internal/kubelet", // the latter for the values of its accounts
	},
	"internal/app/daemon": {everything},
	"internal/app/cli":    {everything},
}

// lean is the program that does not talk to the API server, and what it may not link.
const lean = "cmd/gpu-device-plugin"

var notLean = []string{"k8s.io/client-go", "k8s.io/dynamic-resource-allocation", module + "internal/cluster/kubeapi",
	module + "internal/cluster",
	module + "internal/dra/draplugin"}

// notForEverything are packages that the word everything does not stand for.
var notForEverything = []string{"internal/cluster/kubeapi", "internal/cluster", "internal/dra/draplugin"}

// homes names, for an import path and all below it, the only packages that may import it.
var homes = []struct {
	path  string
	homes []string
}{
	{"github.com/NVIDIA/go-nvml", []string{"internal/gpu/nvidia", "internal/gpu/simulator"}},
	{"github.com/fsnotify/fsnotify", []string{"internal/kubelet", "internal/config", "internal/base/control"}},
	{"github.com/spf13/cobra", []string{"internal/app/cli", "internal/cluster", "cmd/kubectl-gpu"}},
	{"github.com/spf13/pflag", []string{"internal/app/cli", "internal/config", "internal/cluster"}},
	{"github.com/prometheus", []string{"internal/report/telemetry", "cmd/kubectl-gpu"}}, // which reads metrics
	{"net/http", []string{"internal/report/telemetry", "internal/cluster/kubeapi"}},
	{"log/slog", []string{"internal/base/logwriter"}}, // its JSON; messages go through klog
	{"google.golang.org/grpc", []string{"internal/kubelet/serve", "internal/kubelet", "internal/dra/draplugin"}},
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
	{"os", "Exit", []string{"cmd/gpu-device-plugin", "cmd/gpu-node-agent", "cmd/kubectl-gpu"}},
	{"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1", "RegisterDevicePluginServer", []string{"internal/kubelet/serve"}},
	{"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1", "NewRegistrationClient", []string{"internal/kubelet"}},
}

// pure packages hold values and policy: the same input gives the same answer, and nothing happens.
var pure = []string{
	"internal/gpu/inventory", "internal/gpu/health", "internal/gpu/topology", "internal/plan/resource", "internal/plan/containeredits",
	"internal/report/status", "internal/report/unitreport", "internal/report/doctor", "internal/report/nodeevents", "internal/plan/layout", "internal/plan/labels", "internal/plan/dra",
}

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
	problems, err := judge(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
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
			"internal/gadget/a.go: internal/gadget is not in the import table"},
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
	allowed, ok := imports[pkg]
	if !ok {
		return []string{pkg + " is not in the import table: give it a row here and in docs/dev/architecture.md, " +
			"or put the code into the package that has this job"}
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

// judgeImport says why pkg may not import target, and what to do; it is empty where pkg may.
func judgeImport(pkg, target string, allowed []string) string {
	if ours, ok := strings.CutPrefix(target, module); ok {
		ours = owner(ours)
		_, inTable := imports[ours]
		if ours == pkg || slices.Contains(allowed, ours) || inTable && slices.Contains(allowed, everything) &&
			!slices.Contains(notForEverything, ours) {
			return ""
		}
		return fmt.Sprintf("%s may not import %s: declare an interface in %[1]s and pass the value in from internal/app/cli, "+
			"or move the value to a package that both may import", pkg, ours)
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

// owner returns the package of the import table that a folder belongs to: internal/gpu/nvidia for
// internal/gpu/nvidia/x.
func owner(dir string) string {
	for at := dir; at != "."; at = path.Dir(at) {
		if _, ok := imports[at]; ok {
			return at
		}
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
