package driverpack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// BuildOptions are the parameters of BuildModules.
type BuildOptions struct {
	Run    string // path of the .run file
	SHA256 string // digest of the .run file, in lower-case hexadecimal
	// KernelSource is the folder with the headers and the configuration of the kernel: the build folder
	// of /lib/modules/RELEASE, or the folder of a package with headers.
	KernelSource string
	Proprietary  bool // build the proprietary modules; false for the open ones
	// Folder is the path of the new folder for the modules. Nothing may be there.
	Folder string
	Log    io.Writer // gets the output of make
}

// BuildModules compiles the kernel modules of a .run file for one kernel, with the make and compiler
// of this machine, and returns the release of the kernel. The modules are not signed. Unlike Pack,
// BuildModules executes the makefiles and scripts of the .run file.
func BuildModules(ctx context.Context, o BuildOptions) (release string, err error) {
	if release, err = kernelRelease(o.KernelSource); err != nil {
		return "", err
	}
	for _, program := range []string{"make", "strip"} {
		if _, err := exec.LookPath(program); err != nil {
			return "", fmt.Errorf("the program %s is not installed, which building needs", program)
		}
	}
	run, err := openRun(ctx, o.Run, o.SHA256)
	if err != nil {
		return "", err
	}
	defer func() { _ = run.file.Close() }() // only read
	if run.architecture != runtime.GOARCH {
		return "", fmt.Errorf("the driver is for %s and this machine is %s: build the modules on a machine of %s",
			run.architecture, runtime.GOARCH, run.architecture)
	}
	work, err := stage(filepath.Clean(o.Folder))
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, work.close()) }()
	root, err := os.OpenRoot(work.path)
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }() // a folder
	if err := run.extract(ctx, root); err != nil {
		return "", err
	}
	sources := "kernel-open"
	if o.Proprietary {
		sources = "kernel"
	}
	if _, err := root.Stat(sources + "/Makefile"); err != nil {
		return "", fmt.Errorf("the .run file has no %s/Makefile: it does not have these modules", sources)
	}
	// make gets a path without links: makefiles of the kernel compare paths.
	built, err := filepath.EvalSymlinks(filepath.Join(work.path, sources))
	if err == nil {
		built, err = filepath.Abs(built)
	}
	if err != nil {
		return "", err
	}
	if err := runMake(ctx, built, o); err != nil {
		return "", err
	}
	if err := collect(ctx, root, sources, run.version, release); err != nil {
		return "", err
	}
	return release, work.publish("modules", filepath.Clean(o.Folder))
}

// killDelay is how long make may take to end.
const killDelay = 10 * time.Second

// runMake builds the modules in a folder with sources.
func runMake(ctx context.Context, folder string, o BuildOptions) error {
	source, output, err := kernelTrees(o.KernelSource)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "make", "-C", folder, fmt.Sprintf("-j%d", runtime.NumCPU()),
		"SYSSRC="+source, "SYSOUT="+output, "modules")
	// With the flags of a make that called this program, output may wait for the end of a recipe, or jobs
	// for a jobserver that has no file descriptor here.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == "MAKEFLAGS" || name == "MFLAGS" || name == "MAKELEVEL"
	})
	cmd.Stdout, cmd.Stderr = o.Log, o.Log
	// A signal to make alone would leave the compilers running.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killDelay
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("make failed for the kernel of %s: %w; its output above has the reason", o.KernelSource,
			cmp.Or(ctx.Err(), err))
	}
	return nil
}

// collect moves the new modules to the folder modules, without debugging symbols.
func collect(ctx context.Context, root *os.Root, sources, version, release string) error {
	if err := root.Mkdir("modules", 0o755); err != nil {
		return err
	}
	built, err := root.OpenRoot(sources)
	if err != nil {
		return err
	}
	defer func() { _ = built.Close() }() // a folder
	number := 0
	for _, m := range driverfacts.ModulesIn(built.FS()) {
		name := path.Base(m.Path)
		if path.Dir(m.Path) != "/" {
			continue
		}
		if found, _, _ := strings.Cut(m.Vermagic, " "); found != release || m.Version != "" && m.Version != version {
			return fmt.Errorf("make has built %s of driver %s for kernel %s, and not of driver %s for kernel %s",
				name, m.Version, found, version, release)
		}
		strip := exec.CommandContext(ctx, "strip", "--strip-debug", name)
		strip.Dir = built.Name()
		if out, err := strip.CombinedOutput(); err != nil {
			return fmt.Errorf("strip %s: %w: %.200s", name, err, out)
		}
		f, err := built.Open(name)
		if err != nil {
			return err
		}
		err = errors.Join(f.Chmod(0o644), f.Sync(), f.Close(), root.Rename(sources+"/"+name, "modules/"+name))
		if err != nil {
			return err
		}
		number++
	}
	if number == 0 {
		return errors.New("make has built no module of the driver")
	}
	return nil
}

var (
	utsRelease = regexp.MustCompile(`(?m)^#define UTS_RELEASE "([^"]*)"`)
	included   = regexp.MustCompile(`(?m)^include (/\S+)/Makefile$`)
)

// kernelRelease returns the release for which modules are built with a folder of a kernel.
func kernelRelease(folder string) (string, error) {
	text, err := os.ReadFile(filepath.Join(folder, "include/generated/utsrelease.h"))
	if err != nil {
		return "", fmt.Errorf("%s is not the folder of a built kernel or of its headers: %w", folder, err)
	}
	found := utsRelease.FindSubmatch(text)
	if len(found) < 2 || !driverfolder.IsRelease(string(found[1])) {
		return "", fmt.Errorf("%s/include/generated/utsrelease.h does not tell the release of the kernel", folder)
	}
	return string(found[1]), nil
}

// kernelTrees returns the folder with the sources of a kernel and the folder with its configuration.
// The folders differ for a kernel that was built outside of its sources, such as Debian's. Then the
// second folder has a link named source, or a makefile that includes the makefile of the first.
func kernelTrees(folder string) (source, output string, err error) {
	if output, err = filepath.Abs(folder); err != nil {
		return "", "", err
	}
	if target, err := filepath.EvalSymlinks(filepath.Join(output, "source")); err == nil {
		return target, output, nil
	}
	text, err := os.ReadFile(filepath.Join(output, "Makefile"))
	if err != nil {
		return "", "", fmt.Errorf("%s is not the folder of a kernel: %w", folder, err)
	}
	if found := included.FindSubmatch(text); found != nil {
		return string(found[1]), output, nil
	}
	return output, output, nil
}
