package config

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

func (d *document) selectors() []resource.Selector {
	var selectors []resource.Selector
	for i, given := range d.config.Selectors {
		s := d.selector(item("selectors", i), given)
		for _, earlier := range selectors {
			if text := conflict(s, earlier); text != "" {
				d.refuse(s.Where, text)
			}
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
		d.refuse(path, "selects nothing; give uuids, indices, pci or models")
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
	changes := given.Rename != nil || given.Replicas != nil
	switch {
	case s.Exclude && changes:
		d.refuse(path, "excludes devices, so that rename and replicas mean nothing; remove either")
	case !s.Exclude && !changes:
		d.refuse(path, "says nothing about what it selects; give exclude: true, rename or replicas")
	}
	return s
}

func parsePattern(text string) (resource.Pattern, error) {
	if text == "" {
		return "", errors.New(`is empty; "*" matches everything`)
	}
	return resource.Pattern(text), nil
}

// conflict says how two selectors select one device on every node that has it; empty if they need not.
func conflict(s, earlier resource.Selector) string {
	const form = "overlaps with %s: %s is also %s there"
	if one, other, found := meeting(s.Devices, earlier.Devices, resource.Ref.Meets); found {
		return fmt.Sprintf(form, earlier.Where, one, other)
	}
	if one, other, found := meeting(s.PCI, earlier.PCI, func(a, b string) bool { return a == b }); found {
		return fmt.Sprintf(form, earlier.Where, one, other)
	}
	if one, other, found := meeting(s.Models, earlier.Models, resource.Pattern.Meets); found {
		return fmt.Sprintf("overlaps with %s: the models %q and %q have models in common", earlier.Where, one, other)
	}
	return ""
}
