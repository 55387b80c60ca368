package lead_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A setClock has a settable time of day, and ticks when the test says so.
type setClock struct {
	fastClock
	ticks chan time.Time

	mu sync.Mutex
	by time.Duration // how far the clock was set
}

func (c *setClock) set(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by = by
}

func (c *setClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.by).Round(0) // without the monotonic clock
}

func (c *setClock) NewTicker(time.Duration) clock.Ticker { return c }

// C implements clock.Ticker.
func (c *setClock) C() <-chan time.Time { return c.ticks }

// Stop implements clock.Ticker.
func (*setClock) Stop() {}

// TestClockChange: the clock goes forward and back by an hour while a process waits for the lead,
// and while it leads. The lead is neither taken early or late nor lost. The test process leads
// first.
func TestClockChange(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	leading, err := net.Listen("unix", filepath.Join(dir, "lead.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer leading.Close()
	clock := &setClock{ticks: make(chan time.Time)}
	l := lead.New(lead.Options{Dir: dir, Name: "b", Token: "b", Clock: clock})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	standby, err := leading.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer standby.Close()
	messages := json.NewDecoder(standby)
	asked := func(n int) { // by how much the clock is set is another each time
		clock.set(time.Duration(n%3-1) * time.Hour)
		clock.ticks <- clock.Now()
		var m struct {
			Ping bool `json:"ping"`
		}
		if err := messages.Decode(&m); err != nil || !m.Ping {
			t.Fatalf("the standby asks %+v, %v", m, err)
		}
	}
	for n := range 30 {
		asked(n)
		answer := fmt.Sprintf(`{"told":%d}`, n)
		if _, err := standby.Write([]byte(answer)); err != nil {
			t.Fatal(err)
		}
		poll.Until(t, "the standby has heard "+answer,
			func() bool { return string(l.Received().Value()) == fmt.Sprint(n) })
	}
	for n := range 5 {
		asked(n)
	}
	if l.Statuses().Value().Leads {
		t.Error("the lead was taken before its time")
	}
	clock.ticks <- clock.Now()
	poll.Until(t, "the process leads", func() bool { return l.Statuses().Value().Leads })
	for n := range 3 {
		clock.set(time.Duration(n-1) * time.Hour)
		if err := l.Check(); err != nil || !l.Statuses().Value().Leads {
			t.Errorf("the clock was set: %v", err)
		}
	}
}
