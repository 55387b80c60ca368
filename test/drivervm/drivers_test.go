package drivervm_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverpack"
)

// A driver is a driver of stand-ins, made as a real one: its modules are built out of a .run file,
// and packed with the files of its user space.
type driver struct {
	version string
	flags   string // of the compiler
	digest  string // of the driver folder
}

// The drivers of the guest. The last one is built for another kernel.
var (
	oldDriver   = driver{version: "535.1.1"}
	newDriver   = driver{version: "580.2.2"}
	thirdDriver = driver{version: "585.6.6"}
	failsDriver = driver{version: "590.3.3", flags: "-DFAILS"}
	panicDriver = driver{version: "591.4.4", flags: "-DPANICS"}
	otherDriver = driver{version: "592.5.5"}
)

// elfHeader is the begin of a library of amd64.
var elfHeader = "\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 11) + "\x3e" + strings.Repeat("\x00", 45)

// runFile writes a .run file as NVIDIA makes it, with the files in kernel-open.
func runFile(t *testing.T, version string, kernelOpen map[string]string) (name, digest string) {
	t.Helper()
	files := map[string]string{
		"libcuda.so." + version: elfHeader + "stand-in", "libnvidia-ml.so." + version: elfHeader + "stand-in",
		"nvidia-smi": "#!/bin/sh\n", "LICENSE": "stand-in\n", "firmware/gsp_ga10x.bin": strings.Repeat("firmware", 20_000),
	}
	for name, text := range kernelOpen {
		files["kernel-open/"+name] = text
	}
	files[".manifest"] = strings.ReplaceAll("NVIDIA Accelerated Graphics Driver for Linux-x86_64\nVERSION\n"+
		" \nnvidia nvidia-uvm \n \n \n./kernel/\n./kernel/precompiled/\n"+
		"libcuda.so.VERSION 0755 CUDA_LIB NATIVE / MODULE:gpgpu\n"+
		"libcuda.so.1 0000 CUDA_SYMLINK NATIVE / libcuda.so.VERSION MODULE:gpgpu\n"+
		"libnvidia-ml.so.VERSION 0755 CUDA_LIB NATIVE / MODULE:nvml\n"+
		"libnvidia-ml.so.1 0000 CUDA_SYMLINK NATIVE / libnvidia-ml.so.VERSION MODULE:nvml\n"+
		"nvidia-smi 0755 UTILITY_BINARY MODULE:nvml\n"+
		"firmware/gsp_ga10x.bin 0644 FIRMWARE INHERIT_PATH_DEPTH:1 MODULE:gsp\n"+
		"LICENSE 0444 DOCUMENTATION NVIDIA_GLX-1.0/ MODULE:installer\n", "VERSION", version)
	var b bytes.Buffer
	script := "#!/bin/sh\nskip=%d\nlabel=\"NVIDIA Accelerated Graphics Driver for Linux-x86_64 " + version + "\"\n" +
		"version_string=" + version + "\nTARGET_OS=\"Linux\"\nTARGET_ARCH=\"x86_64\"\nexit 0\n"
	fmt.Fprintf(&b, script, strings.Count(script, "\n")+1)
	packed := gzip.NewWriter(&b)
	w := tar.NewWriter(packed)
	for name, text := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}
	name = filepath.Join(t.TempDir(), "driver.run")
	if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b.Bytes())
	return name, hex.EncodeToString(sum[:])
}

// filesIn returns the content of the files below a folder, by their paths.
func filesIn(t *testing.T, folder string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(folder, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		below, err := filepath.Rel(folder, name)
		all[below] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// runFile writes a .run file with the sources of the stand-ins.
func (d *driver) runFile(t *testing.T) (name, digest string) {
	t.Helper()
	return runFile(t, d.version, d.sources(t))
}

func (d *driver) sources(t *testing.T) map[string]string {
	t.Helper()
	all := filesIn(t, "stubs")
	all["flags.mk"] = "CFLAGS_STUBS := -DVERSION='\"" + d.version + "\"' " + d.flags + "\n"
	return all
}

// buildModules returns the folder with the modules of a .run file for a kernel. Later runs find it in
// the cache.
func buildModules(t *testing.T, version, release string, kernelOpen map[string]string) string {
	t.Helper()
	hash := sha256.New()
	fmt.Fprintln(hash, release, version)
	for _, name := range slices.Sorted(maps.Keys(kernelOpen)) {
		fmt.Fprintln(hash, name, kernelOpen[name])
	}
	folder := filepath.Join(*partsFlag, "built", hex.EncodeToString(hash.Sum(nil))[:16])
	if _, err := os.Stat(folder); err == nil {
		return folder
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	o := driverpack.BuildOptions{Folder: folder, Log: &log,
		KernelSource: filepath.Join(*partsFlag, "kernels/usr/src/linux-headers-"+release)}
	o.Run, o.SHA256 = runFile(t, version, kernelOpen)
	if _, err := driverpack.BuildModules(t.Context(), o); err != nil {
		text := log.String()
		t.Fatalf("%v\n%s", err, text[max(0, len(text)-4000):])
	}
	return folder
}

// buildUser builds the module gdrdrv of the folder user, which uses a stand-in for nvidia, for a kernel.
func buildUser(t *testing.T, file, release string) {
	t.Helper()
	folder := t.TempDir()
	sources := filesIn(t, "user")
	sources["nvidia.c"] = filesIn(t, "stubs")["nvidia.c"]
	for name, text := range sources {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	headers := filepath.Join(*partsFlag, "kernels/usr/src/linux-headers-"+release)
	mustRun(t, exec.CommandContext(t.Context(), "make", "-C", folder, "SYSOUT="+headers, "modules"))
	mustRun(t, exec.CommandContext(t.Context(), "strip", "--strip-debug", "-o", file, folder+"/gdrdrv.ko"))
}

// pack packs the driver with its modules for a kernel into a folder.
func (d *driver) pack(t *testing.T, folder, release string) {
	t.Helper()
	o := driverpack.Options{Folder: folder, Modules: []driverpack.Modules{{
		Folder: buildModules(t, d.version, release, d.sources(t)), Release: release}}}
	o.Run, o.SHA256 = d.runFile(t)
	result, err := driverpack.Pack(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	d.digest = result.Digest
}
