package layout

import (
	"fmt"
	"maps"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Exported is the name of the layout from Export, as in mig-parted.
const Exported = "current"

// Export returns the present layout of the GPUs, with one item for all equal GPUs, and the parts
// without an expression in a layout. It omits GPUs without multi-instance mode.
func Export(gpus []GPU) (Layout, []string) {
	l := Layout{Name: Exported}
	var lost []string
	gpus = slices.Clone(gpus)
	order.Sort(gpus, func(a, b GPU) int { return a.Index - b.Index })
	for _, g := range gpus {
		switch {
		case g.Mode == inventory.MIGUnsupported:
			continue
		case g.Unread != "":
			lost = append(lost, fmt.Sprintf("GPU %d is not in the layout: %s", g.Index, g.Unread))
			continue
		}
		devices := map[string]int{}
		for _, part := range division(g).Instances {
			if len(part.Computes) == 0 {
				lost = append(lost, fmt.Sprintf("GPU %d has a GPU instance %s without compute instances, which a "+
					"layout cannot say", g.Index, part.Profile))
			}
			for _, name := range part.Devices() {
				devices[name]++
			}
		}
		item := Item{Indexes: []int{g.Index}, Enabled: g.Mode == inventory.MIGEnabled, Devices: devices}
		alike := func(o Item) bool { return o.Enabled == item.Enabled && maps.Equal(o.Devices, item.Devices) }
		if i := slices.IndexFunc(l.Items, alike); i >= 0 {
			l.Items[i].Indexes = append(l.Items[i].Indexes, g.Index)
		} else {
			l.Items = append(l.Items, item)
		}
	}
	return l, lost
}

// A Document is the text form of a file with one layout.
type Document struct {
	Version string                   `json:"version"`
	Layouts map[string][]writtenItem `json:"mig-configs"`
}

// A writtenItem is the text form of an Item.
type writtenItem struct {
	Filters []string       `json:"device-filter,omitempty"`
	GPUs    any            `json:"devices"`
	Enabled bool           `json:"mig-enabled"`
	Devices map[string]int `json:"mig-devices"` // mig-parted also writes {} if the mode is off
}

// Document returns a file from which Parse returns the layout.
func (l Layout) Document() Document {
	entries := []writtenItem{}
	for _, item := range l.Items {
		e := writtenItem{GPUs: "all", Enabled: item.Enabled, Devices: map[string]int{}}
		if !item.All {
			gpus := []any{}
			for _, index := range item.Indexes {
				gpus = append(gpus, index)
			}
			for _, uuid := range item.UUIDs {
				gpus = append(gpus, uuid)
			}
			e.GPUs = gpus
		}
		for _, f := range item.Filters {
			text := fmt.Sprintf("0x%08X", f.Device)
			if f.Subsystem != 0 {
				text += fmt.Sprintf(":0x%08X", f.Subsystem)
			}
			e.Filters = append(e.Filters, text)
		}
		maps.Copy(e.Devices, item.Devices)
		entries = append(entries, e)
	}
	return Document{Version: "v1", Layouts: map[string][]writtenItem{l.Name: entries}}
}
