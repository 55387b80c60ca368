package layout

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// The built-in layouts of every node.
const (
	AllDisabled = "all-disabled"
	AllEnabled  = "all-enabled"
	AllBalanced = "all-balanced"
)

// Builtin returns the layouts of GPUs without a file, with the names of mig-parted: all-disabled,
// all-enabled, all-balanced, and for each profile a layout with as many instances as fit, such as
// all-1g.10gb or all-1g.10gb.me.
func Builtin(gpus []GPU) File {
	f := File{layouts: map[string][]Item{
		AllDisabled: {{All: true}},
		AllEnabled:  {{All: true, Enabled: true}},
	}}
	for _, g := range gpus {
		if g.Mode == inventory.MIGUnsupported {
			continue
		}
		profiles := profilesOf(g)
		for _, p := range profiles {
			name := "all-" + strings.ReplaceAll(p.Name, "+", ".")
			f.add(name, g, map[string]int{p.Name: p.Count})
		}
		if devices := balanced(profiles); devices != nil {
			f.add(AllBalanced, g, devices)
		}
	}
	for _, g := range gpus { // an unreadable GPU is in the way of every layout
		for name := range f.layouts {
			if g.Unread != "" && len(profilesOf(g)) == 0 && name != AllDisabled && name != AllEnabled {
				f.add(name, g, nil)
			}
		}
	}
	return f
}

// add adds an item for a GPU to a layout.
func (f File) add(name string, g GPU, devices map[string]int) {
	f.layouts[name] = append(f.layouts[name], Item{UUIDs: []string{g.UUID}, Enabled: true, Devices: devices})
}

// balanced returns the devices of all-balanced: on GPUs with seven compute slices one device of
// three slices, one of two and two of one; on GPUs with four slices one device of two and two of
// one. It prefers the profiles with the most instances, and uses no profile with an attribute.
func balanced(profiles []inventory.MIGProfile) map[string]int {
	best := map[int]inventory.MIGProfile{} // by compute slices
	most := 0
	for _, p := range profiles {
		if s, _ := parseSize(p.Name); s.suffix == "" { // parsed before
			most = max(most, s.slices)
			if p.Count > best[s.slices].Count {
				best[s.slices] = p
			}
		}
	}
	counts := map[int]map[int]int{7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}[most]
	devices := map[string]int{}
	for slices, count := range counts {
		if best[slices].Count < count {
			return nil
		}
		devices[best[slices].Name] = count
	}
	if len(devices) == 0 {
		return nil
	}
	return devices
}

// Find returns the layout with a name, from the file or, without a file, from the built-in layouts.
func Find(name string, file *File, gpus []GPU) (Layout, error) {
	if file != nil {
		return file.Layout(name)
	}
	f := Builtin(gpus)
	l, err := f.Layout(name)
	if err != nil && slices.ContainsFunc(gpus,
		func(g GPU) bool { return g.Mode != inventory.MIGUnsupported && len(profilesOf(g)) == 0 }) {
		err = fmt.Errorf("%w; the profiles of some GPUs are not known: run this as root to read them from the driver",
			err)
	}
	return l, err
}
