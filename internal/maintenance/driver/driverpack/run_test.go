package driverpack_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const version = "580.95.05"

// driver is the content of a small driver: the files of its archive by their names.
type driver map[string]string

// lines of a .manifest after the first eight; the shapes are those of real ones.
const manifestLines = `kernel/nvidia/nv.c 0644 KERNEL_MODULE_SRC INHERIT_PATH_DEPTH:1 MODULE:resman
kernel-open/dkms.conf 0644 DKMS_CONF INHERIT_PATH_DEPTH:1 MODULE:resman
libcuda.so.580.95.05 0755 CUDA_LIB NATIVE / MODULE:gpgpu
libcuda.so.1 0000 CUDA_SYMLINK NATIVE / libcuda.so.580.95.05 MODULE:gpgpu
libcuda.so 0000 CUDA_SYMLINK NATIVE / libcuda.so.1 MODULE:gpgpu
./32/libcuda.so.580.95.05 0755 CUDA_LIB COMPAT32 / MODULE:gpgpu
libcuda.so.1 0000 CUDA_SYMLINK COMPAT32 / libcuda.so.580.95.05 MODULE:gpgpu
libnvidia-ml.so.580.95.05 0755 CUDA_LIB NATIVE / MODULE:nvml
libnvidia-ml.so.1 0000 CUDA_SYMLINK NATIVE / libnvidia-ml.so.580.95.05 MODULE:nvml
libvdpau_nvidia.so.580.95.05 0755 VDPAU_LIB NATIVE vdpau/ MODULE:vdpau
libvdpau_nvidia.so 0000 VDPAU_SYMLINK NATIVE / vdpau/libvdpau_nvidia.so.580.95.05 MODULE:vdpau
libnvidia-allocator.so.580.95.05 0755 UTILITY_LIB NATIVE MODULE:nvalloc
libnvidia-allocator.so.1 0000 UTILITY_LIB_SYMLINK NATIVE libnvidia-allocator.so.580.95.05 MODULE:nvalloc
nvidia-drm_gbm.so 0000 GBM_BACKEND_LIB_SYMLINK NATIVE libnvidia-allocator.so.1 MODULE:nvalloc
_nvngx.dll 0644 WINE_LIB NATIVE MODULE:ngx
libglxserver_nvidia.so.580.95.05 0755 GLX_MODULE_SHARED_LIB extensions MODULE:opengl
libglxserver_nvidia.so 0000 GLX_MODULE_SYMLINK extensions/ libglxserver_nvidia.so.580.95.05 MODULE:opengl
nvidia_icd.json 0644 VULKAN_ICD_JSON icd.d/ MODULE:opengl
10_nvidia.json 0644 GLVND_EGL_ICD_JSON MODULE:opengl
15_nvidia_gbm.json 0644 EGL_EXTERNAL_PLATFORM_JSON MODULE:egl
nvidia.icd 0444 CUDA_ICD MODULE:gpgpu
nvidia-smi 0755 UTILITY_BINARY MODULE:nvml
nvidia-installer 0755 INSTALLER_BINARY MODULE:installer
nvidia-uninstall 0000 UTILITY_BIN_SYMLINK nvidia-installer MODULE:installer
nvidia-modprobe 04755 NVIDIA_MODPROBE /usr/bin/ MODULE:installer
firmware/gsp_ga10x.bin 0644 FIRMWARE INHERIT_PATH_DEPTH:1 MODULE:gsp
LICENSE 0444 DOCUMENTATION NVIDIA_GLX-1.0/ MODULE:installer
README.txt 0444 DOCUMENTATION NVIDIA_GLX-1.0/ MODULE:installer
nvidia-smi.1.gz 0444 MANPAGE man1/ MODULE:nvml
systemd/system/nvidia-suspend.service 0644 SYSTEMD_UNIT MODULE:power
`

// placed are the files of newDriver in a driver folder, and the targets of links.
const placed = `etc/OpenCL/vendors/nvidia.icd 0444
etc/vulkan/icd.d/nvidia_icd.json 0644
lib/firmware/nvidia/580.95.05/gsp_ga10x.bin 0644
usr/bin/nvidia-modprobe 0755
usr/bin/nvidia-smi 0755
LIB/gbm/nvidia-drm_gbm.so -> ../libnvidia-allocator.so.1
LIB/libcuda.so -> libcuda.so.1
LIB/libcuda.so.1 -> libcuda.so.580.95.05
LIB/libcuda.so.580.95.05 0755
LIB/libnvidia-allocator.so.1 -> libnvidia-allocator.so.580.95.05
LIB/libnvidia-allocator.so.580.95.05 0755
LIB/libnvidia-ml.so.1 -> libnvidia-ml.so.580.95.05
LIB/libnvidia-ml.so.580.95.05 0755
LIB/libvdpau_nvidia.so -> vdpau/libvdpau_nvidia.so.580.95.05
LIB/nvidia/wine/_nvngx.dll 0644
LIB/vdpau/libvdpau_nvidia.so.580.95.05 0755
usr/lib/xorg/modules/extensions/libglxserver_nvidia.so -> libglxserver_nvidia.so.580.95.05
usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.580.95.05 0755
usr/share/doc/NVIDIA_GLX-1.0/LICENSE 0444
usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json 0644
usr/share/glvnd/egl_vendor.d/10_nvidia.json 0644
`

