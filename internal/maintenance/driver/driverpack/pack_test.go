package driverpack_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverpack"
)

const kernel = "6.8.0-90-generic"

// pack packs a .run file into a new folder, an image and an archive.
func pack(t *testing.T, run []byte, modules ...driverpack.Modules) (driverpack.Options, driverpack.Result, error) {
	t.Helper()
	top := t.TempDir()
	o := driverpack.Options{Modules: modules, Folder: filepath.Join(top, "folder"), Image: filepath.Join(top, "image"),
		Archive: filepath.Join(top, "driver.tar.gz")}
	o.Run, o.SHA256 = store(t, run)
	result, err := driverpack.Pack(t.Context(), o)
	return o, result, err
}

// list returns the files of a driver folder without the manifest, one a line.
func list(t *testing.T, folder string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(folder, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Name() == driverfolder.ManifestName {
			return err
		}
		below, err := filepath.Rel(folder, name)
		if err != nil {
			return err
		}
		if target, err := os.Readlink(name); err == nil {
			fmt.Fprintf(&b, "%s -> %s\n", below, target)
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %04o\n", below, info.Mode())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestFilesOfADriver(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		machine       string
		elf           uint16
		lib, compress string
	}{
		"amd64, gzip": {"x86_64", amd64, "usr/lib/x86_64-linux-gnu", "gzip"},
		"amd64, xz":   {"x86_64", amd64, "usr/lib/x86_64-linux-gnu", "xz"},
		"amd64, zstd": {"x86_64", amd64, "usr/lib/x86_64-linux-gnu", "zstd"},
		"amd64, bz2":  {"x86_64", amd64, "usr/lib/x86_64-linux-gnu", "bzip2"},
		"arm64, xz":   {"aarch64", arm64, "usr/lib/aarch64-linux-gnu", "xz"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			maker := nvidia()
			maker.machine, maker.compress = tt.machine, tt.compress
			run := maker.of(t, newDriver(tt.elf).tarOf(t))
			o, result, err := pack(t, run)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.ReplaceAll(placed, "LIB", tt.lib), list(t, o.Folder)); diff != "" {
				t.Errorf("the folder (-want +got):\n%s", diff)
			}
			if got := result.LeftOut(); !strings.Contains(got, "32-bit programs such as Steam: 1.") {
				t.Errorf("left out: %q", got)
			}
			m, digest, err := driverfolder.Verify(t.Context(), o.Folder)
			if err != nil || digest != result.Digest || m.Version != version {
				t.Errorf("verified: driver %s, digest %s, want %s: %v", m.Version, digest, result.Digest, err)
			}
			if got, err := os.ReadFile(filepath.Join(o.Folder, tt.lib, "libcuda.so.1")); err != nil ||
				string(got) != newDriver(tt.elf)["libcuda.so."+version] {
				t.Errorf("libcuda.so.1: %q, %v", got, err)
			}
		})
	}
}

// What reads driver roots finds the files of a driver folder.
func TestADriverFolderIsADriverRoot(t *testing.T) {
	t.Parallel()
	o, _, err := pack(t, here().of(t, withSources("").tarOf(t)))
	if err != nil {
		t.Fatal(err)
	}
	found, err := driverroot.Find(os.DirFS(o.Folder), version)
	if err != nil {
		t.Fatal(err)
	}
	all := slices.Clone(found.Programs)
	for _, f := range found.Others {
		all = append(all, f.Path)
	}
	slices.Sort(all)
	want := []string{
		"etc/OpenCL/vendors/nvidia.icd", "etc/vulkan/icd.d/nvidia_icd.json", "lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
		"usr/bin/nvidia-smi", "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
		"usr/share/glvnd/egl_vendor.d/10_nvidia.json",
	}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("programs and other files (-want +got):\n%s", diff)
	}
}

