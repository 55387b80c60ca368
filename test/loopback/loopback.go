// Package loopback finds addresses for programs under test that listen themselves: TCP addresses,
// and folders for Unix sockets.
package loopback

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
)

// given counts the addresses that were returned.
var given atomic.Uint32

// Free returns host:port on loopback at which nobody listens. No other call returns the same host
// in this process, and connections to other hosts do not come from it: so the port stays free until
// the program under test listens.
func Free(ctx context.Context) (string, error) {
	n := given.Add(1)
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+os.Getpid()%250, n/250%250,
		1+n%250))
	if err != nil {
		return "", fmt.Errorf("find a free address: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// Folder returns a new folder that is there until the end of the test. Its path is shorter than
// that of t.TempDir: the path of a socket has 107 bytes at most.
func Folder(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	return folder
}
