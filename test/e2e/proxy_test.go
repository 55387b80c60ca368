package e2e

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

const (
	proxyAddress     = "192.0.2.1:6444" // which testdata/node-agent names
	apiServerAddress = "127.0.0.1:6443"
)

// A proxy passes bytes on between the daemon's pod and the API server, which listens on the node's
// loopback alone.
type proxy struct {
	mu    sync.Mutex
	delay time.Duration // of each answer
}

// startProxy starts a proxy that ends with the test.
func startProxy(t *testing.T) *proxy {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", proxyAddress)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		running.Wait()
	})
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { p.serve(ctx, client) })
		}
	})
	return p
}

// setDelay has each answer of the API server come later from now on.
func (p *proxy) setDelay(delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = delay
}

// serve passes the bytes of a connection on until one of both sides ends it.
func (p *proxy) serve(ctx context.Context, client net.Conn) {
	defer client.Close()
	server, err := new(net.Dialer).DialContext(ctx, "tcp", apiServerAddress)
	if err != nil {
		return
	}
	defer server.Close()
	end := context.AfterFunc(ctx, func() {
		_ = client.Close()
		_ = server.Close()
	})
	defer end()
	go func() {
		_, _ = io.Copy(server, client)
		_ = server.Close()
	}()
	buffer := make([]byte, 32<<10)
	for {
		n, err := server.Read(buffer)
		if err != nil {
			return
		}
		p.mu.Lock()
		delay := p.delay
		p.mu.Unlock()
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		if _, err := client.Write(buffer[:n]); err != nil {
			return
		}
	}
}
