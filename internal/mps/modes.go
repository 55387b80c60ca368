package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Modes sets the compute modes of GPUs.
type Modes interface {
	// SetComputeMode says which processes may compute on a GPU, and returns what held before.
	SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error)
}

// exclusiveMark, in the root, is there while GPUs are in a mode that is not their own, and has the
// UUID of each in a line. A mark that is there at the start was left by a process that could not
// set them back. Each GPU stays in it until it is set back, whatever ends before.
const exclusiveMark = ".exclusive"

// maxMark is how many bytes of a mark are read.
const maxMark = 1 << 20

// modesTimeout bounds setting the mode of one GPU. A real driver may have to wake it first.
const modesTimeout = 10 * time.Second

// exclusive leaves GPUs to one process each, the MPS server, as long as a resource claims them.
type exclusive struct {
	modes Modes
	mark  string

	mu     sync.Mutex      // guards all following fields
	left   map[string]bool // GPUs of the mark that was there at the start, until they are claimed
	any    bool            // that mark named no GPU, as those of earlier versions: it may be any
	claims map[string][]string
	before map[string]inventory.ComputeMode // what to set GPUs back to
}

func newExclusive(modes Modes, mark string) *exclusive {
	e := &exclusive{
		modes: modes, mark: mark, left: map[string]bool{}, claims: map[string][]string{}, before: map[string]inventory.ComputeMode{},
	}
	text, err := statefile.Read(mark, maxMark)
	for _, uuid := range strings.Fields(string(text)) {
		e.left[uuid] = true
	}
	e.any = len(e.left) == 0 && !statefile.IsAbsent(err)
	return e
}

// claim leaves these GPUs to MPS for a resource, in place of those that it claimed before.
func (e *exclusive) claim(ctx context.Context, resource string, uuids []string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.claims[resource] = uuids
	if err := e.releaseLocked(ctx); err != nil {
		return err
	}
	if err := e.markLocked(uuids); err != nil {
		return err
	}
	for _, uuid := range uuids {
		before, err := e.set(ctx, uuid, inventory.ComputeExclusiveProcess)
		if err != nil {
			return err
		}
		if _, known := e.before[uuid]; known {
			continue
		}
		if (e.any || e.left[uuid]) && before == inventory.ComputeExclusiveProcess {
			before = inventory.ComputeDefault
		}
		e.before[uuid] = before
		delete(e.left, uuid)
	}
	return nil
}

// restore sets GPUs back that this process left to MPS for a resource, or an earlier one that could
// not set them back.
func (e *exclusive) restore(ctx context.Context, resource string, uuids []string) error {
	var err error
	if e.mayBeLeft(uuids) {
		err = e.claim(ctx, resource, uuids)
	}
	return errors.Join(err, e.release(ctx, resource))
}

func (e *exclusive) mayBeLeft(uuids []string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.any || slices.ContainsFunc(uuids, func(uuid string) bool { return e.left[uuid] })
}

// restoreUnwanted sets GPUs back that an earlier process could not set back and that nobody wants
// any more.
func (e *exclusive) restoreUnwanted(ctx context.Context, wanted []string) error {
	e.mu.Lock()
	left := slices.Collect(maps.Keys(e.left))
	e.mu.Unlock()
	var all error
	for _, uuid := range left {
		if !slices.Contains(wanted, uuid) {
			all = errors.Join(all, e.restore(ctx, uuid, []string{uuid})) // each for itself: another one may be lost
		}
	}
	return all
}

// release sets the GPUs of a resource back to what they were.
func (e *exclusive) release(ctx context.Context, resource string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.claims, resource)
	return e.releaseLocked(ctx)
}

// releaseLocked sets the GPUs that no resource claims back.
func (e *exclusive) releaseLocked(ctx context.Context) error {
	claimed := slices.Concat(slices.Collect(maps.Values(e.claims))...)
	var all error
	for uuid, mode := range e.before {
		if slices.Contains(claimed, uuid) {
			continue
		}
		if _, err := e.set(ctx, uuid, mode); err != nil {
			all = errors.Join(all, err)
			continue
		}
		delete(e.before, uuid)
	}
	return errors.Join(all, e.markLocked(nil))
}

// markLocked has the mark name all GPUs that are to be set back, and those that are about to be
// exclusive. Without any it is removed.
func (e *exclusive) markLocked(next []string) error {
	uuids := slices.Concat(next, slices.Collect(maps.Keys(e.before)), slices.Collect(maps.Keys(e.left)))
	slices.Sort(uuids)
	var err error
	if uuids = slices.Compact(uuids); len(uuids) > 0 {
		err = statefile.Replace(e.mark, []byte(strings.Join(uuids, "\n")+"\n"), 0o600)
	} else {
		err = statefile.Remove(e.mark)
	}
	if err != nil {
		return fmt.Errorf("mark GPUs as exclusive: %w", err)
	}
	return nil
}

func (e *exclusive) set(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error) {
	ctx, cancel := context.WithTimeout(ctx, modesTimeout)
	defer cancel()
	return e.modes.SetComputeMode(ctx, uuid, mode)
}
