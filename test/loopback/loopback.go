// Package loopback finds TCP addresses for programs under test that listen themselves.
package loopback

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
)

// given counts the addresses that were returned.
var given atomic.Uint32

// Free returns host:port on loopback at which nobody listens. No other call returns the same host in this process, and connections to
// other hosts do not come from it: so the port stays free until the program under test listens.
func Free(ctx context.Context) (string, error) {
	n := given.Add(1)
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+os.Getpid()%250, n/250%250, 1+n%250))
	if err != nil {
		return "", fmt.Errorf("find a free address: %w", err)
	}
	return l.Addr().String(), l.Close()
}
