package simulator_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// implementations are go-nvml's interfaces and the simulator's types behind them. Each type embeds
// its interface as nil, so a method that it does not declare panics.
var implementations = []struct {
	methods reflect.Type
	types   []string // that together have the methods
}{
	{reflect.TypeFor[nvml.Interface](), []string{"library"}},
	{reflect.TypeFor[nvml.Device](), []string{"device", "migDevice"}},
	{reflect.TypeFor[nvml.EventSet](), []string{"eventSet"}},
	{reflect.TypeFor[nvml.GpuInstance](), []string{"gpuInstanceHandle"}},
	{reflect.TypeFor[nvml.GpmSample](), []string{"gpmSample"}},
	{reflect.TypeFor[nvml.ComputeInstance](), []string{"computeInstanceHandle"}},
}

// onHandles are methods of go-nvml's values that hold a C handle: LookupSymbol says that their
// functions are missing.
var onHandles = []string{"GetGpuFabricInfoV", "GetTemperatureV"}

// TestEveryCallOfTheAdapterIsImplemented compares what package nvidia calls with what the simulator
// declares.
func TestEveryCallOfTheAdapterIsImplemented(t *testing.T) {
	t.Parallel()
	called, declared := map[string]bool{}, map[string][]string{}
	for _, file := range sources(t, "../nvidia") {
		ast.Inspect(file, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				called[s.Sel.Name] = true
			}
			return true
		})
	}
	for _, file := range sources(t, ".") {
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil {
				receiver := f.Recv.List[0].Type
				if pointer, ok := receiver.(*ast.StarExpr); ok {
					receiver = pointer.X
				}
				if name, ok := receiver.(*ast.Ident); ok {
					declared[name.Name] = append(declared[name.Name], f.Name.Name)
				}
			}
		}
	}
	checked := 0
	for _, i := range implementations {
		for method := range i.methods.Methods() {
			declares := func(name string) bool { return slices.Contains(declared[name], method.Name) }
			switch {
			case !called[method.Name] || slices.Contains(onHandles, method.Name):
			case slices.ContainsFunc(i.types, declares):
				checked++
			default:
				t.Errorf("package nvidia calls %s.%s, and no type of %v implements it", i.methods, method.Name, i.types)
			}
		}
	}
	if checked < 40 { // those of 2026
		t.Errorf("only %d calls of package nvidia were found: the test does not see what it should", checked)
	}
}

// sources parses the files of a package without its tests.
func sources(t *testing.T, folder string) []*ast.File {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}
