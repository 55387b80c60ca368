package driverpack_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverpack"
)

// builtMakefile compiles files like kernel modules, with the release of the kernel's header, and
// prints the folders of the kernel.
const builtMakefile = `VERSION = ` + version + `
modules: nvidia.ko nvidia-uvm.ko
	@echo "SYSSRC=$(SYSSRC) SYSOUT=$(SYSOUT)"
%.ko:
	printf '#include "$(SYSOUT)/include/generated/utsrelease.h"\nconst char m[] __attribute__((section(".modinfo"), used)) = ` +
	`"version=$(VERSION)\\0license=LICENSE\\0vermagic=" UTS_RELEASE " SMP\\0";\n' | $(CC) -g -x c -c -o $@ -
`

// withSources returns a driver with the sources of both kinds of modules.
func withSources(makefile string) driver {
	machine := map[string]uint16{"amd64": amd64, "arm64": arm64}[runtime.GOARCH]
	return newDriver(machine).
		with("kernel-open/Makefile", strings.Replace(makefile, "LICENSE", "Dual MIT/GPL", 1)).
		with("kernel/Makefile", strings.Replace(makefile, "LICENSE", "NVIDIA", 1))
}

// here makes .run files for the architecture of this machine.
func here() runMaker {
	m := nvidia()
	m.machine = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	return m
}

// kernelTree writes the folder of a kernel with headers.
func kernelTree(t *testing.T, makefile string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range map[string]string{
		"include/generated/utsrelease.h": `#define UTS_RELEASE "` + kernel + "\"\n", "Makefile": makefile,
	} {
		name = filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

func TestModulesAreBuiltAndPacked(t *testing.T) {
	t.Parallel()
	source := t.TempDir()
	linked := kernelTree(t, "")
	if err := os.Symlink(source, filepath.Join(linked, "source")); err != nil {
		t.Fatal(err)
	}
	plain, debian := kernelTree(t, "all:\n"), kernelTree(t, "include "+source+"/Makefile\n")
	for name, tt := range map[string]struct {
		tree, source string
		proprietary  bool
	}{
		"open, one tree":                {plain, plain, false},
		"proprietary, one tree":         {plain, plain, true},
		"headers of Debian":             {debian, source, false},
		"a kernel outside its sources":  {linked, source, false},
		"a relative path of the kernel": {"RELATIVE", plain, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := here().of(t, withSources(builtMakefile).tarOf(t))
			var log bytes.Buffer
			o := driverpack.BuildOptions{
				KernelSource: tt.tree, Proprietary: tt.proprietary, Folder: filepath.Join(t.TempDir(), "modules"), Log: &log,
			}
			output := tt.tree
			if tt.tree == "RELATIVE" {
				wd, err := os.Getwd()
				if err != nil {
					t.Fatal(err)
				}
				if o.KernelSource, err = filepath.Rel(wd, plain); err != nil {
					t.Fatal(err)
				}
				output = plain
			}
			o.Run, o.SHA256 = store(t, run)
			release, err := driverpack.BuildModules(t.Context(), o)
			if err != nil || release != kernel {
				t.Fatalf("release %q: %v: %s", release, err, &log)
			}
			if want := "SYSSRC=" + tt.source + " SYSOUT=" + output + "\n"; !strings.Contains(log.String(), want) {
				t.Errorf("make printed %s, want %s", &log, want)
			}
			_, result, err := pack(t, run, driverpack.Modules{Folder: o.Folder, Release: release})
			if err != nil || result.Manifest.Kernels[0].Open == tt.proprietary || len(result.Manifest.ModuleFiles(kernel)) != 2 {
				t.Errorf("packed: %+v, %v", result.Manifest.Kernels, err)
			}
		})
	}
}

func TestBuildsThatFail(t *testing.T) {
	t.Parallel()
	tree := kernelTree(t, "")
	other := map[string]string{"amd64": "aarch64", "arm64": "x86_64"}[runtime.GOARCH]
	foreign := here()
	foreign.machine = other
	ended, cancel := context.WithCancel(context.Background()) // after the subtests
	t.Cleanup(cancel)
	good := withSources(builtMakefile)
	for name, tt := range map[string]struct {
		maker runMaker
		files driver
		tree  string
		ctx   context.Context
		log   func(p []byte) // is called with the output of make
		want  string
	}{
		"no kernel":              {here(), good, t.TempDir(), t.Context(), nil, "is not the folder of a built kernel or of its headers"},
		"another architecture":   {foreign, good, tree, t.Context(), nil, "build the modules on a machine of"},
		"no sources":             {here(), good.with("kernel-open/Makefile", ""), tree, t.Context(), nil, "the .run file has no kernel-open/Makefile"},
		"make fails":             {here(), withSources("modules:\n\tfalse\n"), tree, t.Context(), nil, "make failed for the kernel of"},
		"nothing is built":       {here(), withSources("modules:\n"), tree, t.Context(), nil, "make has built no module of the driver"},
		"another version":        {here(), withSources(strings.Replace(builtMakefile, version, "570.1.1", 1)), tree, t.Context(), nil, "make has built nvidia-uvm.ko of driver 570.1.1 for kernel " + kernel},
		"another kernel":         {here(), withSources(strings.Replace(builtMakefile, "UTS_RELEASE", `"6.9.9"`, 1)), tree, t.Context(), nil, "for kernel 6.9.9, and not of driver"},
		"ended while make works": {here(), withSources("modules:\n\t@echo started; sleep 600\n"), tree, ended, func([]byte) { cancel() }, context.Canceled.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			top := t.TempDir()
			o := driverpack.BuildOptions{KernelSource: tt.tree, Folder: filepath.Join(top, "modules"), Log: logFunc(tt.log)}
			o.Run, o.SHA256 = store(t, tt.maker.of(t, tt.files.tarOf(t)))
			if _, err := driverpack.BuildModules(tt.ctx, o); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %s", err, tt.want)
			}
			nothingAt(t, driverpack.Options{Folder: o.Folder})
		})
	}
}

type logFunc func(p []byte)

func (l logFunc) Write(p []byte) (int, error) {
	if l != nil {
		l(p)
	}
	return len(p), nil
}
