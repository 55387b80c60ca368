// Package exclusive reserves GPUs for MPS servers by the exclusive compute mode, and restores the
// modes afterwards. A file, the mark, names the GPUs whose modes must be restored: the next process
// restores what a killed process left behind.
package exclusive

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
	// SetComputeMode sets which processes may compute on a GPU, and returns the mode before.
	SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error)
}

// maxMark limits the bytes read from a mark.
const maxMark = 1 << 20

// modesTimeout limits the time to set the mode of one GPU. A real driver may have to wake the GPU
// first.
const modesTimeout = 10 * time.Second

// GPUs reserves each GPU for one process, the MPS server, while a resource claims the GPU. Create it
// with New. Its methods are safe for concurrent use.
type GPUs struct {
	modes Modes
	mark  string // exists while GPUs are in a mode set for MPS, and lists their UUIDs, a line each

	mu          sync.Mutex      // guards all following fields
	leftover    map[string]bool // GPUs of the mark found at the start, until claimed
	anyLeftover bool            // the mark found at the start lists no GPU, so it may mean any
	claims      map[string][]string
	original    map[string]inventory.ComputeMode // the modes to restore
}

// New returns GPUs that no resource claims yet. The mark is the path of a file. A mark that exists
// comes from a process that could not restore the modes. A GPU stays in the mark until its mode is
// restored, even across processes.
func New(modes Modes, mark string) *GPUs {
	e := &GPUs{
		modes: modes, mark: mark, leftover: map[string]bool{}, claims: map[string][]string{},
		original: map[string]inventory.ComputeMode{},
	}
	text, err := statefile.Read(mark, maxMark)
	for _, uuid := range strings.Fields(string(text)) {
		e.leftover[uuid] = true
	}
	e.anyLeftover = len(e.leftover) == 0 && !statefile.IsAbsent(err)
	return e
}

// Claim reserves the GPUs for a resource, instead of the GPUs that the resource claimed before. After
// an error, some of the GPUs may be reserved.
func (e *GPUs) Claim(ctx context.Context, resource string, uuids []string) error {
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
		if _, known := e.original[uuid]; known {
			continue
		}
		if (e.anyLeftover || e.leftover[uuid]) && before == inventory.ComputeExclusiveProcess {
			before = inventory.ComputeDefault
		}
		e.original[uuid] = before
		delete(e.leftover, uuid)
	}
	return nil
}

// Restore restores the modes of GPUs reserved for a resource by this process or an earlier one.
func (e *GPUs) Restore(ctx context.Context, resource string, uuids []string) error {
	var err error
	if e.mayBeLeftover(uuids) {
		err = e.Claim(ctx, resource, uuids)
	}
	return errors.Join(err, e.Release(ctx, resource))
}

func (e *GPUs) mayBeLeftover(uuids []string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.anyLeftover || slices.ContainsFunc(uuids, func(uuid string) bool { return e.leftover[uuid] })
}

// RestoreUnwanted restores the modes of GPUs that an earlier process left in exclusive mode and no
// daemon needs.
func (e *GPUs) RestoreUnwanted(ctx context.Context, wanted []string) error {
	e.mu.Lock()
	leftover := slices.Collect(maps.Keys(e.leftover))
	e.mu.Unlock()
	var all error
	for _, uuid := range leftover {
		if !slices.Contains(wanted, uuid) {
			all = errors.Join(all, e.Restore(ctx, uuid, []string{uuid})) // one by one, because some GPUs may be lost
		}
	}
	return all
}

// Release restores the modes of the GPUs of a resource, except those that another resource claims. A
// GPU that fails delays no other GPU.
func (e *GPUs) Release(ctx context.Context, resource string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.claims, resource)
	return e.releaseLocked(ctx)
}

// releaseLocked restores the modes of the GPUs that no resource claims.
func (e *GPUs) releaseLocked(ctx context.Context) error {
	claimed := slices.Concat(slices.Collect(maps.Values(e.claims))...)
	var all error
	for uuid, mode := range e.original {
		if slices.Contains(claimed, uuid) {
			continue
		}
		if _, err := e.set(ctx, uuid, mode); err != nil {
			all = errors.Join(all, err)
			continue
		}
		delete(e.original, uuid)
	}
	return errors.Join(all, e.markLocked(nil))
}

// markLocked writes the GPUs whose modes must be restored later, and the next ones, to the mark. It
// removes an empty mark.
func (e *GPUs) markLocked(next []string) error {
	uuids := slices.Concat(next, slices.Collect(maps.Keys(e.original)), slices.Collect(maps.Keys(e.leftover)))
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

func (e *GPUs) set(ctx context.Context, uuid string,
	mode inventory.ComputeMode) (inventory.ComputeMode, error) {
	ctx, cancel := context.WithTimeout(ctx, modesTimeout)
	defer cancel()
	return e.modes.SetComputeMode(ctx, uuid, mode)
}
