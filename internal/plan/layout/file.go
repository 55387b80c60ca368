package layout

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A File has layouts by name: the configuration file v1 of NVIDIA's mig-parted. Devices may also be
// UUIDs of GPUs.
type File struct {
	layouts map[string][]Item
}

// A Layout is the wanted division of the GPUs of a node. The last item that matches a GPU counts. A
// GPU without an item stays unchanged.
type Layout struct {
	Name  string
	Items []Item
}

// An Item is the wanted division of some GPUs.
type Item struct {
	// All matches every GPU; Indexes and UUIDs match single GPUs.
	All     bool
	Indexes []int
	UUIDs   []string
	// Filters are PCI device IDs; with filters, the item matches only GPUs with one of these IDs.
	Filters []Filter
	// Enabled says whether multi-instance mode is on.
	Enabled bool
	// Devices are the numbers of MIG devices of the GPU, by the name of their size. Without devices
	// only the mode matters.
	Devices map[string]int
}

// A Filter is a PCI device ID followed by the vendor ID, such as 0x233010de, and the same for the
// subsystem; 0 matches any.
type Filter struct{ Device, Subsystem uint32 }

// Parse reads a file. The error names the mistakes and their correction.
func Parse(data []byte) (File, error) {
	text, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return File{}, fmt.Errorf("not YAML: %s", strings.Join(strings.Fields(strings.TrimPrefix(
			strings.TrimPrefix(err.Error(), "yaml: "), "unmarshal errors:")), " "))
	}
	var top map[string]json.RawMessage
	if err := json.Unmarshal(text, &top); err != nil || top == nil {
		return File{}, errors.New("the file has no keys: it needs version: v1 and mig-configs")
	}
	if err := otherFile(top); err != nil {
		return File{}, err
	}
	if err := onlyKeys(top, "version", "mig-configs"); err != nil {
		return File{}, err
	}
	var version string
	if err := json.Unmarshal(top["version"], &version); err != nil || version != "v1" {
		return File{}, errors.New("version must be v1, in the first line of the file: version: v1")
	}
	var lists map[string][]json.RawMessage
	if err := json.Unmarshal(top["mig-configs"], &lists); err != nil || len(lists) == 0 {
		return File{}, errors.New("mig-configs must be a map from the name of a layout to a list of items, with at " +
			"least one layout")
	}
	f := File{layouts: map[string][]Item{}}
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		if len(lists[name]) == 0 {
			return File{}, fmt.Errorf("layout %s has no items: give at least one with devices and mig-enabled", name)
		}
		for i, text := range lists[name] {
			item, err := parseItem(text)
			if err != nil {
				return File{}, fmt.Errorf("layout %s, item %d: %w", name, i+1, err)
			}
			f.layouts[name] = append(f.layouts[name], item)
		}
	}
	return f, nil
}

// otherFile describes a file without layouts, and names the right file.
func otherFile(top map[string]json.RawMessage) error {
	var kind string
	_ = json.Unmarshal(top["kind"], &kind) // only a kind that is a text counts
	switch {
	case top["mig-configs"] != nil:
		return nil // its other keys are unknown
	case kind == "ConfigMap":
		return errors.New("the file is a Kubernetes ConfigMap: give the text of one key of its data, as with " +
			"kubectl get configmap NAME -o jsonpath='{.data.KEY}'")
	case kind != "":
		return fmt.Errorf("the file is a Kubernetes object of the kind %.100q, and has no layouts", kind)
	}
	for _, key := range []string{"flags", "resources", "sharing", "selectors", "units", "dra", "mig", "features",
		"health"} {
		if top[key] != nil {
			return fmt.Errorf("the file is a configuration file of the daemon (it has the key %s), and has no "+
				"layouts: a file of layouts has version: v1 and mig-configs", key)
		}
	}
	return nil
}

// Names returns the names of the layouts, sorted.
func (f File) Names() []string { return slices.Sorted(maps.Keys(f.layouts)) }

// Layout returns the layout with a name. An empty name means the only layout.
func (f File) Layout(name string) (Layout, error) {
	names := f.Names()
	if name == "" && len(names) == 1 {
		name = names[0]
	}
	items, ok := f.layouts[name]
	if !ok {
		return Layout{}, fmt.Errorf("no layout is called %.100q: give one of %s", name, inventory.Few(names))
	}
	return Layout{Name: name, Items: items}, nil
}

// onlyKeys refuses unknown keys.
func onlyKeys(object map[string]json.RawMessage, known ...string) error {
	for _, key := range slices.Sorted(maps.Keys(object)) {
		if !slices.Contains(known, key) {
			return fmt.Errorf("key %s is not known: the keys here are %s", key, strings.Join(known, ", "))
		}
	}
	return nil
}

