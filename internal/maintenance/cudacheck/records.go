package cudacheck

import (
	"maps"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Record is what a proof showed of a device.
type Record struct {
	// Boot is the boot ID of the node then, and Driver the version of the driver: with others the
	// verdict says nothing.
	Boot   string `json:"boot"`
	Driver string `json:"driver"`
	// At is when the proof began. The verdict says nothing of a GPU that was reset since.
	At time.Time `json:"at"`
	// Failure is why CUDA does not work; nil if it does.
	Failure *cuda.Failure `json:"failure,omitempty"`
	// Milliseconds is how long the proof took, and MemoryBytes how much memory its process had.
	Milliseconds int64 `json:"milliseconds"`
	MemoryBytes  int64 `json:"memoryBytes"`
}

// Records are by the UUID of the device. They are not changed once they are published.
type Records map[string]Record

// valid returns the verdict on a device, and whether there is one that counts.
func (b Records) valid(s inventory.Snapshot, boot string, d Device) (Record, bool) {
	v, found := b[d.UUID]
	g, _ := s.GPU(d.GPU)
	return v, found && v.Boot == boot && v.Driver == s.Driver.Version && !g.Reset.After(v.At)
}

// unproven is why a device is held of which nothing is known.
const unproven = "CUDA is not proven on it yet"

// Unproven returns why devices may not be given to pods, by UUID; nothing of those on which CUDA is
// proven.
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

// with returns the Records with another one of a device; without one if v is nil.
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
