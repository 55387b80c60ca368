package status

import (
	"math/bits"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Signals is what was read of a GPU when it answered last. What its driver does not tell is not
// there. The second half is only shown: nothing follows from it.
type Signals struct {
	RecoveryAction     string `json:"recoveryAction,omitempty"`
	RowRemapFailure    *bool  `json:"rowRemapFailure,omitempty"`
	UnrepairableMemory *bool  `json:"unrepairableMemory,omitempty"`
	// UncorrectedECC counts memory errors since the driver was loaded or the GPU reset.
	UncorrectedECC *uint64 `json:"uncorrectedECC,omitempty"`
	SRAMThreshold  *bool   `json:"sramThreshold,omitempty"` // with XID 48 or 172, the part has to be replaced
	Fabric         string  `json:"fabric,omitempty"`
	// FabricSummary is the driver's own: healthy, unhealthy or limited-capacity. The last one is only
	// shown.
	FabricSummary string   `json:"fabricSummary,omitempty"`
	FabricFaults  []string `json:"fabricFaults,omitempty"`
	// Unread names a call for one of the signals that failed, with the error.
	Unread string `json:"unread,omitempty"`

	PersistenceMode     *bool    `json:"persistenceMode,omitempty"`
	RowRemapPending     *bool    `json:"rowRemapPending,omitempty"`
	RetiredPagesPending *bool    `json:"retiredPagesPending,omitempty"`
	RepairPending       *bool    `json:"repairPending,omitempty"`
	PCIeReplays         *int     `json:"pcieReplays,omitempty"`
	Clocks              []string `json:"clocks,omitempty"` // why they are not higher
	NVLinksActive       *int     `json:"nvlinksActive,omitempty"`
	NVLinksInactive     []int    `json:"nvlinksInactive,omitempty"` // their numbers
}

// signals returns nil for a GPU of which nothing was ever read.
func signals(r inventory.Reading) *Signals {
	if r == (inventory.Reading{}) {
		return nil
	}
	s := Signals{
		RowRemapFailure:     known(r.RowRemapFailure),
		UnrepairableMemory:  known(r.UnrepairableMemory),
		UncorrectedECC:      known(r.UncorrectedECC),
		SRAMThreshold:       known(r.SRAMThreshold),
		PersistenceMode:     known(r.Persistence),
		Unread:              r.Incomplete,
		RowRemapPending:     known(r.RowRemapPending),
		RetiredPagesPending: known(r.Report.RetiredPagesPending),
		RepairPending:       known(r.Report.RepairPending),
		PCIeReplays:         known(r.Report.PCIeReplays),
		Clocks:              r.Report.Clocks.Value.Names(),
	}
	if r.RecoveryAction.Known {
		s.RecoveryAction = r.RecoveryAction.Value.String()
	}
	if f := r.Fabric.Value; r.Fabric.Known {
		s.Fabric, s.FabricFaults = f.State.String(), f.Faults.Names()
		if f.Summary != inventory.FabricSummaryUnknown {
			s.FabricSummary = f.Summary.String()
		}
	}
	if links := r.Report.NVLinks; links.Known {
		active := bits.OnesCount64(links.Value.Active)
		s.NVLinksActive = &active
		for rest := links.Value.Inactive; rest != 0; rest &= rest - 1 {
			s.NVLinksInactive = append(s.NVLinksInactive, bits.TrailingZeros64(rest))
		}
	}
	return &s
}

// known returns the value of a signal, nil if it has none.
func known[T comparable](s inventory.Signal[T]) *T {
	if !s.Known {
		return nil
	}
	return &s.Value
}