// parseItem parses an item.
func parseItem(text json.RawMessage) (Item, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return Item{}, errors.New("an item is a map with the keys devices and mig-enabled")
	}
	if err := onlyKeys(object, "device-filter", "devices", "mig-enabled", "mig-devices"); err != nil {
		return Item{}, err
	}
	var item Item
	if err := json.Unmarshal(object["mig-enabled"], &item.Enabled); err != nil || isNull(object["mig-enabled"]) {
		return Item{}, errors.New("mig-enabled must be true or false")
	}
	if err := item.parseDevices(object["devices"]); err != nil {
		return Item{}, err
	}
	if err := item.parseFilter(object["device-filter"]); err != nil {
		return Item{}, err
	}
	if err := item.parseMIGDevices(object["mig-devices"]); err != nil {
		return Item{}, err
	}
	return item, nil
}

// isNull reports whether a key is missing or has no value.
func isNull(text json.RawMessage) bool { return len(text) == 0 || bytes.Equal(text, []byte("null")) }

// parseDevices parses the GPUs of an item.
func (item *Item) parseDevices(text json.RawMessage) error {
	var all string
	if json.Unmarshal(text, &all) == nil && all == "all" {
		item.All = true
		return nil
	}
	var list []json.RawMessage
	wrong := errors.New("devices must be all, or a list of GPUs by index or UUID, such as [0, 1]")
	if json.Unmarshal(text, &list) != nil || isNull(text) {
		return wrong
	}
	for _, text := range list {
		var index int
		var uuid string
		switch {
		case !isNull(text) && json.Unmarshal(text, &index) == nil && index >= 0:
			item.Indexes = append(item.Indexes, index)
		case json.Unmarshal(text, &uuid) == nil && strings.HasPrefix(uuid, "GPU-"):
			item.UUIDs = append(item.UUIDs, uuid)
		default:
			return wrong
		}
	}
	return nil
}

// parseFilter parses the PCI device IDs of an item.
func (item *Item) parseFilter(text json.RawMessage) error {
	if len(text) == 0 {
		return nil
	}
	var list []string
	var one string
	if json.Unmarshal(text, &one) == nil {
		if one != "" {
			list = []string{one}
		}
	} else if json.Unmarshal(text, &list) != nil {
		return errors.New("device-filter must be a PCI device ID such as \"0x233010DE\", or a list of them")
	}
	for _, id := range list {
		device, subsystem, qualified := strings.Cut(id, ":")
		var f Filter
		var err, errSubsystem error
		f.Device, err = parseID(device)
		if qualified {
			f.Subsystem, errSubsystem = parseID(subsystem)
		}
		if err != nil || errSubsystem != nil {
			return fmt.Errorf("device-filter %q is not a PCI device ID: give device and vendor such as "+
				"\"0x233010DE\", or those and the subsystem's such as \"0x233010DE:0x16C110DE\"", id)
		}
		item.Filters = append(item.Filters, f)
	}
	return nil
}

// parseID parses a device ID followed by the vendor ID.
func parseID(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 0, 32)
	if err == nil && n == 0 {
		err = errors.New("no device has this ID")
	}
	return uint32(n), err
}

// maxCount is more than the instances of any GPU.
const maxCount = 64

// parseMIGDevices parses the MIG devices of an item.
func (item *Item) parseMIGDevices(text json.RawMessage) error {
	if isNull(text) {
		if item.Enabled {
			return errors.New("mig-devices is missing: give the profiles and how many of each, or {} to set the mode " +
				"alone")
		}
		return nil
	}
	var counts map[string]int
	if err := json.Unmarshal(text, &counts); err != nil {
		return errors.New("mig-devices must be a map from a profile to a whole number, such as \"1g.10gb\": 7")
	}
	if !item.Enabled && len(counts) > 0 {
		return errors.New("mig-devices are given and mig-enabled is false: set mig-enabled to true, or leave " +
			"mig-devices out")
	}
	devices := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		s, err := parseSize(name)
		switch count := counts[name]; {
		case err != nil:
			return fmt.Errorf("mig-devices: %w", err)
		case count < 0 || count > maxCount:
			return fmt.Errorf("mig-devices: %d of %s: give a number from 0 to %d", count, name, maxCount)
		case count > 0:
			devices[s.String()] += count
		}
	}
	if len(counts) > 0 && len(devices) == 0 {
		return errors.New("mig-devices has no profile with a count above 0: give one, or {} to set the mode alone")
	}
	if len(devices) > 0 {
		item.Devices = devices
	}
	return nil
}

// matches reports whether the item concerns a GPU.
func (item Item) matches(g GPU) bool {
	named := item.All || slices.Contains(item.Indexes, g.Index) || slices.Contains(item.UUIDs, g.UUID)
	return named && (len(item.Filters) == 0 || slices.ContainsFunc(item.Filters, func(f Filter) bool {
		return f.Device == g.PCIDevice && (f.Subsystem == 0 || f.Subsystem == g.PCISubsystem)
	}))
}
