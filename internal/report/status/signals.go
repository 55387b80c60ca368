package status

import (
	"math/bits"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Signals is the last successful reading of a GPU. Signals that its driver does not provide are
// absent. No decision depends on the fields below Unread: they are only shown.
type Signals struct {
	RecoveryAction     string `json:"recoveryAction,omitempty"`
	RowRemapFailure    *bool  `json:"rowRemapFailure,omitempty"`
	UnrepairableMemory *bool  `json:"unrepairableMemory,omitempty"`
	// UncorrectedECC counts memory errors since the driver was loaded or the GPU was reset.
	UncorrectedECC *uint64 `json:"uncorrectedECC,omitempty"`
	SRAMThreshold  *bool   `json:"sramThreshold,omitempty"` // with XID 48 or 172: replace the part
	Fabric         string  `json:"fabric,omitempty"`
	// FabricSummary is the driver's summary: healthy, unhealthy or limited-capacity. No decision
	// depends on limited-capacity.
	FabricSummary string   `json:"fabricSummary,omitempty"`
	FabricFaults  []string `json:"fabricFaults,omitempty"`
	// Unread names a signal's call that failed, with the error.
	Unread string `json:"unread,omitempty"`

	PersistenceMode     *bool    `json:"persistenceMode,omitempty"`
	RowRemapPending     *bool    `json:"rowRemapPending,omitempty"`
	RetiredPagesPending *bool    `json:"retiredPagesPending,omitempty"`
	RepairPending       *bool    `json:"repairPending,omitempty"`
	PCIeReplays         *int     `json:"pcieReplays,omitempty"`
	Clocks              []string `json:"clocks,omitempty"` // reasons for lower clocks
	NVLinksActive       *int     `json:"nvlinksActive,omitempty"`
	NVLinksInactive     []int    `json:"nvlinksInactive,omitempty"` // link numbers
}

// signals returns nil for a GPU that was never read.
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

// known returns the value of a signal, nil if the signal is unknown.
func known[T comparable](s inventory.Signal[T]) *T {
	if !s.Known {
		return nil
	}
	return &s.Value
}
