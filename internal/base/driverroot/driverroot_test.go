package driverroot_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

func TestResolve(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, file := range []string{"opt/580/lib/ml", "usr/lib/cuda", "inside"} {
		path := filepath.Join(root, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for link, target := range map[string]string{
		"opt/driver":       "580",                      // a folder, relative
		"opt/580/lib/up":   "../../driver/lib/ml",      // relative, through the link above
		"usr/lib64":        "/opt/driver/lib",          // a folder, absolute
		"usr/lib/out":      "../../../../../../inside", // as far up as there is
		"usr/lib/circle":   "circle",
		"usr/lib/dangling": "nothing",
		"usr/lib/dot":      "./././cuda",
	} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	const most = 40 // two links in sequence, as the kernel follows
	for i := range most + 1 {
		target := fmt.Sprintf("link%d", i+1)
		if i == most {
			target = "inside"
		}
		if err := os.Symlink(target, filepath.Join(root, fmt.Sprintf("link%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]struct {
		resolved string
		absolute bool
		err      error
	}{
		"usr/lib/cuda":          {"usr/lib/cuda", false, nil},
		"/usr//lib/./cuda":      {"usr/lib/cuda", false, nil},
		"usr/lib/../lib/cuda":   {"usr/lib/cuda", false, nil},
		"../../usr/lib/cuda":    {"usr/lib/cuda", false, nil},
		"opt/driver/lib/ml":     {"opt/580/lib/ml", false, nil},
		"opt/driver/lib/up":     {"opt/580/lib/ml", false, nil},
		"opt/driver/../driver":  {"opt/580", false, nil},
		"usr/lib64/ml":          {"opt/580/lib/ml", true, nil},
		"usr/lib64/up":          {"opt/580/lib/ml", true, nil},
		"usr/lib/out":           {"inside", false, nil},
		"usr/lib/dot":           {"usr/lib/cuda", false, nil},
		"usr/lib/circle":        {"", false, syscall.ELOOP},
		"usr/lib/dangling":      {"", false, fs.ErrNotExist},
		"usr/lib/cuda/too/deep": {"", false, syscall.ENOTDIR},
		"usr/..":                {"", false, nil},
		"link1":                 {"inside", false, nil},
		"link0":                 {"", false, syscall.ELOOP},
		"":                      {"", false, nil},
	} {
		resolved, absolute, err := driverroot.Resolve(os.DirFS(root), name)
		if resolved != want.resolved || absolute != want.absolute || !errors.Is(err, want.err) {
			t.Errorf("%q: got %q, %v, %v, want %+v", name, resolved, absolute, err, want)
		}
	}
}

// TestFirmwareFolders has the firmware in either of the two folders, or in both: then the first
// counts.
func TestFirmwareFolders(t *testing.T) {
	t.Parallel()
	const first, second = "lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
		"usr/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin"
	for name, test := range map[string]struct{ have, want []string }{
		"first": {[]string{first}, []string{first}}, "second": {[]string{second}, []string{second}},
		"both": {[]string{first, second}, []string{first}}, "none": {nil, nil},
		"of another version": {[]string{"usr/lib/firmware/nvidia/470.1/gsp.bin"}, nil},
	} {
		root := fstest.MapFS{"usr/lib64/libcuda.so.580.95.05": {}}
		for _, file := range test.have {
			root[file] = &fstest.MapFile{}
		}
		files, err := driverroot.Find(root, "580.95.05")
		if err != nil {
			t.Error(err)
		}
		var got []string
		for _, f := range files.Others {
			got = append(got, f.Path)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: firmware (-want +got):\n%s", name, diff)
		}
	}
}

// A brokenFS returns an error for every access to a path, and to everything below the path.
type brokenFS struct {
	fstest.MapFS
	path string
	err  error
}

func (b brokenFS) check(name string) error {
	if name == b.path || b.path == "." || len(name) > len(b.path) && name[:len(b.path)+1] == b.path+"/" {
		return &fs.PathError{Op: "look", Path: name, Err: b.err}
	}
	return nil
}

func (b brokenFS) Open(name string) (fs.File, error) {
	if err := b.check(name); err != nil {
		return nil, err
	}
	return b.MapFS.Open(name)
}

func (b brokenFS) Lstat(name string) (fs.FileInfo, error) {
	if err := b.check(name); err != nil {
		return nil, err
	}
	return b.MapFS.Lstat(name)
}

func (b brokenFS) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := b.check(name); err != nil {
		return nil, err
	}
	return b.MapFS.ReadDir(name)
}

// An unlisted file system lists no folder.
type unlisted struct{ fstest.MapFS }

func (unlisted) ReadDir(name string) ([]fs.DirEntry, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EACCES}
}

// TestUnreadableFiles: an unreadable file does not count as absent.
func TestUnreadableFiles(t *testing.T) {
	t.Parallel()
	tree := fstest.MapFS{"usr/lib64/libcuda.so.580.95.05": {}, "usr/bin/nvidia-smi": {}}
	for _, path := range []string{".", "usr/lib64", "usr/bin", "usr/bin/nvidia-smi", "usr/lib64/libcuda.so.580.95.05"} {
		_, err := driverroot.Find(brokenFS{tree, path, syscall.EIO}, "580.95.05")
		if !errors.Is(err, syscall.EIO) || errors.Is(err, driverroot.ErrNoLibraries) {
			t.Errorf("%s cannot be read: got error %v", path, err)
		}
	}
	if _, err := driverroot.Find(unlisted{tree}, "580.95.05"); !errors.Is(err, syscall.EACCES) || errors.Is(err, driverroot.ErrNoLibraries) {
		t.Errorf("a folder whose files may be opened and not listed: got error %v", err)
	}
	if _, err := driverroot.Find(brokenFS{tree, "run/nvidia-persistenced", syscall.EACCES}, "580.95.05"); err != nil {
		t.Errorf("a socket that may not be seen: got error %v", err)
	}
}
