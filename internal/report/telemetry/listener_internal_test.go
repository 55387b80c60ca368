package telemetry

import (
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"
)

// scarce is a listener that first lacks descriptors and later accepts one connection.
type scarce struct {
	net.Listener
	until time.Time
	conn  net.Conn
}

func (s *scarce) Accept() (net.Conn, error) {
	switch conn := s.conn; {
	case time.Now().Before(s.until):
		return nil, errors.New("too many open files")
	case conn != nil:
		s.conn = nil
		return conn, nil
	}
	return nil, net.ErrClosed
}

// TestAcceptErrors: a failure to accept connections is logged once. Later connections are accepted.
func TestAcceptErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		conn, other := net.Pipe()
		defer other.Close()
		l := &limitedListener{Listener: &scarce{until: time.Now().Add(time.Minute), conn: conn}, most: 1, log: log}
		accepted, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer accepted.Close()
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after the listener was closed: %v", err)
		}
		logged := log.GetSink().(ktesting.Underlier).GetBuffer().String()
		if n := strings.Count(logged, "Cannot accept connections"); n != 1 {
			t.Errorf("logged %d times: %s", n, logged)
		}
	})
}
