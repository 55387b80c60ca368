package driverpack

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Modules are the kernel modules of the driver for one kernel, which the user has built and signed.
type Modules struct {
	Folder  string // has the .ko files, also in folders below
	Release string // of the kernel, as uname -r prints it
}

// machines are the machines of ELF files, by the architecture.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// addModules copies the modules of a set into the driver folder. All modules must be of the driver's
// version, of its architecture and for the kernel, and the modules without which CUDA does not work
// must be there.
func (b *builder) addModules(set Modules) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("modules in %s for kernel %s: %w", set.Folder, set.Release, fmt.Errorf(format, args...))
	}
	if !driverfolder.IsRelease(set.Release) {
		return fail("%.80q is not the release of a kernel", set.Release)
	}
	if b.manifest.HasKernel(set.Release) {
		return fail("the kernel is named twice")
	}
	if info, err := os.Stat(set.Folder); err != nil || !info.IsDir() {
		return fail("the folder cannot be read: %w", cmp.Or(err, error(syscall.ENOTDIR)))
	}
	folder, err := b.unpackModules(set.Folder)
	if err != nil {
		return fail("%w", err)
	}
	files := driverfacts.ModulesIn(os.DirFS(folder))
	kernel := driverfolder.Kernel{Release: set.Release}
	names := map[string]string{} // base name → path
	parts := map[string]bool{}
	for _, m := range files {
		release, _, _ := strings.Cut(m.Vermagic, " ")
		name := path.Base(m.Path)
		switch {
		case m.Unread != "":
			return fail("%s %s", m.Path, m.Unread)
		case m.Vermagic == "":
			return fail("%s is damaged, or is not a kernel module", m.Path)
		case release != set.Release:
			return fail("%s was built for kernel %s", m.Path, release)
		case m.Version != "" && m.Version != b.manifest.Version:
			return fail("%s is of driver %s, and the .run file of %s", m.Path, m.Version, b.manifest.Version)
		case names[name] != "":
			return fail("%s and %s have the same name", names[name], m.Path)
		case parts[m.Part]:
			return fail("%s is there a second time", m.Part)
		}
		if m.Signed != files[0].Signed {
			return fail("%s is signed and %s is not, or the other way round", m.Path, files[0].Path)
		}
		names[name], parts[m.Part] = m.Path, true
		if m.Part == preflight.Core {
			if m.Version == "" {
				return fail("%s does not tell the version of the driver", m.Path)
			}
			kernel.Open, kernel.Vermagic = m.Open(), m.Vermagic
			kernel.Signed, kernel.Signer = m.Signed, m.Signer
		}
		to := path.Join(driverfolder.ModuleFolder(set.Release), name)
		if err := b.addModule(filepath.Join(folder, m.Path), to); err != nil {
			return fail("%w", err)
		}
	}
	for part, name := range map[string]string{preflight.Core: "nvidia.ko", "uvm": "nvidia-uvm.ko"} {
		if !parts[part] {
			return fail("there is no %s, without which CUDA does not work", name)
		}
	}
	b.manifest.Kernels = append(b.manifest.Kernels, kernel)
	return nil
}

// maxModule is the size of the largest unpacked module, in bytes.
const maxModule = 1 << 30

// unpackers are the programs that unpack modules, by the end of the name.
var unpackers = map[string]string{".xz": "xz", ".zst": "zstd"}

// unpackModules returns a folder with the modules of a folder, none of which is compressed: the folder
// itself, or one in the staging.
func (b *builder) unpackModules(folder string) (string, error) {
	files := driverfacts.ModulesIn(os.DirFS(folder))
	isCompressed := func(m *preflight.ModuleFile) bool { return path.Ext(m.Path) != ".ko" }
	if !slices.ContainsFunc(files, isCompressed) {
		return folder, nil
	}
	if err := b.work.RemoveAll("modules"); err != nil { // of another kernel
		return "", err
	}
	for _, m := range files {
		to := path.Join("modules", strings.TrimSuffix(m.Path, path.Ext(m.Path)))
		if !isCompressed(m) {
			to += ".ko"
		}
		if _, err := b.work.Lstat(to); err == nil {
			return "", fmt.Errorf("%s is there twice, with another compression", m.Path)
		}
		if err := b.unpackModule(filepath.Join(folder, m.Path), m.Path, to); err != nil {
			return "", err
		}
	}
	return filepath.Join(b.work.Name(), "modules"), nil
}

// unpackModule copies a module, which errors call by its name, to a path in the staging, decompressed.
func (b *builder) unpackModule(from, name, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	copyFrom := func(content io.Reader) error {
		limited := &io.LimitedReader{R: driverfolder.Reader(b.ctx, content), N: maxModule}
		if err := write(b.work, to, limited); err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
		if limited.N == 0 {
			return fmt.Errorf("%s has more than %d MB", name, maxModule>>20)
		}
		return nil
	}
	switch end := path.Ext(from); end {
	case ".ko":
		return copyFrom(f)
	case ".gz":
		unpacked, err := gzip.NewReader(f)
		if err != nil {
			return fmt.Errorf("%s is damaged: %w", name, err)
		}
		return copyFrom(unpacked)
	default:
		err := decompress(b.ctx, f, copyFrom, name, unpackers[end])
		if err != nil && b.ctx.Err() == nil {
			return fmt.Errorf("%w; unpack the module yourself with %s -d", err, unpackers[end])
		}
		return err
	}
}

func (b *builder) addModule(from, to string) (err error) {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	if err := b.isForArchitecture(f, from); err != nil {
		return err
	}
	atStep()
	if err := write(b.folder, to, driverfolder.Reader(b.ctx, f)); err != nil {
		return err
	}
	return b.folder.Chmod(to, 0o644)
}

// isForArchitecture returns an error if an ELF file is for another machine than the driver.
func (b *builder) isForArchitecture(f io.ReaderAt, name string) error {
	header := make([]byte, 20)
	if _, err := f.ReadAt(header, 0); err != nil || !bytes.HasPrefix(header, []byte(elf.ELFMAG+"\x02\x01")) {
		return fmt.Errorf("%s is not a 64-bit ELF file", name)
	}
	got, want := elf.Machine(binary.LittleEndian.Uint16(header[18:])), machines[b.manifest.Architecture]
	if got != want {
		return fmt.Errorf("%s is for %v, and the driver for %v", name, got, want)
	}
	return nil
}

// checkLibraries returns an error if a library without which no driver works is missing or for
// another machine.
func (b *builder) checkLibraries() error {
	for _, stem := range []string{"libcuda.so.", "libnvidia-ml.so."} {
		name := path.Join(libraryFolders[b.manifest.Architecture], stem+b.manifest.Version)
		f, err := b.folder.Open(name)
		if err != nil {
			return fmt.Errorf("the .run file has no %s%s: it is not a whole driver", stem, b.manifest.Version)
		}
		if err := errors.Join(b.isForArchitecture(f, name), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
