package driverstore_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

const (
	library = "usr/lib/libcuda.so.580.95.05"
)

func open(t *testing.T, directory string) *driverstore.Store {
	t.Helper()
	s, err := driverstore.Open(directory, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func ignore(int) {}

// names returns the entries of a folder.
func names(t *testing.T, folder string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestPlace(t *testing.T) {
	t.Parallel()
	sources, directory := t.TempDir(), filepath.Join(t.TempDir(), "made")
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	source := filepath.Join(sources, "a")
	// The source may be the root of a container, with files of its own.
	if err := os.WriteFile(filepath.Join(source, "usr/lib/other.so"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, directory)
	var last int
	f, err := s.Place(t.Context(), source, func(percent int) {
		if percent < last || percent > 99 {
			t.Errorf("%d %% after %d %%", percent, last)
		}
		last = percent
	})
	if err != nil || f.Digest != digest || last == 0 {
		t.Fatalf("placed %+v at %d %%: %v", f, last, err)
	}
	if _, found, err := driverfolder.Verify(t.Context(), f.Path); err != nil || found != digest {
		t.Errorf("the copy: %s, %v", found, err)
	}
	if diff := cmp.Diff([]string{digest}, names(t, directory)); diff != "" {
		t.Errorf("the directory (-want +got):\n%s", diff)
	}
	if err := os.RemoveAll(filepath.Join(source, "usr")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Place(t.Context(), source, ignore); err != nil {
		t.Errorf("what is there is not copied again: %v", err)
	}
}

// A source that is not what its manifest says leaves nothing, and nothing outside of it is read.
func TestSourcesThatLie(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(source string) error
		want   string
	}{
		"another content": {func(source string) error {
			return os.WriteFile(filepath.Join(source, library), []byte("libcuda 580.95.06"), 0o600)
		}, library + " is not the file that was packed"},
		"a longer file": {func(source string) error {
			return os.WriteFile(filepath.Join(source, library), make([]byte, 1<<20), 0o600)
		}, library + " is not the file that was packed"},
		"a missing file": {func(source string) error { return os.Remove(filepath.Join(source, library)) }, "no such file"},
		"a link to a file of the node": {func(source string) error {
			return errors.Join(os.Remove(filepath.Join(source, library)), os.Symlink("/etc/passwd", filepath.Join(source, library)))
		}, library + " is not a regular file"},
		"a folder that leads out": {func(source string) error {
			return errors.Join(os.RemoveAll(filepath.Join(source, "usr/lib")), os.Symlink("/usr/lib", filepath.Join(source, "usr/lib")))
		}, "escapes"},
		"a FIFO": {func(source string) error {
			return errors.Join(os.Remove(filepath.Join(source, library)), syscall.Mkfifo(filepath.Join(source, library), 0o600))
		}, library + " is not a regular file"},
		"a damaged manifest": {func(source string) error {
			return os.WriteFile(filepath.Join(source, driverfolder.ManifestName), []byte("{"), 0o600)
		}, "not JSON of a driver folder"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sources, directory := t.TempDir(), t.TempDir()
			standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
			source := filepath.Join(sources, "a")
			if err := tt.change(source); err != nil {
				t.Fatal(err)
			}
			s := open(t, directory)
			if _, err := s.Place(t.Context(), source, ignore); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
			if left := names(t, directory); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// A source that changes while it is copied is not placed.
func TestSourceThatChangesDuringTheCopy(t *testing.T) {
	t.Parallel()
	sources, directory := t.TempDir(), t.TempDir()
	standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	source := filepath.Join(sources, "a")
	_, err := open(t, directory).Place(t.Context(), source, func(int) {
		_ = os.WriteFile(filepath.Join(source, library), []byte("another"), 0o600)
	})
	if err == nil || !strings.Contains(err.Error(), library+" is not the file that was packed") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	standinkernel.Driver(t, sources, "b", "580.95.06", standinkernel.Release)
	_, err = open(t, t.TempDir()).Place(ctx, filepath.Join(sources, "b"), func(int) { cancel() })
	if !errors.Is(err, context.Canceled) || len(names(t, directory)) > 0 {
		t.Errorf("a copy that is ended: %v, left %v", err, names(t, directory))
	}
}

// The kernel refuses to write more than a number of bytes into a file, as on a full disk.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	sources, directory := t.TempDir(), t.TempDir()
	standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	s := open(t, directory)
	failures := 0
	for limit := 10; ; limit = limit*3/2 + 1 {
		ownprocess.LimitFiles(t, uint64(limit))
		_, err := s.Place(t.Context(), filepath.Join(sources, "a"), ignore)
		ownprocess.LimitFiles(t, 0)
		if err == nil {
			break
		}
		failures++
		if left := names(t, directory); !errors.Is(err, syscall.EFBIG) || len(left) > 0 {
			t.Fatalf("with %d bytes: %v, left %v", limit, err, left)
		}
	}
	if failures < 3 {
		t.Errorf("%d failures", failures)
	}
}

func TestDirectoriesThatAreNotOurs(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	if err := os.Chmod(directory, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := driverstore.Open(directory, func(string) {}); err == nil || !strings.Contains(err.Error(), "nobody else may write to it") {
		t.Errorf("a directory that everybody may write to: %v", err)
	}
	if err := os.Chmod(directory, 0o755); err != nil {
		t.Fatal(err)
	}
	sources := t.TempDir()
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	s := open(t, directory)
	if _, err := driverstore.Open(directory, func(string) {}); !errors.Is(err, statefile.ErrLocked) {
		t.Errorf("a second user of the directory: %v", err)
	}
	// A link in the place of a folder is no driver folder, and is not replaced.
	if err := os.Symlink(filepath.Join(sources, "a"), filepath.Join(directory, digest)); err != nil {
		t.Fatal(err)
	}
	if all, err := s.Folders(); len(all) > 0 || err != nil {
		t.Errorf("a link is the folder %+v, %v", all, err)
	}
	if _, err := s.Place(t.Context(), filepath.Join(sources, "a"), ignore); err == nil || !strings.Contains(err.Error(), "something else is in the place") {
		t.Errorf("placed over a link: %v", err)
	}
	for _, target := range []string{"/etc", "../" + digest, "other"} {
		link := filepath.Join(directory, driverapi.Current)
		_ = os.Remove(link)
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		if now, err := s.Current(); err == nil || now != "" {
			t.Errorf("the link to %s: %q, %v", target, now, err)
		}
		if err := s.SetCurrent(digest); err != nil {
			t.Errorf("the link to %s is not replaced: %v", target, err)
		}
	}
	if now, err := s.Current(); now != digest || err != nil {
		t.Errorf("current is %q, %v", now, err)
	}
	if err := s.SetCurrent(""); err != nil {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(directory, driverapi.Current), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.SetCurrent(digest); err == nil {
		t.Error("a folder in the place of the link is replaced")
	}
	if left := names(t, directory); len(left) != 2 {
		t.Errorf("left: %v", left)
	}
}

// What killed processes have left is removed. Old folders go, except those that are needed or in use.
func TestOldFolders(t *testing.T) {
	t.Parallel()
	sources, directory := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(directory, ".left.gpu-driver.tmp/usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := open(t, directory)
	if left := names(t, directory); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	var digests []string
	for i := range 4 {
		name := fmt.Sprint("driver", i)
		digests = append(digests, standinkernel.Driver(t, sources, name, fmt.Sprintf("580.95.0%d", i), standinkernel.Release))
		if _, err := s.Place(t.Context(), filepath.Join(sources, name), ignore); err != nil {
			t.Fatal(err)
		}
	}
	here := func(want ...string) {
		t.Helper()
		all, err := s.Folders()
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]bool{}
		for _, f := range all {
			found[f.Digest] = true
		}
		for _, digest := range want {
			if !found[digest] {
				t.Errorf("%s is not there", digest)
			}
		}
		if len(all) != len(want) {
			t.Errorf("%d folders, want %d", len(all), len(want))
		}
	}
	node := t.TempDir()
	inode := func(digest string) uint64 {
		info, err := os.Stat(filepath.Join(s.Path(digest), "usr/lib/libcuda.so."+"580.95.01"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Ino //nolint:forcetypeassert // Linux
	}
	maps := func(text string) fs.FS {
		folder := filepath.Join(node, "proc/7")
		if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, "maps"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return os.DirFS(node)
	}
	used := maps(fmt.Sprintf("7f00-7f01 r-xp 00000000 00:2a %d   /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.01\n", inode(digests[1])))
	if err := s.Prune(used, digests[0]); err != nil {
		t.Error(err)
	}
	here(digests[0], digests[1]) // the first is needed, and the second in use
	if _, err := s.Place(t.Context(), filepath.Join(sources, "driver2"), ignore); err != nil {
		t.Fatal(err)
	}
	if err := s.Prune(maps(""), digests[0]); err != nil {
		t.Error(err)
	}
	here(digests[0], digests[2]) // the one that was placed last
	if err := s.Prune(maps("")); err != nil {
		t.Error(err)
	}
	here(digests[0], digests[2])
}
