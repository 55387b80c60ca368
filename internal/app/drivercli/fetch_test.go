package drivercli_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/drivercli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverhost"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

// Variables of this test binary: program makes it the program gpu-driver, and killAtStep is the number
// of the step at which gpu-driver serve kills itself. Before and after each change of the disk and of
// the kernel is a step.
const (
	program    = "TEST_GPU_DRIVER"
	killAtStep = "TEST_KILL_AT_STEP"
)

func TestMain(m *testing.M) {
	if step, err := strconv.Atoi(os.Getenv(killAtStep)); err == nil {
		fmt.Fprintln(os.Stderr, serveUntil(step))
		os.Exit(1)
	}
	if os.Getenv(program) != "" {
		os.Exit(drivercli.Main())
	}
	m.Run()
}

// serveUntil does what gpu-driver serve does with the arguments of serve, until a step.
func serveUntil(step int) error {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	root, directory := flags.String("host-root", "", ""), flags.String("directory", "", "")
	sources, from := flags.String("sources", "", ""), flags.String("download-from", "", "")
	if err := flags.Parse(os.Args[2:]); err != nil {
		return err
	}
	host, err := driverhost.New(driverhost.Options{
		Directory: *directory, Sources: *sources, DownloadFrom: []string{*from}, Pause: time.Second,
		Kernel: &driverkernel.Kernel{Root: *root, Calls: driverkernel.SystemCalls{Root: *root}},
		Step: func(name string) {
			if step--; step == 0 {
				fmt.Fprintln(os.Stderr, "killed at the step:", name)
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {} // the signal comes
			}
		},
	})
	if err != nil {
		return err
	}
	defer host.Close()
	return host.Run(context.Background(), filepath.Join(*directory, "driver.sock"))
}

// serve starts a process gpu-driver serve that may download from a server, and waits until it answers.
func serve(t *testing.T, root, directory, from string, environment ...string) (process *exec.Cmd) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], "serve", "--host-root", root, "--directory", directory,
		"--sources", filepath.Join(root, "none"), "--download-from", from)
	c.Env = append(append(os.Environ(), program+"=1"), environment...)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(c) })
	poll.Until(t, "gpu-driver serve answers", func() bool {
		_, err := run(t, "status", "--socket", filepath.Join(directory, "driver.sock"))
		return err == nil
	})
	return c
}

// end kills a process.
func end(c *exec.Cmd) {
	_ = c.Process.Kill()
	_ = c.Wait()
}

