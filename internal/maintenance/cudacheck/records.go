package cudacheck

import (
	"maps"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Record is the result of a proof.
type Record struct {
	// Boot is the boot ID of the node at the time, and Driver the version of the driver. The
	// verdict counts for this boot and driver only.
	Boot   string `json:"boot"`
	Driver string `json:"driver"`
	// At is when the proof began. A later reset of the GPU makes the verdict void.
	At time.Time `json:"at"`
	// Failure is why CUDA does not work; nil if CUDA works.
	Failure *cuda.Failure `json:"failure,omitempty"`
	// Milliseconds is the duration of the proof, and MemoryBytes the memory of the proof's process.
	Milliseconds int64 `json:"milliseconds"`
	MemoryBytes  int64 `json:"memoryBytes"`
}

// Records are the records by the UUID of the device. Published Records are immutable.
type Records map[string]Record

// valid returns the verdict on a device, and whether the verdict still counts.
func (b Records) valid(s inventory.Snapshot, boot string, d Device) (Record, bool) {
	v, found := b[d.UUID]
	g, _ := s.GPU(d.GPU)
	return v, found && v.Boot == boot && v.Driver == s.Driver.Version && !g.Reset.After(v.At)
}

// unproven is the reason of a hold on a device without a verdict.
const unproven = "CUDA is not proven on it yet"

// Unproven returns why devices may not be given to pods, by UUID. Devices with proven CUDA are
// absent.
func (b Records) Unproven(s inventory.Snapshot, boot string) map[string]string {
	held := map[string]string{}
	for _, d := range Devices(s) {
		switch v, valid := b.valid(s, boot, d); {
		case !valid:
			held[d.UUID] = unproven
		case v.Failure != nil:
			held[d.UUID] = v.Failure.Error()
		}
	}
	return held
}

// with returns the Records with another record of a device; without the device's record if v is
// nil.
func (b Records) with(uuid string, v *Record) Records {
	next := maps.Clone(b)
	if next == nil {
		next = Records{}
	}
	if v == nil {
		delete(next, uuid)
	} else {
		next[uuid] = *v
	}
	return next
}

// Record returns the verdict on a device of a Snapshot; false if none counts.
func (p *Proofs) Record(s inventory.Snapshot, d Device) (Record, bool) {
	return p.records.Value().valid(s, p.options.BootID, d)
}
