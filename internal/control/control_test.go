package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
)

// start runs a server at socket until the test ends, and returns once it answers.
func start(t *testing.T, socket string) (stop func()) {
	t.Helper()
	server := control.NewServer(socket, map[string]control.Handler{
		"echo": func(_ context.Context, arguments json.RawMessage) (any, error) { return arguments, nil },
		"fail": func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("no GPU 9 here") },
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	deadline := time.After(time.Minute)
	for control.Call(ctx, socket, "echo", "there?", nil) != nil {
		select {
		case err := <-ended:
			t.Fatalf("Run() = %v", err)
		case <-deadline:
			t.Fatal("the server does not answer")
		case <-time.After(time.Millisecond):
		}
	}
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run() = %v, want nil when ctx ends", err)
		}
		ended <- nil
	}
	t.Cleanup(stop)
	return stop
}

func TestCalls(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	stop := start(t, socket)

	var got []string
	if err := control.Call(t.Context(), socket, "echo", []string{"a", "b"}, &got); err != nil || strings.Join(got, "") != "ab" {
		t.Errorf("echo = %q, %v", got, err)
	}
	if err := control.Call(t.Context(), socket, "fail", nil, nil); err == nil || err.Error() != "no GPU 9 here" {
		t.Errorf("fail = %v, want the handler's sentence", err)
	}
	if err := control.Call(t.Context(), socket, "eco", nil, nil); err == nil || !strings.Contains(err.Error(), "echo, fail") {
		t.Errorf("unknown call = %v, want the names of the known ones", err)
	}
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket = %v, %v; want mode 0600", info, err)
	}

	stop()
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("Call() = %v, want ErrNoDaemon", err)
	}
}

func TestASocketWithTheLongestPath(t *testing.T) {
	folder, err := os.MkdirTemp("", "control")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	start(t, filepath.Join(folder, strings.Repeat("s", 107-1-len(folder))))
}

func TestALivingDaemonKeepsItsSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	err := control.NewServer(socket, nil).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "--control-socket") {
		t.Errorf("second Run() = %v, want an error with the remedy", err)
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
		t.Errorf("the first daemon does not answer any more: %v", err)
	}
}

func TestASocketLeftBehindIsReplaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	start(t, socket)
}
