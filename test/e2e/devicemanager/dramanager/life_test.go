//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// TestRollOut: while the last version goes and the next one is there, every pod starts at the first
// attempt, and what the last one prepared is unprepared by the next. The two have no lead here, so
// no claim may come or go while the next one reads the records: of real processes one alone has
// records (TestOneDecides of test/daemon).
func TestRollOut(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	last := n.startRegistered()
	before := n.pod("gpu-7")
	n.runs(before)
	next := n.startRegistered()
	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		started := 0
		for {
			pod := n.pod("gpu-" + strconv.Itoa(started%7))
			if err := n.prepare(pod); err != nil {
				t.Errorf("pod %d: %v", started, err)
			}
			if err := n.manager().UnprepareResources(t.Context(), pod); err != nil {
				t.Errorf("pod %d: %v", started, err)
			}
			started++
			select {
			case <-stop:
				ended <- started
				return
			default:
			}
		}
	}()
	calls := next.calls(preparing)
	n.eventually("the next one prepares claims", func() error {
		if next.calls(preparing) < calls+20 {
			return fmt.Errorf("it has prepared %d", next.calls(preparing))
		}
		return nil
	})
	last.stop()
	calls = next.calls(preparing)
	n.eventually("the next one goes on", func() error {
		if next.calls(preparing) < calls+100 {
			return fmt.Errorf("it has prepared %d", next.calls(preparing))
		}
		return nil
	})
	close(stop)
	t.Logf("%d pods started and ended", <-ended)
	n.ends(before)
	if n.recorded(before) {
		t.Error("the record of the last one's claim is still there")
	}
}

// TestKilled: a driver that was killed leaves its socket and its records. The next one removes the
// socket, and goes on with the records.
func TestKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	kill := n.startProcess()
	pod := n.pod("gpu-0")
	want := n.runs(pod)
	kill()
	left := n.sockets()
	if len(left) != 1 {
		t.Fatalf("the process left %q", left)
	}
	if got := n.devices(pod); !slices.Equal(got, want) {
		t.Errorf("while no driver runs a container gets %q, and %q before", got, want)
	}
	n.startRegistered()
	n.eventually("the socket that was left is removed", func() error {
		if now := n.sockets(); slices.Contains(now, left[0]) {
			return fmt.Errorf("there are %q", now)
		}
		return nil
	})
	if !n.recorded(pod) {
		t.Error("the record is gone")
	}
	// A GPU that a claim has is not given to another one by mistake of the scheduler.
	if err := n.prepare(n.pod("gpu-0")); err == nil || !strings.Contains(err.Error(), pod.Name) {
		t.Errorf("a second claim for the GPU: %v", err)
	}
	n.ends(pod)
	if n.recorded(pod) {
		t.Error("the record is still there")
	}
}

// TestAPIServerAway: without API server a claim is not prepared, and the pod's Event says why; then
// it is. A pod ends without it.
func TestAPIServerAway(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	d := n.startRegistered()
	pod, running := n.pod("gpu-0"), n.pod("gpu-1")
	n.runs(running)
	// kubelet reads the claim first: the API server goes between the two
	d.on(func(_ context.Context, call, _ string) error {
		if call == reading {
			n.api.Stop()
		}
		return nil
	})
	err := n.prepare(pod)
	if err == nil || !strings.Contains(err.Error(), "read the claim: read ResourceClaim default/"+pod.Name+
		": ask the API server") {
		t.Errorf("the error is %v", err)
	}
	t.Log(err)
	d.on(nil)
	n.ends(running)
	if err := n.prepare(pod); err == nil {
		t.Error("prepared without API server")
	}
	if err := n.api.Resume(); err != nil {
		t.Fatal(err)
	}
	n.runs(pod)
	if n.recorded(running) {
		t.Error("the record of the pod that ended is still there")
	}
}

// TestLoop: two hundred claims are prepared and unprepared, and nothing is left of them.
func TestLoop(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	n.startRegistered()
	var pods []*v1.Pod
	for i := range 200 {
		pod := n.pod("gpu-" + strconv.Itoa(i%8))
		n.runs(pod)
		n.ends(pod)
		pods = append(pods, pod)
	}
	for _, pod := range pods {
		if n.recorded(pod) {
			t.Errorf("the record of %s is left", pod.Name)
		}
	}
}
