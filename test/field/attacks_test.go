package field_test

import (
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestScrapesBesideClientsThatDoNotRead: clients with a tiny window that never read keep Prometheus
// from nothing (E1).
func TestScrapesBesideClientsThatDoNotRead(t *testing.T) {
	t.Parallel()
	at, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	newHost(t, "--simulate=h100-mig-1g", "--mig-strategy=mixed", "--metrics-address", at)
	scrape := func() int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+at+"/metrics", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0
		}
		defer answer.Body.Close()
		_, _ = io.Copy(io.Discard, answer.Body)
		return answer.StatusCode
	}
	poll.Until(t, "it serves", func() bool { return scrape() == http.StatusOK })
	narrow := net.Dialer{Timeout: poll.Limit, Control: func(_, _ string, raw syscall.RawConn) error {
		var window, segment error
		err := raw.Control(func(fd uintptr) {
			window = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 1)
			segment = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 88)
		})
		for _, err := range []error{err, window, segment} {
			if err != nil {
				return err
			}
		}
		return nil
	}}
	for i := range 12 {
		c, err := narrow.DialContext(t.Context(), "tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil { // its answer is being written
			t.Fatal(err)
		}
		if code := scrape(); code != http.StatusOK {
			t.Fatalf("beside %d clients that do not read, a scrape is answered with %d", i+1, code)
		}
	}
}

// TestCDISpecsThatCannotBeWritten: the failure and what comes of it are one line each, however many
// GPUs it concerns (E11).
func TestCDISpecsThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	inTheWay := filepath.Join(t.TempDir(), "cdi")
	put(t, inTheWay, "a file in the place of the folder")
	h := newHost(t, "--simulate=dgx-h100", "--device-list-strategy=cdi-cri", "--cdi-dir="+inTheWay)
	const warning = "8 devices are not offered: write the CDI spec"
	poll.Until(t, "the plan warns", func() bool { return strings.Contains(h.log.String(), warning) })
	if lines := strings.Count(h.stop(), "not a directory"); lines != 2 {
		t.Errorf("the log says %d times that the folder is none:\n%s", lines, h.log.String())
	}
}
