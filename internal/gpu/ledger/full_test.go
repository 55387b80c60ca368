package ledger_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// killedDir has the test's process write into the folder of this name until it is killed, instead
// of running tests.
const killedDir = "TEST_KILLED_DIR"

// writeUntilKilled notes one fault after the other, and prints the number of each that is on the
// disk.
func writeUntilKilled(dir string) error {
	p := open(dir)
	b := ledger.NewBook()
	for n := 0; ; n++ {
		b.Add(fmt.Sprintf("GPU-%d", n), "1", health.Device{Faults: []health.Fault{fault(48, n)}})
		p.Offer(b.Clone())
		for {
			found, err := ledger.Read(dir)
			if err != nil {
				return err
			}
			if faults, _ := found.Device(fmt.Sprintf("GPU-%d", n)); len(faults) == 1 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		fmt.Println(n) //nolint:forbidigo // the test reads it
	}
}

// TestKill: a process that is killed in the middle of a write leaves the file whole, with all that
// was on the disk.
func TestKill(t *testing.T) {
	for _, writes := range []int{1, 3, 10} {
		dir := t.TempDir()
		c := exec.CommandContext(t.Context(), os.Args[0])
		c.Env, c.Stderr = append(os.Environ(), killedDir+"="+dir), os.Stderr
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewScanner(out); writes > 0 && lines.Scan(); {
			writes--
		}
		_ = c.Process.Kill()
		_ = c.Wait()
		p := open(dir)
		p.end()
		if p.err != nil || writes > 0 || len(faultsOf(t, dir, "GPU-0")) != 1 {
			t.Errorf("%v, %d writes are missing", p.err, writes)
		}
	}
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(killedDir); dir != "" {
		_, _ = fmt.Fprintln(os.Stderr, writeUntilKilled(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestFullDisk: the old file stays, no other is left, it is said once, and written once there is
// room.
func TestFullDisk(t *testing.T) {
	if !ownprocess.Is(t) {
		return
	}
	dir := t.TempDir()
	first := open(dir)
	first.Offer(with("GPU-a", fault(48, 0)))
	first.end()
	old, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	b := with("GPU-a", fault(48, 0))
	b.Add("GPU-b", "1", health.Device{Faults: []health.Fault{fault(64, 0)}})

	ownprocess.LimitFiles(t, 400)
	const complaint = "Cannot write the fault ledger"
	p := open(dir)
	p.Offer(b)
	poll.Until(t, "the disk refuses, and the log says so", func() bool { return p.logged(complaint) > 0 })
	p.end() // it says that faults will be forgotten, as it cannot wait for room
	entries, err := os.ReadDir(dir)
	text, err2 := os.ReadFile(filepath.Join(dir, file))
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, old) || len(entries) != 1 || p.logged(complaint) != 1 || p.logged("will be lost") != 1 {
		t.Fatalf("%d files, %s\n%q", len(entries), text, p.log)
	}
	ownprocess.LimitFiles(t, 0)
	next := open(dir)
	next.Offer(b)
	next.end()
	compare(t, "faults of GPU-b", 1, len(faultsOf(t, dir, "GPU-b")))
}
