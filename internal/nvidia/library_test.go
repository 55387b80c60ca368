package nvidia

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// writeTree makes files and, where the content begins with "->", symbolic links below a new root. The content "|" makes a FIFO.
func writeTree(t *testing.T, tree map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range tree {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch {
		case content == "|":
			err = syscall.Mkfifo(path, 0o600)
		case strings.HasPrefix(content, "->"):
			err = os.Symlink(content[2:], path)
		default:
			err = os.WriteFile(path, []byte(content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// sharedObject returns an ELF header, which is all that locate reads.
func sharedObject(machine byte) string {
	header := make([]byte, 64)
	copy(header, "\x7fELF\x02\x01\x01")
	header[16] = 3 // a shared object
	header[18] = machine
	header[20] = 1
	header[52] = 64 // the header's own size
	return string(header)
}

func TestLocate(t *testing.T) {
	t.Parallel()
	const amd64, arm64 = 62, 183
	mine, other, triplet, foreign := sharedObject(amd64), sharedObject(arm64), "x86_64-linux-gnu", "aarch64-linux-gnu"
	if runtime.GOARCH == "arm64" {
		mine, other, triplet, foreign = other, mine, foreign, triplet
	}
	const lib = "/libnvidia-ml.so.1"
	one := func(path string) map[string]string { return map[string]string{path: mine} }
	for name, test := range map[string]struct {
		tree map[string]string
		want string
	}{
		"nothing":                        {one("usr/lib64/libcuda.so.1"), ""},
		"lib64":                          {one("usr/lib64" + lib), "usr/lib64" + lib},
		"multiarch":                      {one("usr/lib/" + triplet + lib), "usr/lib/" + triplet + lib},
		"driver container":               {one("lib/" + triplet + lib), "lib/" + triplet + lib},
		"installer's folder":             {one("usr/local/nvidia/lib64" + lib), "usr/local/nvidia/lib64" + lib},
		"root is the installer's folder": {one("lib64" + lib), "lib64" + lib},
		"of the other machine only":      {map[string]string{"usr/lib/" + foreign + lib: other}, ""},
		"of the other machine first": {
			map[string]string{"usr/lib64" + lib: other, "usr/local/nvidia/lib64" + lib: mine},
			"usr/local/nvidia/lib64" + lib,
		},
		"an empty file first": {
			map[string]string{"usr/lib64" + lib: "", "lib/" + triplet + lib: mine},
			"lib/" + triplet + lib,
		},
		"a FIFO first": { // to open it would wait for a writer
			map[string]string{"usr/lib64" + lib: "->pipe", "usr/lib64/pipe": "|", "lib/" + triplet + lib: mine},
			"lib/" + triplet + lib,
		},
		"relative link": {
			map[string]string{"usr/lib64" + lib: "->libnvidia-ml.so.580.95.05", "usr/lib64/libnvidia-ml.so.580.95.05": mine},
			"usr/lib64/libnvidia-ml.so.580.95.05",
		},
		"absolute link to a folder": {
			map[string]string{
				"usr/lib64": "->/opt/driver/lib", "opt/driver": "->./580",
				"opt/580/lib" + lib: "->../../580/lib/ml", "opt/580/lib/ml": mine,
			},
			"opt/580/lib/ml",
		},
		"link out of the root": {
			map[string]string{"usr/lib64" + lib: "->../../../../../../../../inside", "inside": mine}, "inside",
		},
		"link to itself":  {map[string]string{"usr/lib64" + lib: "->libnvidia-ml.so.1"}, ""},
		"link to nothing": {map[string]string{"usr/lib64" + lib: "->libnvidia-ml.so.580.95.05"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := writeTree(t, test.tree)
			want := test.want
			if want != "" {
				want = filepath.Join(root, want)
			}
			located := make(chan string, 1)
			go func() {
				located <- locate(root)
			}()
			select {
			case got := <-located:
				if got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			case <-time.After(time.Minute):
				t.Error("it opens what is no regular file")
			}
		})
	}
}

// TestLibraryOfLaterSessions: it is the one that was loaded. Another one in its place, or none, is an error.
func TestLibraryOfLaterSessions(t *testing.T) {
	t.Parallel()
	machine := map[string]byte{"amd64": 62, "arm64": 183}[runtime.GOARCH]
	root := writeTree(t, map[string]string{"usr/lib64/libnvidia-ml.so.1": sharedObject(machine)})
	path := filepath.Join(root, "usr/lib64/libnvidia-ml.so.1")
	d := &Driver{options: Options{DriverRoot: root}}
	var err error
	if d.loaded, err = d.library(); err != nil || d.loaded.path != path {
		t.Fatalf("the first: %v, %v", d.loaded, err)
	}
	if again, err := d.library(); err != nil || again != d.loaded {
		t.Errorf("the second: %v, %v", again, err)
	}
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.library(); !errors.Is(err, inventory.ErrDriverReplaced) {
		t.Errorf("once its file has changed: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := d.library(); !errors.Is(err, inventory.ErrNoDriver) || !strings.Contains(err.Error(), "was removed") {
		t.Errorf("once it is gone: %v", err)
	}
	d.loaded = &library{} // of the loader
	if again, err := d.library(); err != nil || again != d.loaded {
		t.Errorf("the loader's: %v, %v", again, err)
	}
	if err := os.WriteFile(path, []byte(sharedObject(machine)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.library(); !errors.Is(err, inventory.ErrDriverReplaced) ||
		!strings.Contains(err.Error(), "its library was the loader's libnvidia-ml.so.1 and is "+path+" of 20") {
		t.Errorf("the loader's, and then another one: %v", err)
	}
	if err := d.replaced(); err != nil {
		t.Errorf("the loader's is replaced by what comes below the driver root: %v", err)
	}
}

// TestResolveInTheRoot: no driver root is the root of the file system.
func TestResolveInTheRoot(t *testing.T) {
	t.Parallel()
	path, err := filepath.EvalSymlinks(writeTree(t, map[string]string{"x": ""}))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := resolveIn("", path[1:]+"/x"); err != nil || got != path+"/x" {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestALibraryThatIsAFIFO: the loader looks in more folders than those of the driver root, and would wait in one of them for ever.
func TestALibraryThatIsAFIFO(t *testing.T) {
	root := t.TempDir()
	folder := writeTree(t, map[string]string{"libnvidia-ml.so.1": "|"})
	t.Setenv("LD_LIBRARY_PATH", "/nowhere:"+folder)
	if _, err := findLibrary(root); !errors.Is(err, inventory.ErrNoDriver) || !strings.Contains(err.Error(), folder+"/libnvidia-ml.so.1 is not a regular file") {
		t.Errorf("got error %v, want that it is a FIFO", err)
	}
	for what, tree := range map[string]map[string]string{
		"a file": {"libnvidia-ml.so.1": "x"}, "a folder": {"libnvidia-ml.so.1/x": ""}, "nothing": {"x": ""},
	} {
		t.Setenv("LD_LIBRARY_PATH", writeTree(t, tree))
		if found, err := findLibrary(root); err != nil || found.path != "" {
			t.Errorf("with %s in its place: %v, %v", what, found, err)
		}
	}
	t.Setenv("LD_LIBRARY_PATH", "")
	if found, err := findLibrary(root); err != nil || found.path != "" {
		t.Errorf("without it: %v, %v", found, err)
	}
}

// TestWhyALibraryCannotBeLoaded names the place that was looked at.
func TestWhyALibraryCannotBeLoaded(t *testing.T) {
	t.Parallel()
	for root, want := range map[string]string{
		"": "neither below the driver root / nor", "/driver-root": "neither below the driver root /driver-root nor",
	} {
		if got := New(Options{DriverRoot: root}).unloadable(&library{}); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if got := New(Options{}).unloadable(&library{path: "/x/libnvidia-ml.so.1"}); got != "/x/libnvidia-ml.so.1 cannot be loaded: ldd names what it lacks" {
		t.Errorf("got %q", got)
	}
}
