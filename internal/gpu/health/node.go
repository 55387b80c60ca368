package health

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// NodeWide returns the common reason of all GPUs if the node is the cause: a sentence without a
// full stop. It is empty without such a reason, and on a node with a single GPU.
func NodeWide(gpus []GPU) string {
	if len(gpus) < 2 {
		return ""
	}
	first := gpus[0].worst()
	for _, g := range gpus[1:] {
		f := g.worst()
		if f.Source != first.Source || f.Remedy != first.Remedy {
			return ""
		}
	}
	switch {
	case first.Source == SourceAction && first.Remedy == inventory.RemedyReboot:
		return because(first.Remedy, "the driver asks for a restart of the node on all %d GPUs", len(gpus))
	case first.Source == SourceContact:
		return fmt.Sprintf("calls to all %d GPUs fail: this container may have lost its access to the devices, "+
			"restart its pod", len(gpus))
	case first.Source == SourceSilence:
		return first.Reason
	}
	return ""
}
