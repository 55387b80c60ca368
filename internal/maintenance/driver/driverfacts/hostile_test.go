package driverfacts_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// hostile are unexpected files, each in the place of a file that is read.
var hostile = map[string]func(path string) error{
	"FIFO":     func(path string) error { return unix.Mkfifo(path, 0o600) },
	"a folder": func(path string) error { return os.Mkdir(path, 0o700) },
	"100 MB": func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 100<<20))
	},
	"garbage": func(path string) error {
		return os.WriteFile(path, []byte(strings.Repeat("\x00\xff menuentry '\x1b[2J' {\n", 9999)), 0o600)
	},
	"a loop":  func(path string) error { return os.Symlink(filepath.Base(path), path) },
	"outside": func(path string) error { return os.Symlink("../../../../../../../../dev/zero", path) },
	"empty":   func(path string) error { return os.WriteFile(path, nil, 0o600) },
	"an ELF file that lies": func(path string) error {
		file := []byte(ko{version: v580, release: k50, signer: mok}.String())
		file[40], file[46] = 0xff, 0x7f // the place of the section headers
		return os.WriteFile(path, file, 0o600)
	},
}

// TestHostileFiles: for any kind of file, all facts are read or missing in time, and judged.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	places := []string{
		"etc/os-release", "boot/grub/grub.cfg", "boot/grub/grubenv", "proc/sys/kernel/osrelease", "proc/modules", "proc/keys",
		"proc/driver/nvidia/version", "proc/1/maps", "proc/1/comm", "proc/4711/cgroup", "var/lib/dpkg/status",
		"usr/lib/modules/" + k50 + "/modules.dep", "usr/lib/modules/" + k50 + "/updates/dkms/nvidia.ko",
		"usr/lib/modules/" + k50 + "/updates/dkms", "sys/bus/pci/devices/0000:3b:00.0/device", "sys/devices/system/node/node0/meminfo",
		"boot/loader/entries", "sys/kernel/security/lockdown", "var/log/pods", "proc/1/fd",
	}
	for kind, create := range hostile {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			folder, aside := t.TempDir(), filepath.Join(t.TempDir(), "aside")
			for name, text := range ubuntu.with(busy()) {
				path := filepath.Join(folder, name)
				err := os.MkdirAll(filepath.Dir(path), 0o700)
				if target, isLink := strings.CutPrefix(text, "-> "); isLink {
					err = errors.Join(err, os.Symlink(target, path))
				} else {
					err = errors.Join(err, os.WriteFile(path, []byte(text), 0o600))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			root := os.DirFS(folder)
			for _, at := range places {
				path := filepath.Join(folder, at)
				was := os.Rename(path, aside)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), create(path)); err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				report := preflight.Examine(driverfacts.Places{Kernel: root, Host: root}.ReadAll(t.Context()))
				if took := time.Since(began); took > driverfacts.Timeout+5*time.Second {
					t.Errorf("%s: it takes %v", at, took)
				}
				if report.Summary == "" || len(report.Findings) < 10 {
					t.Errorf("%s: %+v", at, report)
				}
				err := os.RemoveAll(path)
				if was == nil {
					err = errors.Join(err, os.Rename(aside, path))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// slow is a file system in which opening some files does not return until ended is closed.
type slow struct {
	fstest.MapFS
	hangs func(name string) bool
	ended <-chan struct{}
}

func (s slow) Open(name string) (fs.File, error) {
	if s.hangs(name) {
		<-s.ended
		return nil, fs.ErrNotExist
	}
	return s.MapFS.Open(name)
}

// hanging returns the facts of a node on which opening some files does not return, with all that the
// node says before the limit. It runs in a bubble of testing/synctest, where time goes on when nobody
// has anything to do.
func hanging(t *testing.T, node fstest.MapFS, hangs func(name string) bool,
	read func(driverfacts.Places, context.Context) preflight.Facts) (facts preflight.Facts) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan struct{})
		defer close(ended)
		root := slow{node, hangs, ended}
		began := time.Now()
		facts = read(driverfacts.Places{Kernel: root, Host: root}, t.Context())
		if took := time.Since(began); took != driverfacts.Timeout {
			t.Errorf("gives up after %v, want %v", took, driverfacts.Timeout)
		}
	})
	return facts
}

