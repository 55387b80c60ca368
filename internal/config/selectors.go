package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// maxPatterns limits the patterns of all selectors together, because each is compared with each.
const maxPatterns = 2048

func (d *document) selectors() []resource.Selector {
	var selectors []resource.Selector
	named := mentions{}
	patterns := 0
	for i, given := range d.config.Selectors {
		s := d.selector(item("selectors", i), given)
		if patterns += len(s.Models); patterns > maxPatterns {
			d.refuse("selectors", fmt.Sprintf("have more than %d models together", maxPatterns))
			return nil
		}
		if text := conflict(s, selectors, named); text != "" {
			d.refuse(s.Where, text)
		}
		selectors = append(selectors, s)
	}
	return selectors
}

func (d *document) selector(path string, given v1.Selector) resource.Selector {
	s := resource.Selector{
		Where:   path,
		Devices: slices.Concat(d.refs(path+".uuids", given.UUIDs), d.refs(path+".indices", given.Indices)),
		PCI:     parsed(d, path+".pci", given.PCI, resource.ParsePCI),
		Models:  parsed(d, path+".models", given.Models, parsePattern),
	}
	if len(given.UUIDs)+len(given.Indices)+len(given.PCI)+len(given.Models) == 0 {
		d.refuse(path, "selects nothing; set uuids, indices, pci or models")
	}
	if given.Exclude != nil {
		s.Exclude = *given.Exclude
	}
	if given.Rename != nil {
		s.Rename = d.name(path+".rename", *given.Rename)
	}
	if given.Replicas != nil {
		s.Replicas = *given.Replicas
		if s.Replicas < 1 {
			d.refuse(path+".replicas", fmt.Sprintf("must be 1 or more, not %d", s.Replicas))
		}
	}
	if given.Units != nil {
		s.Units = *given.Units
	}
	changes := given.Rename != nil || given.Replicas != nil
	switch {
	case s.Exclude && (changes || s.Units):
		d.refuse(path, "exclude cannot be combined with rename, replicas or units; remove one of them")
	case s.Units && changes:
		d.refuse(path, "units cannot be combined with rename or replicas: a GPU is offered in one way; remove one "+
			"of them")
	case !s.Exclude && !changes && !s.Units:
		d.refuse(path, "has no effect; set exclude: true, units: true, rename or replicas")
	}
	return s
}

func parsePattern(text string) (resource.Pattern, error) {
	if text == "" {
		return "", errors.New(`is empty; use "*" to match everything`)
	}
	return resource.Pattern(text), nil
}

// conflict describes how a selector and an earlier selector select the same device on every
// node with the device. The text is empty if the selectors need not overlap.
func conflict(s resource.Selector, all []resource.Selector, named mentions) string {
	const form = "overlaps with %s: %s is also %s there"
	one, other, found := named.add(s.Where, s.Devices)
	for _, address := range s.PCI {
		if m, known := named[address]; known && m.where != s.Where && !found {
			one, other, found = address, m, true
		}
		named.note(address, mention{s.Where, address})
	}
	if found {
		return fmt.Sprintf(form, other.where, one, other.device)
	}
	for _, earlier := range all {
		for _, pattern := range s.Models {
			for _, other := range earlier.Models {
				if pattern.Meets(other) {
					return fmt.Sprintf("overlaps with %s: the models %q and %q have models in common", earlier.Where,
						pattern, other)
				}
			}
		}
	}
	return ""
}

// mentions are the devices in the file, each with its first entry. The keys are the Ref or PCI
// address; for MIG devices by index also the index of their GPU with a colon.
type mentions map[string]mention

// A mention is an entry of the file, such as selectors[0], and the entry's name of a device.
type mention struct{ where, device string }

func (m mentions) note(key string, one mention) {
	if _, known := m[key]; !known {
		m[key] = one
	}
}

// add records the devices of an entry. It returns the first device named by an earlier entry
// also: by the same Ref, or by the index of a GPU in one entry and the index of a MIG device
// on the GPU in the other.
func (m mentions) add(where string, refs []resource.Ref) (device string, earlier mention, found bool) {
	for _, ref := range refs {
		text := string(ref)
		gpu, _, isMIG := strings.Cut(text, ":")
		around := gpu + ":"
		if isMIG {
			around = gpu
		}
		for _, key := range []string{text, around} {
			if one, known := m[key]; known && one.where != where && !found {
				device, earlier, found = text, one, true
			}
		}
		m.note(text, mention{where, text})
		if isMIG {
			m.note(gpu+":", mention{where, text})
		}
	}
	return device, earlier, found
}
