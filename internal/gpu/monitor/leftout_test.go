package monitor_test

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestGPULostFromTheStartIsFoundOnceItIsBack: no session that was opened before it was back can see
// it.
func TestGPULostFromTheStartIsFoundOnceItIsBack(t *testing.T) {
	t.Parallel()
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	p.Faults = []simulator.Fault{{Kind: simulator.KindLost, GPU: "3"}}
	text, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "dgx-h100.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, file)
		s.until("seven GPUs, and one left out", func(s inventory.Snapshot) bool {
			return len(s.GPUs) == 7 && len(s.LeftOut) == 1
		})
		s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		s.until("all good", allHealthy(8))
	})
}

// asked returns how often GPUs in trouble were asked again.
func asked(n *node) int { return n.retries }

// TestAnEventHasAGPUInTroubleAskedAtOnce: an event of the GPU ends its pause. One of another GPU
// does not, nor one that says that a GPU is lost, of which a driver may send many.
func TestAnEventHasAGPUInTroubleAskedAtOnce(t *testing.T) {
	n := newNode(2)
	// The next scan may call this GPU again without a new session.
	n.leftOut = []inventory.LeftOut{{Index: 7, Reason: "no permission"}}
	n.readings[uuid(1)] = inventory.Reading{RecoveryAction: good.RecoveryAction, Persistence: inventory.Known(false)}
	watch(t, n, func(t *testing.T, _ *monitor.Monitor) {
		n.set(func(n *node) {
			n.readings[uuid(0)] = inventory.Reading{Contact: inventory.ContactLost, Reason: "GPU is lost"}
		})
		pass(time.Hour) // the pauses are long now
		for _, step := range []struct {
			what  string
			event inventory.Event
			more  int
		}{
			{"an XID of the other GPU", inventory.Event{Kind: inventory.EventXID, UUID: uuid(1), XID: 31}, 0},
			{"a loss", inventory.Event{Kind: inventory.EventLost, UUID: uuid(0)}, 0},
			{"an XID", inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 31}, 1},
		} {
			const times = 10
			before := n.count(asked)
			step.event.GI, step.event.CI = inventory.Unattributed, inventory.Unattributed
			for range times {
				n.send(step.event)
				pass(10 * time.Second)
			}
			got := n.count(asked) - before
			// A pause may end meanwhile.
			if least, most := times*step.more, times*step.more+1; got < least || got > most {
				t.Errorf("after %s, ten times: asked %d times, want %d to %d", step.what, got, least, most)
			}
		}
		if got := n.count(opened); got != 1 {
			t.Errorf("%d sessions were opened", got)
		}
	})
}

// TestPausesOfAnotherGPUInTrouble begin again: it is asked a minute later, and not after the half
// hour of the first.
func TestPausesOfAnotherGPUInTrouble(t *testing.T) {
	n := newNode(2)
	n.leftOut = []inventory.LeftOut{{Index: 7, Reason: "no permission"}}
	watch(t, n, func(t *testing.T, _ *monitor.Monitor) {
		pass(48*time.Minute + 10*time.Second) // it was asked just now
		before := n.count(asked)
		if before != 5 {
			t.Fatalf("asked %d times within 48 minutes, want 5", before)
		}
		n.set(func(n *node) {
			n.leftOut = append(n.leftOut, inventory.LeftOut{Index: 8, Reason: "no permission"})
		})
		pass(90 * time.Second)
		if got := n.count(asked) - before; got != 1 {
			t.Errorf("asked %d times within 90 s, want once", got)
		}
		if got := n.count(opened); got != 1 {
			t.Errorf("%d sessions were opened for GPUs that need none", got)
		}
	})
}
