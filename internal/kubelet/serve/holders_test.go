package serve_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestHolders follows devices from being offered to being free for certain, with a pod on one of
// them.
func TestHolders(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n, d := serving(t, v, c, 3)
		ids := []string{id(0), id(1), id(2)}
		says := func(what, reason string, pods ...string) {
			t.Helper()
			last := ""
			defer func() {
				if t.Failed() {
					t.Logf("it said last: %s", last)
				}
			}()
			poll.Until(t, what, func() bool {
				held, err := d.Holders(t.Context(), ids)
				last = ""
				for _, h := range held {
					last += h.Pod + " "
				}
				if err != nil {
					last += err.Error()
				}
				if len(held) != len(pods) || (err == nil) != (reason == "") ||
					err != nil && !strings.Contains(err.Error(), reason) {
					return false
				}
				for i, h := range held {
					if h.Pod != pods[i] && h.Pod != "with UID "+strings.TrimPrefix(pods[i], "default/") {
						return false
					}
				}
				return true
			})
		}
		withdraw := func() {
			t.Helper()
			d.offer(3, 0, 1, 2)
			n.awaitAllocatable(t, 0)
			c.Step(100 * time.Millisecond) // an answer of before is too old
		}
		says("offered", "is still offered")
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}); err != nil {
			t.Fatal(err)
		}
		says("held, and others offered", "is still offered", "default/p")
		withdraw()
		says("held, and no other may be given", "", "default/p")
		n.Remove("p")
		says("free, although the checkpoint may name the pod", "")

		// A pod that PodResources leaves out, on the device of one that it has shown.
		d.offer(3)
		n.awaitAllocatable(t, 3)
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 3}); err != nil {
			t.Fatal(err)
		}
		withdraw()
		says("shown", "", "default/p", "default/p", "default/p")
		n.Remove("p")
		says("all free", "")
		d.offer(3)
		n.awaitAllocatable(t, 3)
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: gpu, Count: 3,
			Init: true}); err != nil {
			t.Fatal(err)
		}
		withdraw()
		names := func(pods int) func() bool {
			return func() bool {
				held, _ := d.Holders(t.Context(), ids)
				c.Step(10 * time.Millisecond)
				return len(held) == pods
			}
		}
		poll.Until(t, "the pod is named", names(3))
		n.Remove("q")
		poll.Until(t, "the pod is forgotten", names(0))

		// A pod that was never shown: kubelet may be writing it down.
		d.offer(3)
		says("offered again", "is still offered")
		n.awaitAllocatable(t, 3)
		given := c.Now()
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "short", Name: "c", Resource: gpu, Count: 1}); err != nil {
			t.Fatal(err)
		}
		n.Remove("short")
		withdraw()
		poll.Until(t, "kubelet has forgotten the pod", func() bool {
			held, _ := d.Holders(t.Context(), ids)
			if c.Since(given) < 9*time.Second { // kubelet is slower than this clock
				c.Step(10 * time.Millisecond)
			}
			return len(held) == 0
		})
		says("given away a short time ago", "may have allocated it within the last 10s")
		c.Step(time.Minute)
		says("free", "")

		n.Stop()
		says("no kubelet", "it is not known which devices pods hold")
		if err := n.Resume(); err != nil {
			t.Fatal(err)
		}
		says("free", "")
	})
}

// TestAKubeletThatStartsHasNoUsersYet: a kubelet that was restarted answers before its directory
// shows that it is another one, and lists no pod then. The pod that holds a device holds it still.
func TestAKubeletThatStartsHasNoUsersYet(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		var starting func()
		k, err := standin.Start(standin.Options{Dir: n.dir, PodResourcesSocket: n.podResources, Version: v, Starting: func() {
			if starting != nil {
				starting()
			}
		}})
		check(t, err)
		n.Kubelet = k
		t.Cleanup(k.Stop)
		account := n.account(t, clock.RealClock{})
		d := n.startSetOn(t, serve.Collaborators{Accountant: account, Connections: account.Connections,
			Clock: clock.RealClock{}})
		d.offer(2)
		n.awaitAllocatable(t, 2)
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2}); err != nil {
			t.Fatal(err)
		}
		d.offer(2, 0, 1)
		users := func() string {
			held, err := d.Holders(t.Context(), []string{id(0), id(1)})
			return fmt.Sprint(held, err)
		}
		want := fmt.Sprint([]kubelet.HeldDevice{{Resource: gpu, ID: id(0), Pod: "default/p"},
			{Resource: gpu, ID: id(1), Pod: "default/p"}}, nil)
		poll.Until(t, "the pod is shown", func() bool { return users() == want })
		starting = func() {
			poll.Until(t, "the kubelet that starts answers",
				func() bool { _, err := d.Holders(t.Context(), []string{id(0)}); return err == nil })
			if got := users(); strings.Count(got, "{") != 2 {
				t.Errorf("while kubelet starts: %s, want a pod on both devices", got)
			}
		}
		n.SetPodsKnown(false)
		check(t, n.Restart())
	})
}

// TestUsersAreInOrder: the same devices are held by the same pods, whenever it is asked.
func TestUsersAreInOrder(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V137, clocktesting.NewFakeClock(time.Now()), 8)
	var ids []string
	for i := range 8 {
		ids = append(ids, id(i))
		if _, err := n.Admit(t.Context(), standin.Container{Pod: fmt.Sprint("p", i), Name: "c", Resource: gpu,
			Count: 1}); err != nil {
			t.Fatal(err)
		}
	}
	d.offer(8, 0, 1, 2, 3, 4, 5, 6, 7)
	for range 10 {
		held, _ := d.Holders(t.Context(), ids)
		if !slices.IsSortedFunc(held, func(a, b kubelet.HeldDevice) int { return strings.Compare(a.ID, b.ID) }) ||
			len(held) != 8 {
			t.Fatalf("held: %v", held)
		}
	}
}
