package serve_test

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// counts counts what Servers tells.
type counts struct {
	mu sync.Mutex // guards n
	n  map[string]int
}

func (c *counts) count(what ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[fmt.Sprint(what...)]++
}

func (c *counts) Registered(resource string, accepted bool) {
	c.count(resource, " accepted ", accepted)
}
func (c *counts) StreamEnded(resource, cause string) {
	if !slices.Contains(serve.Causes(), cause) {
		cause += ", which is none of the causes"
	}
	c.count(resource, " ended ", cause)
}
func (c *counts) Answered(method, code string, took time.Duration) {
	if took > 0 {
		c.count(method, " ", code)
	}
}

func (c *counts) now() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.n)
}

// TestMetrics: registrations, ends of streams with their causes, and calls are counted.
func TestMetrics(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := &counts{n: map[string]int{}}
	d := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		Metrics: c})
	d.offer(2)
	n.startKubelet(t, standin.V137)
	n.awaitAllocatable(t, 2)
	// Kubelet takes the list before it answers Register. Without the answer the registration counts as
	// one that was not accepted.
	accepted := func(times int) {
		t.Helper()
		poll.Until(t, fmt.Sprint(times, " registrations are accepted"),
			func() bool { return c.now()[gpu+" accepted true"] == times })
	}
	accepted(1)
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}); err != nil {
		t.Fatal(err)
	}
	mark := n.Mark()
	check(t, n.Restart())
	n.await(t, "listed by the next kubelet", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	accepted(2)
	mark = n.Mark()
	n.SetRegister(standin.RegisterRefuses)
	n.DropStream(gpu)
	n.await(t, "refused", func() bool { return n.count(standin.Refused, mark) > 0 })
	n.SetRegister(standin.RegisterAnswers)
	n.await(t, "registered again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	defer func() {
		if t.Failed() {
			t.Logf("counted %v", c.now())
		}
	}()
	poll.Until(t, "all is counted", func() bool {
		now := c.now()
		return now[gpu+" accepted true"] == 3 && now[gpu+" accepted false"] == n.count(standin.Refused, mark) &&
			// What of a restart is seen first differs: kubelet removes the sockets, ends the streams and is
			// another one.
			now[gpu+" ended kubelet-restarted"]+now[gpu+" ended kubelet-ended-stream"]+now[gpu+" ended socket-removed"] == 2 &&
			now["Allocate OK"] == 1
	})
	_, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: gpu, Count: 9})
	if err == nil {
		t.Error("nine of two devices were given out")
	}
}
