package driverpack_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverpack"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
)

// The kernel refuses to write more than a number of bytes into a file, as on a full disk, for many
// numbers. Each driver has its largest file at another step.
func TestFullDiskLeavesNothing(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	bigModules := goodModules()
	m := bigModules["nvidia.ko"]
	m.license = "GPL" + strings.Repeat(" ", 70_000)
	bigModules["nvidia.ko"] = m
	noise := rand.NewChaCha8([32]byte{})
	random := func() string {
		content := make([]byte, 30_000)
		_, _ = noise.Read(content) // never fails
		return string(content)
	}
	small := newDriver(amd64)
	failed := map[string]bool{}
	for _, tt := range []struct {
		files   driver
		modules []driverpack.Modules
	}{
		{small, nil}, // the manifest of the folder
		{small.with("README.txt", strings.Repeat("r", 50_000)), nil},
		{small.with("nvidia-smi", random()).with("nvidia.icd", random()), nil}, // the layer of the image
		{small, []driverpack.Modules{{Folder: modulesIn(t, bigModules), Release: kernel}}},
	} {
		o := driverpack.Options{Modules: tt.modules}
		o.Run, o.SHA256 = store(t, nvidia().of(t, tt.files.tarOf(t)))
		for limit := 50.0; ; limit *= 1.3 {
			top := t.TempDir()
			o.Folder, o.Image = filepath.Join(top, "folder"), filepath.Join(top, "image")
			o.Archive = filepath.Join(top, "driver.tar.gz")
			ownprocess.LimitFiles(t, uint64(limit))
			_, err := driverpack.Pack(t.Context(), o)
			ownprocess.LimitFiles(t, 0)
			if err == nil {
				break
			}
			var at *fs.PathError
			if !errors.Is(err, syscall.EFBIG) || !errors.As(err, &at) {
				t.Fatalf("with %.0f bytes: %v", limit, err)
			}
			failed[strings.TrimRight(filepath.Base(at.Path), "0123456789")] = true
			nothingAt(t, o)
		}
	}
	for _, file := range []string{"README.txt", "nvidia.ko", "layer", driverfolder.ManifestName} {
		if !failed[file] {
			t.Errorf("no limit was reached at %s, but at %v", file, failed)
		}
	}
}

// The process is killed at each step. Then the folder and the image are whole or not there, and the
// next run removes what the killed one has left.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	const variable = "TEST_KILLED_AT_STEP"
	if at := os.Getenv(variable); at != "" {
		left, err := strconv.Atoi(at)
		if err != nil {
			t.Fatal(err)
		}
		driverpack.SetStep(func() {
			if left--; left == 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {} // the signal comes
			}
		})
		o := driverpack.Options{Run: os.Getenv("TEST_RUN"), SHA256: os.Getenv("TEST_SHA256"), Folder: os.Getenv("TEST_FOLDER"),
			Image: os.Getenv("TEST_IMAGE"), Archive: os.Getenv("TEST_ARCHIVE")}
		if _, err := driverpack.Pack(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		return
	}
	top := t.TempDir()
	o := driverpack.Options{Folder: filepath.Join(top, "folder"), Image: filepath.Join(top, "image"),
		Archive: filepath.Join(top, "driver.tar.gz")}
	o.Run, o.SHA256 = store(t, nvidia().of(t, newDriver(amd64).tarOf(t)))
	archive := "" // digest of the first whole archive
	const most = 60
	for step := 1; ; step++ {
		if step == most {
			t.Fatalf("packing has more than %d steps", most)
		}
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), variable+"="+strconv.Itoa(step), "TEST_RUN="+o.Run, "TEST_SHA256="+o.SHA256,
			"TEST_FOLDER="+o.Folder, "TEST_IMAGE="+o.Image, "TEST_ARCHIVE="+o.Archive)
		out, err := c.CombinedOutput()
		if err != nil && c.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL { //nolint:forcetypeassert // Linux
			t.Fatalf("step %d: %v: %s", step, err, out)
		}
		entries, readErr := os.ReadDir(top)
		if readErr != nil || len(entries) > 6 {
			t.Fatalf("step %d: %v, %v; want at most the results and what one process has left", step, entries, readErr)
		}
		for _, e := range entries {
			switch e.Name() {
			case "folder":
				if _, _, err := driverfolder.Verify(t.Context(), o.Folder); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			case "image":
				if _, err := os.Stat(filepath.Join(o.Image, "index.json")); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			}
			if e.Name() == filepath.Base(o.Archive) {
				content, err := os.ReadFile(o.Archive)
				sum := fmt.Sprintf("%x", sha256.Sum256(content))
				if archive = cmp.Or(archive, sum); err != nil || sum != archive {
					t.Fatalf("step %d: the archive has the digest %s, and before %s: %v", step, sum, archive, err)
				}
			}
			if err == nil && strings.HasPrefix(e.Name(), ".") {
				t.Errorf("after the last run: %s", e.Name())
			}
		}
		if err == nil {
			if step < 25 {
				t.Errorf("only %d steps: the process is not killed at each file", step)
			}
			return
		}
		_ = os.RemoveAll(o.Folder)
		_ = os.RemoveAll(o.Image)
		_ = os.RemoveAll(o.Archive)
	}
}

// Of several processes that pack to one place at a time, one does it, and the others leave nothing.
func TestSeveralAtOnce(t *testing.T) {
	t.Parallel()
	o := driverpack.Options{Folder: filepath.Join(t.TempDir(), "folder")}
	o.Run, o.SHA256 = store(t, nvidia().of(t, newDriver(amd64).tarOf(t)))
	const number = 8
	results := make(chan error, number)
	for range number {
		go func() {
			_, err := driverpack.Pack(context.Background(), o)
			results <- err
		}()
	}
	done := 0
	for range number {
		if err := <-results; err == nil {
			done++
		} else if !strings.Contains(err.Error(), "exists") && !errors.Is(err, syscall.ENOTEMPTY) {
			t.Errorf("one failed: %v", err)
		}
	}
	if _, _, err := driverfolder.Verify(t.Context(), o.Folder); err != nil || done != 1 {
		t.Errorf("%d of %d packed: %v", done, number, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(o.Folder)); err != nil || len(entries) != 1 {
		t.Errorf("beside the folder: %v, %v", entries, err)
	}
}
