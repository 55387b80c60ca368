package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// maxHangs is how often in a row calls about a GPU may hang until the GPU is left alone.
const maxHangs = 2

// A slot is an NVML index of a session. What a job learns of the GPU there it writes into a copy,
// which is taken over when the job is done: a job that hangs keeps its copy.
type slot struct {
	record *callRecord
	api    *api // for calls about the GPU
	gpu    *gpu
	gpm    *gpm // nil before the first sample, and while a job has it

	visited bool        // the next scan does not visit the GPU again
	met     atomic.Bool // Open is over: events of the GPU are registered for before a wait
	// the GPU is lost or cannot be identified: it is asked again after Retry, a lost one by its handle
	// before that
	alone    bool
	linksDue bool
	stall    *inventory.Stall // the call that did not return in time, until one does
	hanging  time.Time        // the beginning of the call that is counted in hangs
	hangs    int              // how often in a row a call hung
}

func newSlot(d *Driver, a *api, index int) *slot {
	r := d.record(index)
	return &slot{record: r, api: a.of(r), gpu: &gpu{}, linksDue: true}
}

// due reports whether the GPU is to be visited now.
func (sl *slot) due() bool { return !sl.visited && !sl.alone && sl.hangs < maxHangs }

// lost reports whether the GPU answered at once that it is lost.
func (sl *slot) lost() bool { return sl.alone && sl.stall == nil && sl.gpu.seen.UUID != "" }

// stalled notes that a call did not return in time, if that is what the error says. A call that
// takes much longer hangs.
func (sl *slot) stalled(err error) {
	var s *inventory.Stall
	if !errors.As(err, &s) {
		return
	}
	sl.stall = s
	if since := s.Call.Since; time.Since(since) >= nodePatience && !since.Equal(sl.hanging) {
		sl.hanging = since
		sl.hangs++
	}
}

// linkable reports whether the GPU can be asked for its links.
func (sl *slot) linkable() bool {
	return sl.gpu.seen.UUID != "" && sl.hangs == 0 && sl.gpu.results.contact == inventory.ContactGood
}

// reason says why the GPU cannot be identified.
func (sl *slot) reason() error {
	if sl.stall != nil {
		return fmt.Errorf("%s does not return", sl.stall.Call.Function)
	}
	return errors.New(cmp.Or(sl.gpu.results.reason, "its UUID is empty"))
}

// watched returns the GPU as one that gives events. Its handle is for the wait for events.
func (sl *slot) watched(waits *api) watched {
	return watched{index: sl.record.gpu, uuid: sl.gpu.seen.UUID, device: device{api: waits, handle: sl.gpu.device.handle}}
}

// register registers for the events at the first visit of a GPU. Later, a wait on the set may be
// under way.
func (s *scanner) register(sl *slot, uuid string, d device) error {
	if sl.met.Load() || sl.record.alone.Load() {
		return nil
	}
	if s.eventless != nil {
		return s.eventless
	}
	return watched{index: sl.record.gpu, uuid: uuid, device: d}.register(s.events)
}

// leftOut returns the entry of a GPU that cannot be identified.
func (sl *slot) leftOut() inventory.LeftOut {
	return inventory.LeftOut{
		Index: sl.record.gpu, Reason: "the GPU cannot be identified: " + sl.reason().Error(),
		Retry: sl.stall == nil && sl.gpu.results.ret != nvml.ERROR_NO_PERMISSION,
	}
}

// find returns the slot of a GPU that was seen.
func (s *scanner) find(uuid string) (*slot, error) {
	g, ok := s.last.GPU(uuid)
	if !ok {
		return nil, fmt.Errorf("this session has seen no such GPU: %w", inventory.ErrUnusable)
	}
	return s.slots[g.Index], nil
}
