package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Modes sets the compute modes of GPUs.
type Modes interface {
	// SetComputeMode says which processes may compute on a GPU, and returns what held before.
	SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error)
}

// exclusiveMark, in the root, is there while GPUs are in a mode that is not their own. A mark that is there at the start
// was left by a process that was killed, and could not set them back.
const exclusiveMark = ".exclusive"

// modesTimeout bounds setting the mode of one GPU. A real driver may have to wake it first.
const modesTimeout = 10 * time.Second

// exclusive leaves GPUs to one process each, the MPS server, as long as a resource claims them.
type exclusive struct {
	modes Modes
	mark  string

	mu     sync.Mutex // guards all following fields
	left   bool       // the mark was there at the start
	claims map[string][]string
	before map[string]inventory.ComputeMode // what to set GPUs back to
}

func newExclusive(modes Modes, mark string) *exclusive {
	_, err := os.Stat(mark)
	return &exclusive{
		modes: modes, mark: mark, left: err == nil, claims: map[string][]string{}, before: map[string]inventory.ComputeMode{},
	}
}

// claim leaves these GPUs to MPS for a resource, in place of those that it claimed before.
func (e *exclusive) claim(ctx context.Context, resource string, uuids []string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.claims[resource] = uuids
	if err := e.releaseLocked(ctx); err != nil {
		return err
	}
	if err := files.Replace(e.mark, nil, 0o600); err != nil {
		return fmt.Errorf("mark GPUs as exclusive: %w", err)
	}
	for _, uuid := range uuids {
		before, err := e.set(ctx, uuid, inventory.ComputeExclusiveProcess)
		if err != nil {
			return err
		}
		if _, known := e.before[uuid]; known {
			continue
		}
		if e.left && before == inventory.ComputeExclusiveProcess {
			before = inventory.ComputeDefault
		}
		e.before[uuid] = before
	}
	return nil
}

// restore sets GPUs back that this process left to MPS for a resource, or an earlier one that could not set them back.
func (e *exclusive) restore(ctx context.Context, resource string, uuids []string) error {
	if e.left {
		if err := e.claim(ctx, resource, uuids); err != nil {
			return err
		}
	}
	return e.release(ctx, resource)
}

// release sets the GPUs of a resource back to what they were.
func (e *exclusive) release(ctx context.Context, resource string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.claims, resource)
	return e.releaseLocked(ctx)
}

// releaseLocked sets the GPUs that no resource claims back. The mark stays while one of them cannot be.
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
	if all != nil || len(e.before) > 0 {
		return all
	}
	if err := files.Remove(e.mark); err != nil {
		return fmt.Errorf("remove the mark of exclusive GPUs: %w", err)
	}
	return nil
}

func (e *exclusive) set(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error) {
	ctx, cancel := context.WithTimeout(ctx, modesTimeout)
	defer cancel()
	return e.modes.SetComputeMode(ctx, uuid, mode)
}