// TestProcessesThatHang: maps of processes that hang in the kernel are given up, and said; the other
// processes are named.
func TestProcessesThatHang(t *testing.T) {
	t.Parallel()
	report := preflight.Examine(hanging(t, ubuntu.with(busy()).tree(), func(name string) bool {
		return name == "proc/1/maps" || name == "proc/4714/maps"
	}, driverfacts.Places.ReadAll))
	if !slices.ContainsFunc(report.Findings, func(f diagnosis.Finding) bool {
		return f.Severity == diagnosis.NotChecked && strings.HasPrefix(f.Message, "Not all of 7 processes "+
			"answered in time")
	}) {
		t.Errorf("the findings do not name the hanging process: %+v", report.Findings)
	}
	if !slices.ContainsFunc(report.Holders, func(h preflight.Holder) bool { return h.Name == "nvtop (4715)" }) {
		t.Errorf("the other processes are missing: %+v", report.Holders)
	}
}

// TestFilesThatHang: a fact whose file does not return is missing, and the others are known.
func TestFilesThatHang(t *testing.T) {
	t.Parallel()
	facts := hanging(t, ubuntu.tree(), func(name string) bool { return name == "var/lib/dpkg/status" },
		driverfacts.Places.Read)
	want := "Reading what installed the driver did not return in time: the node is very busy, or the driver or a " +
		"file system hangs"
	if facts.Owners.Missing != want {
		t.Errorf("the owners: %q, want %q", facts.Owners.Missing, want)
	}
	if facts.NextBoot.Value.Release != k50 || facts.Driver.Value.Version != v580 {
		t.Errorf("the other facts: %+v", facts)
	}
}

// closed is a file system in which files of other processes may not be read.
type closed struct{ fstest.MapFS }

func (c closed) Open(name string) (fs.File, error) {
	if strings.HasPrefix(name, "proc/4") && (strings.HasSuffix(name, "/fd") || strings.HasSuffix(name, "/maps")) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EACCES}
	}
	return c.MapFS.Open(name)
}

// TestNoPermission: processes whose files are closed are counted, services of the driver are still
// named by their processes, and unexplained references are said.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	root := closed{ubuntu.with(busy()).tree()}
	report := preflight.Examine(driverfacts.Places{Kernel: root, Host: root}.ReadAll(t.Context()))
	var messages []string
	for _, f := range report.Findings {
		messages = append(messages, f.Message)
	}
	for _, want := range []string{"The open files of 6 of 7 processes could not be read",
		"The module nvidia has 14 references of something that was not found"} {
		if !slices.Contains(messages, want) {
			t.Errorf("no finding %q in %q", want, messages)
		}
	}
	if !slices.ContainsFunc(report.Holders, func(h preflight.Holder) bool {
		return h.Kind == preflight.KindPod && h.Name == "monitoring/dcgm-exporter-x7k2p"
	}) {
		t.Errorf("the exporter is missing: %+v", report.Holders)
	}
}

// TestNothingIsVisible: without the node's files every fact is missing or empty, and nothing is
// ready by mistake.
func TestNothingIsVisible(t *testing.T) {
	t.Parallel()
	report := preflight.Examine(driverfacts.Places{Kernel: fstest.MapFS{}, Hidden: "hidden"}.ReadAll(t.Context()))
	if report.NotChecked < 8 || diagnosis.Worst(report.Findings) != diagnosis.NotChecked {
		t.Errorf("%d checks are not made, worst %v: %+v", report.NotChecked, diagnosis.Worst(report.Findings), report.Findings)
	}
}

// TestOwnProcess reads the real /proc: this process has a library named libcuda mapped.
func TestOwnProcess(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), os.Getpagesize()), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	mapped, err := unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	root := os.DirFS("/")
	facts := driverfacts.Places{Kernel: root, Host: root}.ReadAll(t.Context())
	if !slices.ContainsFunc(facts.Processes.Value.Users,
		func(p preflight.Process) bool { return p.PID == os.Getpid() && p.Library }) &&
		len(facts.Processes.Value.Unread) == 0 {
		t.Errorf("this process %d is not among the users: %+v", os.Getpid(), facts.Processes)
	}
}

