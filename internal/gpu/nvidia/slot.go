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

// maxHangs is the number of calls about a GPU that may hang in a row before the GPU is paused.
const maxHangs = 2

// A slot is an NVML index of a session. A job works on a copy of the GPU, which is stored at the
// end of the job: a hanging job keeps the copy.
type slot struct {
	record *callRecord
	api    *api // for calls about the GPU
	gpu    *gpu
	gpm    *gpm // nil before the first sample, and while a job uses it

	isVisited    bool        // visited: the next scan skips the GPU
	isRegistered atomic.Bool // Open is done: register for events of the GPU before a wait
	// The GPU is lost or unidentified. It is called again after Retry, or earlier, if lost, by the
	// old handle.
	isPaused  bool
	linksDue  bool
	stall     *inventory.Stall // the call that did not return in time, until a call returns
	hangStart time.Time        // start of the last call counted in hangs
	hangs     int              // hanging calls in a row
}

func newSlot(d *Driver, a *api, index int) *slot {
	r := d.record(index)
	return &slot{record: r, api: a.withRecord(r), gpu: &gpu{}, linksDue: true}
}

// isDue reports whether the GPU must be visited now.
func (sl *slot) isDue() bool { return !sl.isVisited && !sl.isPaused && sl.hangs < maxHangs }

// isLost reports whether the GPU answered at once that it is lost.
func (sl *slot) isLost() bool { return sl.isPaused && sl.stall == nil && sl.gpu.lastSeen.UUID != "" }

// recordStall records a call that did not return in time, if err is a Stall. A call that takes much
// longer counts as hanging.
func (sl *slot) recordStall(err error) {
	var s *inventory.Stall
	if !errors.As(err, &s) {
		return
	}
	sl.stall = s
	if since := s.Call.Since; time.Since(since) >= nodePatience && !since.Equal(sl.hangStart) {
		sl.hangStart = since
		sl.hangs++
	}
}

// linkable reports whether the links of the GPU can be read.
func (sl *slot) linkable() bool {
	return sl.gpu.lastSeen.UUID != "" && sl.hangs == 0 && sl.gpu.results.contact == inventory.ContactGood
}

// reason returns why the GPU cannot be identified.
func (sl *slot) reason() error {
	if sl.stall != nil {
		return fmt.Errorf("%s does not return", sl.stall.Call.Function)
	}
	return errors.New(cmp.Or(sl.gpu.results.reason, "its UUID is empty"))
}

// watchedGPU returns the GPU for the watch, with a handle for waits.
func (sl *slot) watchedGPU(waits *api) watchedGPU {
	return watchedGPU{index: sl.record.gpu, uuid: sl.gpu.lastSeen.UUID,
		device: device{api: waits, handle: sl.gpu.device.handle}}
}

// register registers for the events at the first visit of a GPU. Later, a wait may use the set.
func (s *scanner) register(sl *slot, uuid string, d device) error {
	if sl.isRegistered.Load() || sl.record.isJobAbandoned.Load() {
		return nil
	}
	if s.noEvents != nil {
		return s.noEvents
	}
	return watchedGPU{index: sl.record.gpu, uuid: uuid, device: d}.register(s.events)
}

// leftOut returns the entry of an unidentified GPU.
func (sl *slot) leftOut() inventory.LeftOut {
	return inventory.LeftOut{
		Index: sl.record.gpu, Reason: "the GPU cannot be identified: " + sl.reason().Error(),
		Retry: sl.stall == nil && sl.gpu.results.ret != nvml.ERROR_NO_PERMISSION,
	}
}

// find returns the slot of a known GPU.
func (s *scanner) find(uuid string) (*slot, error) {
	g, ok := s.last.GPU(uuid)
	if !ok {
		return nil, fmt.Errorf("unknown GPU in this session: %w", inventory.ErrUnusable)
	}
	return s.slots[g.Index], nil
}