// The same input gives the same folder and the same image, whatever the umask and the file times.
func TestTheSameInputGivesTheSameDigests(t *testing.T) {
	t.Parallel()
	run := nvidia().of(t, newDriver(amd64).tarOf(t))
	folder := modulesIn(t, goodModules())
	_, first, err := pack(t, run, driverpack.Modules{Folder: folder, Release: kernel})
	if err != nil {
		t.Fatal(err)
	}
	o, second, err := pack(t, run, driverpack.Modules{Folder: folder, Release: kernel})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("a second time (-first +second):\n%s", diff)
	}
	if diff := cmp.Diff(list(t, o.Folder), layerOf(t, o.Image, second)); diff != "" {
		t.Errorf("the image (-folder +image):\n%s", diff)
	}
	content, err := os.ReadFile(o.Archive)
	if sum := sha256.Sum256(content); err != nil || hex.EncodeToString(sum[:]) != second.Archive {
		t.Errorf("the archive has the digest %x, and not %s: %v", sum, second.Archive, err)
	}
	layer, err := os.ReadFile(filepath.Join(o.Image, "blobs", "sha256", second.Archive))
	if err != nil || !bytes.Equal(content, layer) {
		t.Errorf("the archive is not the layer of the image: %v", err)
	}
}

// layerOf checks every digest of an image layout, and returns the files of its layer like list.
func layerOf(t *testing.T, image string, result driverpack.Result) string {
	t.Helper()
	type descriptor struct {
		MediaType, Digest string
		Size              int64
		Annotations       map[string]string
		Platform          struct{ Architecture, OS string }
	}
	blob := func(d descriptor) []byte {
		name, _ := strings.CutPrefix(d.Digest, "sha256:")
		content, err := os.ReadFile(filepath.Join(image, "blobs", "sha256", name))
		if sum := sha256.Sum256(content); err != nil || hex.EncodeToString(sum[:]) != name || int64(len(content)) != d.Size {
			t.Fatalf("blob %s has %d bytes, want %d: %v", d.Digest, len(content), d.Size, err)
		}
		return content
	}
	decode := func(content []byte, to any) {
		if err := json.Unmarshal(content, to); err != nil {
			t.Fatal(err)
		}
	}
	var index, manifest struct {
		Manifests, Layers []descriptor
		Config            descriptor
	}
	text, err := os.ReadFile(filepath.Join(image, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	decode(text, &index)
	one := index.Manifests[0]
	if one.Digest != result.Image || one.Annotations["org.opencontainers.image.ref.name"] != result.Manifest.Version ||
		one.Platform.Architecture != result.Manifest.Architecture || one.Platform.OS != "linux" {
		t.Errorf("index.json names %+v, want %s", one, result.Image)
	}
	decode(blob(one), &manifest)
	var config struct {
		Architecture string
		RootFS       struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	decode(blob(manifest.Config), &config)
	unpacked, err := gzip.NewReader(bytes.NewReader(blob(manifest.Layers[0])))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(unpacked)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(layer); config.RootFS.DiffIDs[0] != "sha256:"+hex.EncodeToString(sum[:]) ||
		config.Architecture != result.Manifest.Architecture {
		t.Errorf("the configuration %+v is not of the layer", config)
	}
	var b strings.Builder
	archive := tar.NewReader(bytes.NewReader(layer))
	folders := map[string]bool{"./": true}
	for {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return b.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		if dir, _ := filepath.Split(strings.TrimSuffix(head.Name, "/")); !folders[dir] && dir != "" {
			t.Errorf("%s comes before its folder", head.Name)
		}
		if head.Uid != 0 || head.Gid != 0 || !head.ModTime.IsZero() && head.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d:%d, time %v", head.Name, head.Uid, head.Gid, head.ModTime)
		}
		switch head.Typeflag {
		case tar.TypeDir:
			folders[head.Name] = true
		case tar.TypeSymlink:
			fmt.Fprintf(&b, "%s -> %s\n", head.Name, head.Linkname)
		case tar.TypeReg:
			if head.Name != driverfolder.ManifestName {
				fmt.Fprintf(&b, "%s %04o\n", head.Name, head.Mode)
			}
		default:
			t.Errorf("%s has the type %q", head.Name, head.Typeflag)
		}
	}
}

func goodModules() map[string]module {
	m := module{version, kernel, "Dual MIT/GPL", amd64, false}
	return map[string]module{"nvidia.ko": m, "nvidia-uvm.ko": m, "nvidia-modeset.ko": m}
}

func TestModules(t *testing.T) {
	t.Parallel()
	change := func(name string, to func(*module)) map[string]module {
		files := goodModules()
		m := files[name]
		to(&m)
		files[name] = m
		return files
	}
	for name, tt := range map[string]struct {
		files   map[string]module
		folder  string // instead of files
		release string
		want    string // end of the error; empty for the kernel of the manifest below
		kernel  driverfolder.Kernel
	}{
		"open": {files: goodModules(), kernel: driverfolder.Kernel{Open: true}},
		"proprietary, whose nvidia-uvm is open": {files: change("nvidia.ko", func(m *module) { m.license = "NVIDIA" }),
			kernel: driverfolder.Kernel{}},
		"signed": {files: map[string]module{
			"nvidia.ko":     {version, kernel, "Dual MIT/GPL", amd64, true},
			"nvidia-uvm.ko": {version, kernel, "Dual MIT/GPL", amd64, true},
		}, kernel: driverfolder.Kernel{Open: true, Signed: true}},
		"a part is not signed": {files: change("nvidia.ko", func(m *module) { m.signed = true }),
			want: "/nvidia.ko is signed and /nvidia-modeset.ko is not, or the other way round"},
		"another kernel": {files: goodModules(), release: "6.1.0-28-amd64", want: "/nvidia-modeset.ko was built for kernel " + kernel},
		"another driver": {files: change("nvidia-uvm.ko", func(m *module) { m.version = "570.1.1" }),
			want: "/nvidia-uvm.ko is of driver 570.1.1, and the .run file of " + version},
		"another architecture": {files: change("nvidia.ko", func(m *module) { m.machine = arm64 }),
			want: "nvidia.ko is for EM_AARCH64, and the driver for EM_X86_64"},
		"nothing":      {want: "there is no nvidia"},
		"no folder":    {folder: "/none", want: "modules in /none for kernel " + kernel + ": the folder cannot be read: stat /none: no such"},
		"a file":       {folder: "/proc/version", want: "the folder cannot be read: not a directory"},
		"no core":      {files: map[string]module{"nvidia-uvm.ko": goodModules()["nvidia-uvm.ko"]}, want: "there is no nvidia.ko, without which CUDA does not work"},
		"no uvm":       {files: map[string]module{"nvidia.ko": goodModules()["nvidia.ko"]}, want: "there is no nvidia-uvm.ko, without which CUDA does not work"},
		"no release":   {files: goodModules(), release: "../../etc", want: `"../../etc" is not the release of a kernel`},
		"two releases": {files: map[string]module{"nvidia.ko": goodModules()["nvidia.ko"], "nvidia-current.ko": goodModules()["nvidia.ko"]}, want: "core is there a second time"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.release == "" {
				tt.release = kernel
			}
			if tt.folder == "" {
				tt.folder = modulesIn(t, tt.files)
			}
			set := driverpack.Modules{Folder: tt.folder, Release: tt.release}
			o, result, err := pack(t, nvidia().of(t, newDriver(amd64).tarOf(t)), set)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error %v, want %s", err, tt.want)
				}
				nothingAt(t, o)
				return
			}
			tt.kernel.Release, tt.kernel.Vermagic = kernel, kernel+" SMP mod_unload "
			if diff := cmp.Diff([]driverfolder.Kernel{tt.kernel}, result.Manifest.Kernels); diff != "" || err != nil {
				t.Fatalf("kernels (-want +got):\n%s%v", diff, err)
			}
			if got := len(result.Manifest.ModuleFiles(kernel)); got != len(tt.files) {
				t.Errorf("%d module files, want %d", got, len(tt.files))
			}
			if _, _, err := driverfolder.Verify(t.Context(), o.Folder); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestCompressedModules: modules are packed as they were before their compression, signature and all.
func TestCompressedModules(t *testing.T) {
	t.Parallel()
	driver := nvidia().of(t, newDriver(amd64).tarOf(t))
	files := goodModules()
	for name, m := range files {
		m.signed = true
		files[name] = m
	}
	packed := func(t *testing.T, folder string) (driverpack.Options, driverpack.Result, error) {
		t.Helper()
		return pack(t, driver, driverpack.Modules{Folder: folder, Release: kernel})
	}
	_, plain, err := packed(t, modulesIn(t, files))
	if err != nil {
		t.Fatal(err)
	}
	for end, program := range map[string]string{".gz": "gzip", ".xz": "xz", ".zst": "zstd"} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			folder := modulesIn(t, files)
			compress := func(name string) {
				t.Helper()
				name = filepath.Join(folder, name)
				content, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				err = errors.Join(os.WriteFile(name+end, compressed(t, content, program), 0o600), os.Remove(name))
				if err != nil {
					t.Fatal(err)
				}
			}
			compress("nvidia.ko")
			compress("nvidia-uvm.ko")
			_, result, err := packed(t, folder)
			if err != nil || result.Digest != plain.Digest {
				t.Fatalf("digest %s and %v, want %s", result.Digest, err, plain.Digest)
			}

			fails := func(want string) {
				t.Helper()
				o, _, err := packed(t, folder)
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %s", err, want)
				}
				nothingAt(t, o)
			}
			whole, err := os.ReadFile(filepath.Join(folder, "nvidia.ko"+end))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "nvidia.ko"+end), whole[:len(whole)-8], 0o600); err != nil {
				t.Fatal(err)
			}
			fails("/nvidia.ko" + end)
			if err := os.WriteFile(filepath.Join(folder, "nvidia.ko"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			fails("/nvidia.ko" + end + " is there twice, with another compression")
		})
	}
}

