package holders_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
)

// TestGapsInTheEvidence: what tells that a pod may hold a device that no account names. The steps
// are readings of one process.
func TestGapsInTheEvidence(t *testing.T) {
	t.Parallel()
	away, damaged := errors.New("away"), errors.New("damaged")
	var e holders.Evidence
	for _, step := range []struct {
		name               string
		kubelet            uint64
		failed, unreadable error
		before, connected  uint64
		restarted, none    bool // the kubelet has restarted; there is no PodResources
		gap                string
	}{
		{name: "PodResources has never answered", kubelet: 1, failed: away},
		{name: "it answers", kubelet: 1},
		{name: "it answers no more", kubelet: 1, failed: away, gap: "away"},
		{name: "nor later", kubelet: 1, failed: away, gap: "away"},
		{name: "that of another kubelet has not answered", kubelet: 2, failed: away},
		{name: "the checkpoint is damaged", kubelet: 2, unreadable: damaged, gap: "damaged"},
		{name: "there is none", kubelet: 2, unreadable: fs.ErrNotExist, gap: fs.ErrNotExist.Error()},
		{name: "there is none, and PodResources fails", kubelet: 2, failed: away, unreadable: fs.ErrNotExist,
			gap: fs.ErrNotExist.Error()},
		{name: "it is asked by the first connection", kubelet: 2, connected: 1},
		{name: "it is asked by another connection", kubelet: 2, before: 1, connected: 2, gap: "the kubelet has just restarted"},
		{name: "it is asked by the same connection", kubelet: 2, before: 2, connected: 2},
		{name: "it cannot be asked", kubelet: 2, failed: away, none: true, gap: "away"},
		{name: "kubelet restarts meanwhile", kubelet: 2, restarted: true, gap: "the kubelet has just restarted"},
		{name: "no kubelet", failed: away, unreadable: damaged, none: true, gap: "the kubelet is not running"},
	} {
		r := holders.Answers{Checkpoint: holders.Account{Kubelet: step.kubelet, Held: names("saved", true)},
			CheckpointErr: step.unreadable,
			NoCheckpoint:  errors.Is(step.unreadable, fs.ErrNotExist), PodResourcesErr: step.failed, NoPodResources: step.none,
			Restarted: step.restarted, Before: step.before, Connected: step.connected}
		want := names("saved", true)[device]
		if step.failed == nil {
			r.PodResources, want = names("told", false), names("told", false)[device]
		}
		a := e.Account(r)
		if a.UnknownBecause != step.gap || a.Held[device] != want ||
			a.Unreadable != (step.unreadable != nil && step.kubelet > 0) ||
			a.Partial != (step.gap == "damaged" || step.name == "there is none" || step.gap == "away") ||
			a.NoCheckpoint != (step.name == "there is none") || a.NoPodResources != (step.none && step.kubelet > 0) {
			t.Errorf("%s: %+v, want the gap %q and %+v", step.name, a, step.gap, want)
		}
		source := holders.Source{Incarnation: step.kubelet, Connections: step.connected}
		if step.gap != "" || step.failed != nil {
			source = holders.Source{}
		}
		if a.Source != source {
			t.Errorf("%s: named by %v, want %v", step.name, a.Source, source)
		}
	}
}