// newDriver returns the files of a driver for an ELF machine.
func newDriver(machine uint16) driver {
	d := driver{".manifest": manifestOf(version, manifestLines)}
	for line := range strings.Lines(manifestLines) {
		fields := strings.Fields(line)
		if fields[1] == "0000" {
			continue
		}
		text := "content of " + fields[0]
		if strings.Contains(fields[0], ".so.") {
			text = elfHeader(machine) + text
		}
		d[strings.TrimPrefix(fields[0], "./")] = text
	}
	return d
}

func manifestOf(version, lines string) string {
	return "NVIDIA Accelerated Graphics Driver for Linux-x86_64\n" + version +
		"\n \nnvidia nvidia-uvm \n \n \n./kernel/\n./kernel/precompiled/\n" + lines
}

// with returns the driver with one other file; without the file if the text is empty.
func (d driver) with(name, text string) driver {
	changed := driver{}
	for k, v := range d {
		changed[k] = v
	}
	if changed[name] = text; text == "" {
		delete(changed, name)
	}
	return changed
}

const amd64, arm64 = 62, 183 // ELF machines

func elfHeader(machine uint16) string {
	header := make([]byte, 64)
	copy(header, "\x7fELF\x02\x01\x01")
	binary.LittleEndian.PutUint16(header[18:], machine)
	return string(header)
}

// tarOf returns an archive with the files of the driver, and with further entries before them.
func (d driver) tarOf(t *testing.T, before ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, head := range before {
		if err := w.WriteHeader(&head); err != nil {
			t.Fatal(err)
		}
	}
	names := make([]string, 0, len(d))
	for name := range d {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		head := &tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: 0o600, Size: int64(len(d[name]))}
		if err := w.WriteHeader(head); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(d[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A runMaker makes .run files like NVIDIA's makeself.sh 1.6.0-nv4.
type runMaker struct {
	label, version, system, machine string
	compress                        string // gzip, or a program
}

func nvidia() runMaker {
	return runMaker{"NVIDIA Accelerated Graphics Driver for Linux-x86_64 " + version, version, "Linux", "x86_64", "gzip"}
}

// of returns the content of a .run file with an archive.
func (m runMaker) of(t *testing.T, archive []byte) []byte {
	t.Helper()
	packed := compressed(t, archive, m.compress)
	script := "#! /bin/sh\nCRCsum=1\nMD5=0\nskip=%d\nlabel=\"" + m.label + "\"\nversion_string=" + m.version +
		"\nscript=./nvidia-installer\nTARGET_OS=\"" + m.system + "\"\nTARGET_ARCH=\"" + m.machine +
		"\"\nskip=2\nexit 1\n"
	const decompressor = "\x00a program\nof two lines\n"
	script += decompressor
	script = fmt.Sprintf(script, strings.Count(script, "\n")+1)
	return slices.Concat([]byte(script), packed)
}

// compressed compresses content with a program, or as gzip does.
func compressed(t *testing.T, content []byte, with string) []byte {
	t.Helper()
	var packed bytes.Buffer
	if with == "gzip" {
		w := gzip.NewWriter(&packed)
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	} else {
		program, err := exec.LookPath(with)
		if err != nil {
			t.Skipf("this machine has no %s", with)
		}
		cmd := exec.CommandContext(t.Context(), program, "-c")
		cmd.Stdin, cmd.Stdout = bytes.NewReader(content), &packed
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
	}
	return packed.Bytes()
}

// store writes a .run file and returns its path and its digest.
func store(t *testing.T, content []byte) (name, digest string) {
	t.Helper()
	name = filepath.Join(t.TempDir(), "driver.run")
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	return name, hex.EncodeToString(sum[:])
}

// A module is a kernel module to be made: a small ELF file with .modinfo.
type module struct {
	version, release, license string
	machine                   uint16
	signed                    bool
}

func (m module) String() string {
	info := "license=" + m.license + "\x00version=" + m.version + "\x00vermagic=" + m.release + " SMP mod_unload \x00"
	const names, header = "\x00.modinfo\x00.shstrtab\x00", 64
	at := header + len(info) + len(names)
	file := make([]byte, at+3*header)
	little := binary.LittleEndian
	copy(file, elfHeader(m.machine))
	little.PutUint64(file[40:], uint64(at)) // section headers
	little.PutUint16(file[58:], header)
	little.PutUint16(file[60:], 3)
	little.PutUint16(file[62:], 2)
	copy(file[header:], info+names)
	section := func(i, name, offset, size int) {
		s := file[at+i*header:]
		little.PutUint32(s, uint32(name))
		little.PutUint64(s[24:], uint64(offset))
		little.PutUint64(s[32:], uint64(size))
	}
	section(1, 1, header, len(info))
	section(2, 10, header+len(info), len(names))
	if m.signed {
		return string(file) + strings.Repeat("\x00", 12) + "~Module signature appended~\n"
	}
	return string(file)
}

// modulesIn writes files into a new folder.
func modulesIn(t *testing.T, files map[string]module) string {
	t.Helper()
	folder := t.TempDir()
	for name, m := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(m.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}
