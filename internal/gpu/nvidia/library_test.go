package nvidia_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// writeTree makes files and, where the content begins with "->", symbolic links below a new root.
// The content "|" makes a FIFO.
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
			map[string]string{"usr/lib64" + lib: "->libnvidia-ml.so.580.95.05",
				"usr/lib64/libnvidia-ml.so.580.95.05": mine},
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
				located <- locate(t, root)
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

// locate returns the library below a driver root that a session would be opened with. It cannot be
// loaded: it is a header only.
func locate(t *testing.T, root string) string {
	t.Helper()
	err := openMachine(t, nvidia.Options{DriverRoot: root})
	if !errors.Is(err, inventory.ErrNoDriver) {
		t.Errorf("got error %v", err)
	}
	path, _, found := strings.Cut(strings.TrimPrefix(err.Error(), "open an NVML session: no NVIDIA driver: "),
		" cannot be loaded: run ldd to find missing libraries")
	if !found {
		return ""
	}
	return path
}

// openMachine tries to open a session with a library of this machine, which is not to have a
// driver.
func openMachine(t *testing.T, o nvidia.Options) error {
	t.Helper()
	s, err := nvidia.New(o).Open(t.Context())
	if err == nil {
		err = s.Close(t.Context())
		t.Skipf("this machine has a driver (closing it: %v)", err)
	}
	return err
}

// TestALibraryThatIsAFIFO: the loader looks in more folders than those of the driver root, and
// would wait in one of them for ever.
func TestALibraryThatIsAFIFO(t *testing.T) {
	root := t.TempDir()
	folder := writeTree(t, map[string]string{"libnvidia-ml.so.1": "|"})
	t.Setenv("LD_LIBRARY_PATH", "/nowhere:"+folder)
	err := openMachine(t, nvidia.Options{DriverRoot: root})
	if !errors.Is(err, inventory.ErrNoDriver) || !strings.Contains(err.Error(),
		folder+"/libnvidia-ml.so.1 is not a regular file") {
		t.Errorf("got error %v, want that it is a FIFO", err)
	}
	for what, tree := range map[string]map[string]string{
		"a file": {"libnvidia-ml.so.1": "x"}, "a folder": {"libnvidia-ml.so.1/x": ""}, "nothing": {"x": ""},
	} {
		t.Setenv("LD_LIBRARY_PATH", writeTree(t, tree))
		if err := openMachine(t, nvidia.Options{DriverRoot: root}); !strings.Contains(err.Error(),
			"nor where the loader looks") {
			t.Errorf("with %s in its place: %v", what, err)
		}
	}
	for root, want := range map[string]string{
		"": "neither below the driver root / nor", "/driver-root": "neither below the driver root /driver-root nor",
	} {
		t.Setenv("LD_LIBRARY_PATH", "")
		if err := openMachine(t, nvidia.Options{DriverRoot: root}); !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
}