// A driver comes by URL, and gpu-driver serve is killed in the middle of the download.
func TestFetch(t *testing.T) {
	t.Parallel()
	k, sources := standinkernel.New(t), t.TempDir()
	directory := filepath.Join(k.Root, "drivers")
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	archive, sum := standinkernel.Archive(t, filepath.Join(sources, "a"))
	const first = 1000 // bytes that the server sends before it hangs
	var mu sync.Mutex
	var ranges []string
	sent := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".run") {
			fmt.Fprint(w, "#!/bin/sh\n")
			return
		}
		mu.Lock()
		defer mu.Unlock()
		ranges = append(ranges, r.Header.Get("Range"))
		var begin int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &begin); err != nil {
			sent += first
			w.Header().Set("Content-Length", fmt.Sprint(len(archive)))
			_, _ = w.Write(archive[:first])
			w.(http.Flusher).Flush() //nolint:forcetypeassert // of net/http
			<-r.Context().Done()
			return
		}
		sent += len(archive) - begin
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(archive))
	}))
	t.Cleanup(server.Close)
	socket := filepath.Join(directory, "driver.sock")
	fetch := func(file, sum string) (string, error) {
		return run(t, "fetch", server.URL+file, "--sha256", sum, "--socket", socket)
	}
	killed := serve(t, k.Root, directory, server.URL+"/drivers")
	fetched := make(chan error, 1)
	go func() {
		_, err := fetch("/drivers/580.tar.gz?token=secret", sum)
		fetched <- err
	}()
	poll.Until(t, "the first part", func() bool {
		info, err := os.Stat(filepath.Join(directory, sum+".partial"))
		return err == nil && info.Size() == first
	})
	out, err := run(t, "status", "--socket", socket)
	if want := "download   " + server.URL + "/drivers/580.tar.gz: "; err != nil || !strings.Contains(out, want) ||
		!strings.Contains(out, " %, 0.0 MB of 0.") {
		t.Errorf("the status: %v\n%s\nwant: %s", err, out, want)
	}
	end(killed)
	if err := <-fetched; err == nil {
		t.Error("fetch does not say that gpu-driver serve has ended")
	}

	serve(t, k.Root, directory, server.URL+"/drivers")
	out, err = fetch("/drivers/580.tar.gz?token=secret", "sha256:"+sum)
	if err != nil || !strings.HasSuffix(out, "placed     580.95.05 sha256:"+digest+"\n") {
		t.Fatalf("fetch: %v\n%s", err, out)
	}
	if _, found, err := driverfolder.Verify(t.Context(), filepath.Join(directory, digest)); err != nil || found != digest {
		t.Errorf("the folder: %s, %v", found, err)
	}
	mu.Lock()
	if diff := cmp.Diff([]string{"", fmt.Sprintf("bytes=%d-", first)}, ranges); diff != "" || sent != len(archive) {
		t.Errorf("%d bytes sent, want %d; requests (-want +got):\n%s", sent, len(archive), diff)
	}
	mu.Unlock()
	if _, err := os.Stat(filepath.Join(directory, sum+".partial")); !os.IsNotExist(err) {
		t.Errorf("the downloaded archive is still there: %v", err)
	}
	for file, want := range map[string]string{
		"/drivers/a.run":    "it is not an archive of a driver folder: pack it first, with gpu-driver pack --archive",
		"/other/580.tar.gz": "is not below the URLs of --download-from",
	} {
		if _, err := fetch(file, standinkernel.Digest([]byte("#!/bin/sh\n"))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("fetch %s: %v, want %s", file, err, want)
		}
	}
}

// gpu-driver serve is killed before and after each change of the disk while it unpacks an archive. The
// next process needs no download, and leaves the folder alone.
func TestUnpackThatIsKilled(t *testing.T) {
	t.Parallel()
	k, sources := standinkernel.New(t), t.TempDir()
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	archive, sum := standinkernel.Archive(t, filepath.Join(sources, "a"))
	var requests atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		_, _ = w.Write(archive)
	}))
	t.Cleanup(server.Close)
	const least, most = 5, 30
	for step := 1; ; step++ {
		if step == most {
			t.Fatalf("it has more than %d steps", most)
		}
		directory := filepath.Join(t.TempDir(), "drivers")
		fetch := func() error {
			_, err := run(t, "fetch", server.URL+"/a", "--sha256", sum, "--socket", filepath.Join(directory, "driver.sock"))
			return err
		}
		requests.Store(0)
		c := serve(t, k.Root, directory, server.URL, killAtStep+"="+strconv.Itoa(step))
		wasWhole := fetch() == nil
		end(c)
		c = serve(t, k.Root, directory, server.URL)
		if err := fetch(); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if _, found, err := driverfolder.Verify(t.Context(), filepath.Join(directory, digest)); err != nil || found != digest {
			t.Errorf("step %d: the folder: %s, %v", step, found, err)
		}
		poll.Until(t, "nothing else is left", func() bool {
			entries, err := os.ReadDir(directory)
			return err == nil && len(entries) == 3 // the folder, the link of the archive and the socket
		})
		end(c)
		if n := requests.Load(); n != 1 {
			t.Errorf("step %d: %d requests", step, n)
		}
		if wasWhole {
			if step < least {
				t.Errorf("only %d steps", step)
			}
			return
		}
	}
}