// TestSignatures: signers of modules, and ends of files that only look like signatures.
func TestSignatures(t *testing.T) {
	t.Parallel()
	whole := ko{version: v580, release: k50, signer: "A key"}.String()
	at := len(whole) - len("~Module signature appended~\n") - 4 // the length of the signature
	for name, tt := range map[string]struct {
		file, signer string
		signed       bool
	}{
		"a signer":            {whole, "A key", true},
		"no signature":        {ko{version: v580, release: k50}.String(), "", false},
		"a cut end":           {whole[:len(whole)-1], "", false},
		"a length beyond":     {whole[:at] + "\x7f\xff\xff\xff" + whole[at+4:], "", true},
		"a length of nothing": {whole[:at] + "\x00\x00\x00\x00" + whole[at+4:], "", true},
		"garbage as a signature": {ko{version: v580, release: k50}.String() + strings.Repeat("\x30\x84", 50) +
			"\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x64~Module signature appended~\n", "", true},
	} {
		target := driverfacts.Target("/x", files{"nvidia.ko": tt.file}.tree())
		if len(target.Files) != 1 || target.Files[0].Signed != tt.signed || target.Files[0].Signer != tt.signer {
			t.Errorf("%s: %+v", name, target.Files)
		}
	}
}

// TestRealModule reads a module that a distribution built and signed, under the name of the driver's:
// KERNEL_MODULE names its file, such as bridge.ko of Debian's linux-image-6.1.0-56-cloud-amd64. By
// default it is a module of the running kernel.
func TestRealModule(t *testing.T) {
	t.Parallel()
	file := os.Getenv("KERNEL_MODULE")
	if file == "" {
		found, _ := filepath.Glob("/lib/modules/*/kernel/net/bridge/bridge.ko") // the pattern is well-formed
		if len(found) == 0 {
			t.Skip("skipped: no bridge.ko in /lib/modules, and KERNEL_MODULE is not set")
		}
		file = found[0]
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	target := driverfacts.Target("/x", fstest.MapFS{"nvidia.ko": {Data: content}})
	m := target.Files[0]
	t.Logf("%s: %+v", file, m)
	if m.License != "GPL" || !strings.Contains(m.Vermagic, " SMP "+
		"") || m.Version != "2.3" || m.Signed && m.Signer == "" {
		t.Errorf("%+v", m)
	}
}

// BenchmarkProcesses reads 3,000 processes with 40 open files each, 1,200 of them with a map of 1,000
// lines.
func BenchmarkProcesses(b *testing.B) {
	folder := b.TempDir()
	lines := strings.Repeat("7f0000000000-7f0000001000 r-xp 00000000 fe:00 123456 "+
		"/usr/lib/x86_64-linux-gnu/libc.so.6\n", 1000)
	for pid := range 3000 {
		process := filepath.Join(folder, "proc", fmt.Sprint(pid+1))
		if err := os.MkdirAll(process+"/fd", 0o700); err != nil {
			b.Fatal(err)
		}
		for fd := range 40 {
			if err := os.Symlink(fmt.Sprintf("socket:[%d]", pid*fd), fmt.Sprintf("%s/fd/%d", process, fd)); err != nil {
				b.Fatal(err)
			}
		}
		text := ""
		if pid%5 < 2 {
			text = lines
		}
		if err := errors.Join(os.WriteFile(process+"/maps", []byte(text), 0o600), os.WriteFile(process+"/comm",
			[]byte("x\n"), 0o600)); err != nil {
			b.Fatal(err)
		}
	}
	root := os.DirFS(folder)
	for b.Loop() {
		facts := driverfacts.Places{Kernel: root, Host: root}.ReadAll(b.Context())
		if len(facts.Processes.Value.Unread) > 0 {
			b.Fatal("not all processes were read")
		}
	}
}
