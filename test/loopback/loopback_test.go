package loopback_test

import (
	"net"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// TestFree: each address has a host of its own, which connections elsewhere do not use, and can be
// listened at.
func TestFree(t *testing.T) {
	hosts := map[string]bool{"127.0.0.1": true}
	for range 600 {
		address, err := loopback.Free(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		host, _, err := net.SplitHostPort(address)
		if err != nil || hosts[host] {
			t.Fatalf("%s has the host of another: %v", address, err)
		}
		hosts[host] = true
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
