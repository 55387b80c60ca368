package cli

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
)

// Variables of the test's own program: stuck makes it a daemon that never ends, and program the
// device plugin.
const (
	stuck   = "GPU_DEVICE_PLUGIN_TEST_STUCK"
	program = "GPU_DEVICE_PLUGIN_TEST_PROGRAM"
	longer  = "longer" // value of stuck: requests more time to end
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(program) != "", len(os.Args) > 1 && os.Args[1] == cuda.Command:
		os.Exit(DevicePlugin().Main())
	case os.Getenv(stuck) == "":
		os.Exit(m.Run())
	}
	os.Exit(untilStatus(func(ctx context.Context) error {
		fmt.Fprintln(os.Stdout, "here")
		<-ctx.Done()
		if os.Getenv(stuck) == longer {
			extendEnd(ctx)(endTimeout + time.Second)
			extendEnd(ctx)(time.Millisecond) // does not shorten the time
		}
		select {}
	}))
}

// TestAStuckProcessEnds: the process ends after a signal, whatever is stuck, including the output.
func TestAStuckProcessEnds(t *testing.T) {
	t.Parallel()
	const patience = time.Minute
	for _, name := range []string{"its output is read", "its output is not read", "it asks for longer"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0])
			// A program that measures its coverage writes a message at its end and waits for a
			// reader, unless it has a folder for coverage.
			mode, want := "1", endTimeout
			if name == "it asks for longer" {
				mode, want = longer, endTimeout+time.Second
			}
			cmd.Env = append(os.Environ(), stuck+"="+mode, "GORACE=atexit_sleep_ms=0", "GOCOVERDIR="+t.TempDir())
			var complaints bytes.Buffer
			cmd.Stderr = &complaints
			if name == "its output is not read" {
				unread, full := fullPipe(t)
				defer func() { _ = unread.Close() }()
				cmd.Stderr = full
			}
			output, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(output).ReadString('\n'); err != nil {
				t.Fatalf("it said %q: %v", line, err)
			}
			began := time.Now()
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("it ended with %v", err)
			}
			if endTimeout+forceTimeout > 2*time.Second {
				t.Errorf("it is ended by force after %v, want 2 s at most", endTimeout+forceTimeout)
			}
			if took := time.Since(began); took < want || took > patience/2 {
				t.Errorf("it took %v to end, want %v", took, want)
			}
			if name == "its output is read" && !strings.Contains(complaints.String(), "Ended by force") {
				t.Errorf("it said %q, want that it was ended by force", complaints.String())
			}
		})
	}
}

// fullPipe returns the ends of a full pipe.
func fullPipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = writer.Close() })
	if err := writer.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	for full := make([]byte, 1<<16); err == nil; {
		_, err = writer.Write(full)
	}
	return reader, writer
}