// TestModulesWithoutProgram: the error names the program and the command.
func TestModulesWithoutProgram(t *testing.T) {
	driver := nvidia().of(t, newDriver(amd64).tarOf(t))
	t.Setenv("PATH", t.TempDir())
	for name, want := range map[string]string{
		"nvidia.ko.xz":  "/nvidia.ko.xz needs the program xz, which is not installed; unpack the module yourself with xz -d",
		"nvidia.ko.zst": "/nvidia.ko.zst needs the program zstd, which is not installed; unpack the module yourself with zstd -d",
	} {
		folder := modulesIn(t, map[string]module{name: {}})
		if _, _, err := pack(t, driver, driverpack.Modules{Folder: folder, Release: kernel}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

// nothingAt checks that there is no folder, no image, and nothing beside them.
func nothingAt(t *testing.T, o driverpack.Options) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(o.Folder))
	if err != nil || len(entries) > 0 {
		t.Errorf("beside the folder: %v, %v", entries, err)
	}
}

func TestFilesThatAreNoDriver(t *testing.T) {
	t.Parallel()
	good := newDriver(amd64)
	manifest := good[".manifest"]
	tarred := func(d driver, before ...tar.Header) []byte { return nvidia().of(t, d.tarOf(t, before...)) }
	maker := func(change func(*runMaker)) []byte {
		m := nvidia()
		change(&m)
		return m.of(t, good.tarOf(t))
	}
	whole := nvidia().of(t, good.tarOf(t))
	script, _, _ := bytes.Cut(whole, []byte("\x1f\x8b"))
	line := func(text string) []byte { return tarred(good.with(".manifest", manifest+text+"\n")) }
	for name, tt := range map[string]struct {
		run  []byte
		want string
	}{
		"nothing":              {nil, "is not a .run file of NVIDIA: it does not begin with a shell script"},
		"an ELF file":          {[]byte(elfHeader(amd64)), "is not a .run file of NVIDIA: it does not begin with a shell script"},
		"a script":             {[]byte("#!/bin/sh\necho label\n"), "its script has no label that begins with NVIDIA"},
		"of somebody else":     {maker(func(m *runMaker) { m.label = "VirtualBox" }), "its script has no label that begins with NVIDIA"},
		"for another system":   {maker(func(m *runMaker) { m.system = "FreeBSD" }), `it is for the system "FreeBSD", and not for Linux`},
		"for another machine":  {maker(func(m *runMaker) { m.machine = "ppc64le" }), `it is for "ppc64le", and not for x86_64 or aarch64`},
		"without a version":    {maker(func(m *runMaker) { m.version = "../x" }), `its script has no version_string of a driver, but "../x"`},
		"of another version":   {maker(func(m *runMaker) { m.version = "570.1.1" }), `.manifest is of the driver "580.95.05", and the .run file of 570.1.1`},
		"of a lying machine":   {maker(func(m *runMaker) { m.machine = "aarch64" }), "is for EM_X86_64, and the driver for EM_AARCH64"},
		"skip beyond the end":  {[]byte(strings.Replace(string(whole), "skip=", "skip=9", 1)), "the file has fewer lines"},
		"without an archive":   {script, "the .run file is truncated: it has no archive"},
		"with a truncated one": {whole[:len(whole)-200], "the archive of the .run file is damaged: unexpected EOF"},
		"with text instead":    {slices.Concat(script, []byte("some text")), "has an unknown compression"},
		"with .. in a name":    {tarred(good, tar.Header{Typeflag: tar.TypeReg, Name: "a/../../x"}), `has a name that leads out of its folder: "a/../../x"`},
		"with an absolute one": {tarred(good, tar.Header{Typeflag: tar.TypeReg, Name: "/etc/passwd"}), `has a name that leads out of its folder: "/etc/passwd"`},
		"with a hard link out": {tarred(good, tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "/etc/passwd"}), "leads out of its folder"},
		"with a device":        {tarred(good, tar.Header{Typeflag: tar.TypeChar, Name: "x"}), "has an entry of the unknown type"},
		"with a file twice":    {tarred(good, tar.Header{Typeflag: tar.TypeReg, Name: "LICENSE"}), "file exists"},
		"without .manifest":    {tarred(good.with(".manifest", "")), "has no .manifest: it is not a driver of NVIDIA"},
		"without libcuda":      {tarred(good.with("libcuda.so."+version, "")), "has the file libcuda.so.580.95.05, which the archive"},
		"whose libcuda is text": {tarred(good.with("libcuda.so."+version, "text")),
			"libcuda.so.580.95.05 is not a 64-bit ELF file"},
		"that has no libcuda": {tarred(good.with(".manifest", strings.ReplaceAll(manifest, " CUDA_", " MANPAGE_"))), `the type "MANPAGE_LIB"`},
		"a new type": {line("x 0644 HOLOGRAM_LIB NATIVE MODULE:x"),
			`"x" has the type "HOLOGRAM_LIB", and the place of this type is unknown: a newer version of this program may know it`},
		"a third architecture":    {line("x 0644 CUDA_LIB SPARC / MODULE:x"), `x is neither NATIVE nor COMPAT32, but "SPARC"`},
		"a mode that is none":     {line("x rwx CUDA_LIB NATIVE / MODULE:x"), `the mode of "x" is not an octal number: "rwx"`},
		"a file with ..":          {line("../x 0644 UTILITY_BINARY MODULE:x"), "leads out of its folder"},
		"a path with ..":          {line("LICENSE 0644 CUDA_LIB NATIVE ../../../../root/ MODULE:x"), "where no file of a driver belongs"},
		"a path out of the place": {line("LICENSE 0644 EXPLICIT_PATH /root/.ssh/ MODULE:x"), "LICENSE should be placed at \"root/.ssh/LICENSE\", where no"},
		"a path over modules":     {line("LICENSE 0644 EXPLICIT_PATH /lib/modules/ MODULE:x"), "where no file of a driver belongs"},
		"a link out": {line("libx.so 0000 UTILITY_LIB_SYMLINK NATIVE ../../../../etc/passwd MODULE:x"),
			"the link usr/lib/x86_64-linux-gnu/libx.so of .manifest leads to ../../../../etc/passwd"},
		"a link of the host": {line("libx.so 0000 UTILITY_LIB_SYMLINK NATIVE /etc/passwd MODULE:x"), "the link libx.so has no target in the folder"},
		"a link to nothing":  {line("libx.so 0000 UTILITY_LIB_SYMLINK NATIVE liby.so MODULE:x"), "leads to liby.so, which the folder does not have"},
		"a link where a folder should be": {line("xorg 0000 UTILITY_LIB_SYMLINK NATIVE libcuda.so MODULE:x\n" +
			"LICENSE 0644 CUDA_LIB NATIVE xorg/ MODULE:x"), "usr/lib/x86_64-linux-gnu/xorg/LICENSE: "},
		"two files for a place": {line("README.txt 0644 UTILITY_BINARY MODULE:x\nkernel/README.txt 0644 UTILITY_BINARY MODULE:x"),
			".manifest has two files for usr/bin/README.txt"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, _, err := pack(t, tt.run)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v\nwant %s", err, tt.want)
			}
			nothingAt(t, o)
		})
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	name, digest := store(t, nvidia().of(t, newDriver(amd64).tarOf(t)))
	top := t.TempDir()
	there := filepath.Join(top, "there")
	if err := os.Mkdir(there, 0o700); err != nil {
		t.Fatal(err)
	}
	for want, o := range map[string]driverpack.Options{
		"download the file again, or correct --sha256": {Run: name, SHA256: strings.Repeat("0", 64), Folder: filepath.Join(top, "x")},
		`"12" is not a SHA-256 digest`:                 {Run: name, SHA256: "12", Folder: filepath.Join(top, "x")},
		"there exists already: remove it":              {Run: name, SHA256: digest, Folder: there},
		"image exists already":                         {Run: name, SHA256: digest, Folder: filepath.Join(top, "x"), Image: filepath.Join(top, "image")},
		"is not a regular file":                        {Run: top, SHA256: digest, Folder: filepath.Join(top, "x")},
		"no such file or directory":                    {Run: name, SHA256: digest, Folder: filepath.Join(top, "no/such/x")},
	} {
		if o.Image != "" {
			if err := os.Mkdir(o.Image, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := driverpack.Pack(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
		if _, err := os.Lstat(filepath.Join(top, "x")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the folder exists: %v", want, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := driverpack.Pack(ended, driverpack.Options{Run: name, SHA256: digest, Folder: filepath.Join(top, "x")}); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

// TestRealRunFile packs a .run file of NVIDIA that RUN_FILE names, and KERNEL_MODULES with the modules
// of the kernel KERNEL_RELEASE. By default there is none.
func TestRealRunFile(t *testing.T) {
	t.Parallel()
	name := os.Getenv("RUN_FILE")
	if name == "" {
		t.Skip("skipped: RUN_FILE does not name a .run file of NVIDIA")
	}
	content, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var modules []driverpack.Modules
	if folder := os.Getenv("KERNEL_MODULES"); folder != "" {
		modules = []driverpack.Modules{{Folder: folder, Release: os.Getenv("KERNEL_RELEASE")}}
	}
	o, first, err := pack(t, content, modules...)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := driverfolder.Verify(t.Context(), o.Folder); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(list(t, o.Folder), layerOf(t, o.Image, first)); diff != "" {
		t.Errorf("the image (-folder +image):\n%s", diff)
	}
	found, err := driverroot.Find(os.DirFS(o.Folder), first.Manifest.Version)
	if err != nil || len(found.Libraries) < 20 || !slices.Contains(found.Programs, "usr/bin/nvidia-smi") {
		t.Errorf("as a driver root: %d libraries, programs %v: %v", len(found.Libraries), found.Programs, err)
	}
	t.Logf("%+v: %d files\n%s", first.Manifest.Kernels, len(first.Manifest.Files), list(t, o.Folder))
}
