package mps

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const wantsA = `{"devices":[{"uuid":"GPU-a"}]}`

// claimFiles makes files of claims in a new root, each with a text, and returns the root.
func claimFiles(t *testing.T, texts map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range texts {
		path := filepath.Join(root, claimsFolder, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestTasksOfClaims: tasks of released claims stop, except tasks that remove leftovers.
func TestTasksOfClaims(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{"wanted.json": wantsA, "ending.ending": wantsA, "odd.json": "{",
		"back.json": wantsA})
	over := make(chan struct{})
	close(over)
	var cancelled []string
	tasks := map[string]*task{}
	for name, t := range map[string]task{
		"wanted": {}, "given back": {}, "ending": {isEnding: true}, "back": {isEnding: true}, "over": {done: over},
		"removed": {done: over, isEnding: true},
	} {
		t.cancel = func() { cancelled = append(cancelled, name) }
		tasks[name] = &t
	}
	s := NewSupervisor(root, nil, nil)
	s.root = filepath.Join(root, claimsFolder, "wanted.json") // claims is no folder there
	s.adjustClaims(t.Context(), nil, tasks)
	if len(cancelled) > 0 {
		t.Errorf("tasks that are ended although the claims cannot be listed: %v", cancelled)
	}
	s.root = root
	s.adjustClaims(t.Context(), nil, tasks)
	slices.Sort(cancelled)
	if diff := cmp.Diff([]string{"given back", "over"}, cancelled); diff != "" {
		t.Errorf("tasks that are ended (-want +got):\n%s", diff)
	}
	var left []string
	for name := range tasks {
		left = append(left, name)
	}
	slices.Sort(left)
	if diff := cmp.Diff([]string{"back", "ending", "given back", "wanted"}, left); diff != "" {
		t.Errorf("tasks that there are (-want +got):\n%s", diff)
	}
}

// TestClaimEndIsRetried until the mode of the GPU is restored. Until then the claim's files stay.
func TestClaimEndIsRetried(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{"uid.ending": wantsA, "uid/pipe/x": ""})
	mark := filepath.Join(root, exclusiveMark)
	if err := os.WriteFile(mark, []byte("GPU-a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	modes := &failingModes{}
	modes.failures.Store(2)
	modes.check = func() {
		for _, name := range []string{"uid.ending", "uid"} {
			if _, err := os.Stat(filepath.Join(root, ClaimDir(name))); err != nil {
				t.Errorf("before the GPU is set back: %v", err)
			}
		}
	}
	g := ClaimDaemon{Devices: []ClaimDevice{{UUID: "GPU-a"}}, Exclusive: true}.group("uid")
	ended := NewSupervisor(root, nil, nil).end(t.Context(), exclusive.New(modes, mark), g,
		filepath.Join(root, ClaimDir("uid")))
	poll.Until(t, "the end", func() bool {
		select {
		case <-ended.done:
			return true
		default:
			return false
		}
	})
	for _, name := range []string{"uid.ending", "uid"} {
		if _, err := os.Stat(filepath.Join(root, ClaimDir(name))); err == nil {
			t.Errorf("%s is left", name)
		}
	}
	if modes.mode != inventory.ComputeDefault || modes.failures.Load() >= 0 {
		t.Errorf("the GPU is in mode %v, after %d failures less than wanted", modes.mode, modes.failures.Load())
	}
	wait := NewSupervisor(root, nil, nil).end(t.Context(), exclusive.New(modes, mark), g,
		filepath.Join(root, ClaimDir("none")))
	<-wait.done // there is nothing to end
}

// failingModes is a GPU whose mode cannot be set some times.
type failingModes struct {
	failures atomic.Int32
	mode     inventory.ComputeMode
	check    func()
}

func (m *failingModes) SetComputeMode(
	_ context.Context, _ string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	m.check()
	if m.failures.Add(-1) >= 0 {
		return 0, errors.New("not now")
	}
	before := m.mode
	m.mode = mode
	return before, nil
}
