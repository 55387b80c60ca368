package config

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The defaults of the block units.
const (
	unitsName    = "volcano.sh/gpu-mem"
	unitsCores   = "volcano.sh/gpu-core"
	unitsSize    = "128Mi"
	unitsReserve = 1024
)

// units puts the block units into the Config. Without a selector for units, the block only has to
// be valid.
func (d *document) units(c *Config) {
	given := d.config.Units
	if given == nil {
		given = &v1.Units{}
	}
	u := resource.Units{ReserveMiB: unitsReserve, Measured: given.ReserveMiB == nil}
	u.MPS, u.Driver = d.enforce(given.Enforce)
	if d.either("units.fit", given.Fit, "one", "sum") {
		u.Fit = resource.FitSum
	}
	if d.either("units.fill", given.Fill, "fullest", "emptiest") {
		u.Fill = resource.FillEmptiest
	}
	if given.ReserveMiB != nil {
		if u.ReserveMiB = *given.ReserveMiB; u.ReserveMiB < 0 {
			d.refuse("units.reserveMiB", fmt.Sprintf("must be 0 or more, not %d", u.ReserveMiB))
		}
	}
	name, size := unitsName, unitsSize
	if given.Name != nil {
		name = *given.Name
	}
	if given.Size != nil {
		size = *given.Size
	}
	var err error
	if u.Name, err = resource.UnitsName(name, size); err != nil {
		where := "units.name"
		if _, other := resource.UnitsName(unitsName, size); other != nil {
			where = "units.size"
		}
		d.refuse(where, err.Error())
	}
	if cores := given.Percentage; u.MPS && (cores == nil || *cores != "") {
		if cores == nil {
			cores = new(unitsCores)
		}
		if u.Percentage, err = resource.PercentageName(*cores); err != nil {
			d.refuse("units.percentage", err.Error())
		}
	}
	selected := slices.ContainsFunc(c.Resource.Selectors, func(s resource.Selector) bool { return s.Units })
	switch {
	case !selected && d.config.Units != nil:
		d.warn("units", d.line("units"), "has no effect without a selector with units: true")
	case selected:
		c.Resource.Units = u
		if u.Driver && !c.Edits.OnlyCDI() {
			d.refuse("units.enforce", "driver needs --device-list-strategy=cdi-cri or cdi-annotations, and no "+
				"other: the hook that sets limits is called by CDI")
		}
		if u.MPS && c.Edits.MPSRoot == "" && !c.Discovery.On && d.reads("mps-root") {
			d.refuse("selectors", "units need --mps-root, the directory on the host with the MPS state, such as "+
				"/run/nvidia/mps, or enforce: none in the block units")
		}
	}
}

// enforce returns which program enforces the limits of units.
func (d *document) enforce(given *string) (mps, driver bool) {
	switch {
	case given == nil || *given == "mps":
		return true, false
	case *given == "driver":
		return false, true
	case *given != "none":
		d.refuse("units.enforce", fmt.Sprintf("%q is not one of: mps, driver, none", *given))
	}
	return false, false
}
