package serve

import (
	"context"
	"errors"
	"io/fs"
	"testing"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// TestGapsInTheEvidence: what tells that a pod may hold a device that no account names.
func TestGapsInTheEvidence(t *testing.T) {
	t.Parallel()
	incarnation := feed.New(uint64(1))
	var unreadable, failed error
	var meanwhile func()
	connections := uint64(0)
	key := keyOf(gpuName, "GPU-0")
	a := accounts{Collaborators: Collaborators{Incarnation: incarnation, Clock: clock.RealClock{},
		Connections: func() uint64 { return connections },
		Checkpoint: func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Held: []kubelet.HeldDevice{{Resource: gpuName, ID: "GPU-0", Pod: "saved"}}}, unreadable
		},
		Accountant: heldAccount(func() ([]kubelet.HeldDevice, error) {
			if meanwhile != nil {
				meanwhile()
			}
			if failed != nil {
				return nil, failed
			}
			return []kubelet.HeldDevice{{Resource: gpuName, ID: "GPU-0", Pod: "told"}}, nil
		})}}
	away, damaged, connects := errors.New("away"), errors.New("damaged"), func() { connections++ }
	for _, step := range []struct {
		name               string
		kubelet            uint64
		failed, unreadable error
		meanwhile          func()
		gap                string
		want               holders.Holder
	}{
		{"PodResources has never answered", 1, away, nil, nil, "", holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"it answers", 1, nil, nil, nil, "", holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"it answers no more", 1, away, nil, nil, "away", holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"nor later", 1, away, nil, nil, "away", holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"that of another kubelet has not answered", 2, away, nil, nil, "", holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"the checkpoint is damaged", 2, nil, damaged, nil, "damaged", holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"there is none", 2, nil, fs.ErrNotExist, nil, fs.ErrNotExist.Error(), holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"there is none, and PodResources fails", 2, away, fs.ErrNotExist, nil, fs.ErrNotExist.Error(),
			holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"it is asked by the first connection", 2, nil, nil, connects, "", holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"it is asked by another connection", 2, nil, nil, connects, "kubelet has just restarted",
			holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"it is asked by the same connection", 2, nil, nil, nil, "", holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"it cannot be asked", 2, kubelet.ErrNoPodResources, nil, nil, kubelet.ErrNoPodResources.Error(),
			holders.Holder{Pod: "saved", CheckpointOnly: true}},
		{"kubelet restarts meanwhile", 2, nil, nil, func() { incarnation.Publish(3) }, "kubelet has just restarted",
			holders.Holder{Pod: "told", CheckpointOnly: false}},
		{"no kubelet", 0, kubelet.ErrNoPodResources, damaged, nil, "the kubelet is not running",
			holders.Holder{Pod: "saved", CheckpointOnly: true}},
	} {
		incarnation.Publish(step.kubelet)
		failed, unreadable, meanwhile = step.failed, step.unreadable, step.meanwhile
		e := a.read(t.Context())
		if e.UnknownBecause != step.gap || e.Kubelet != step.kubelet || e.Held[key] != step.want ||
			e.Unreadable != (step.unreadable != nil && step.kubelet > 0) {
			t.Errorf("%s: %+v, want the gap %q and %+v", step.name, e, step.gap, step.want)
		}
		told := holders.Source{Incarnation: step.kubelet, Connections: connections}
		if step.gap != "" || step.failed != nil {
			told = holders.Source{}
		}
		if e.Source != told || e.NoCheckpoint != (step.name == "there is none") ||
			e.NoPodResources != (step.gap == kubelet.ErrNoPodResources.Error()) {
			t.Errorf("%s: told by %v, absent %v, unasked %v", step.name, e.Source, e.NoCheckpoint, e.NoPodResources)
		}
	}
}

// A heldAccount says who holds devices.
type heldAccount func() ([]kubelet.HeldDevice, error)

func (h heldAccount) Held(context.Context) ([]kubelet.HeldDevice, error) { return h() }
func (heldAccount) Allocating() (ended func(bool))                       { return func(bool) {} }

// TestWhatOthersServe: PodResources says what kubelet has in memory, and the checkpoint, if that is
// not answered, what it has saved.
func TestWhatOthersServe(t *testing.T) {
	t.Parallel()
	for _, err := range []error{nil, errors.New("away")} {
		account := &notedAccount{answer: func(int) ([]string, error) { return []string{"told"}, err }}
		a := accounts{Collaborators: Collaborators{Registrar: &sharedDirectory{listening: err != nil}, Accountant: account}}
		e := listing.Reading{Account: holders.Account{Listed: map[string][]string{gpuName: {"saved"}}}}
		a.readOthers(t.Context(), &e)
		if got, want := e.Healthy[gpuName][0], map[bool]string{true: "told", false: "saved"}[err == nil]; got != want ||
			e.Alone != (err == nil) {
			t.Errorf("PodResources answers %v: healthy are %q, want %q; alone: %v", err, got, want, e.Alone)
		}
	}
}
