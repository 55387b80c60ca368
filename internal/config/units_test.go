package config_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestUnits(t *testing.T) {
	t.Parallel()
	const selected = "flags: {mpsRoot: /run/nvidia/mps}\nselectors: [{indices: ['0'], units: true}]\n"
	usual := resource.Units{
		Name: "volcano.sh/gpu-mem.128Mi", Percentage: "volcano.sh/gpu-core.percentage", ReserveMiB: 1024, Measured: true,
		MPS: true,
	}
	other := resource.Units{Name: "x.io/mem.1Gi", Fit: resource.FitSum, Fill: resource.FillEmptiest}
	without := usual
	without.Percentage = ""
	for _, tt := range []struct {
		name, file string
		want       resource.Units
		warning    string
		err        string
	}{
		{name: "off", file: ""},
		{name: "the defaults", file: selected, want: usual},
		{name: "no percentages", file: selected + "units: {percentage: ''}", want: without},
		{name: "all is different", file: "selectors: [{indices: ['0'], units: true}]\n" +
			"units: {name: x.io/mem, size: 1Gi, fit: sum, fill: emptiest, enforce: none, reserveMiB: 0, percentage: x.io/p}",
			want: other},
		{name: "without a selector", file: "units: {size: 1Gi}",
			warning: "units: has no effect without a selector with units: true"},
		{name: "no MPS root", file: "selectors: [{indices: ['0'], units: true}]", err: "units need --mps-root"},
		{name: "a size", file: selected + "units: {size: 1G}",
			err: `units.size: "1G" is not a size of units; use 128Mi, 256Mi, 1Gi`},
		{name: "a name", file: selected + "units: {name: mem}",
			err: `units.name: "mem" is not the beginning of a resource name`},
		{name: "percentages", file: selected + "units: {percentage: mem}",
			err: `units.percentage: "mem" is not the beginning of a resource name`},
		{name: "fit", file: selected + "units: {fit: two}", err: `units.fit: "two" is not one of: one, sum`},
		{name: "fill", file: selected + "units: {fill: x}", err: `units.fill: "x" is not one of: fullest, emptiest`},
		{name: "enforce", file: selected + "units: {enforce: x}", err: `units.enforce: "x" is not one of: mps, driver, none`},
		{name: "the driver", file: "flags: {plugin: {deviceListStrategy: cdi-cri}}\n" +
			"selectors: [{indices: ['0'], units: true}]\nunits: {enforce: driver}",
			want: resource.Units{Name: usual.Name, ReserveMiB: 1024, Measured: true, Driver: true}},
		{name: "the driver without CDI", file: selected + "units: {enforce: driver}",
			err: "units.enforce: driver needs --device-list-strategy=cdi-cri"},
		{name: "the driver and another strategy", file: "flags: {plugin: {deviceListStrategy: [cdi-cri, envvar]}}\n" +
			"selectors: [{indices: ['0'], units: true}]\nunits: {enforce: driver}", err: "units.enforce: driver needs"},
		{name: "reserve", file: selected + "units: {reserveMiB: -1}", err: `units.reserveMiB: must be 0 or more, not -1`},
		{name: "two forms", file: "selectors: [{indices: ['0'], units: true, replicas: 2}]",
			err: "units cannot be combined with rename or replicas"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, remarks, err := config.Sources{}.Resolve("", []byte("version: v1\n"+tt.file))
			if tt.err != "" {
				var invalid *config.Invalid
				if !errors.As(err, &invalid) || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, c.Resource.Units); diff != "" {
				t.Errorf("units (-want +got):\n%s", diff)
			}
			found := tt.warning == ""
			for _, r := range remarks {
				found = found || strings.Contains(r.String(), tt.warning)
			}
			if !found {
				t.Errorf("remarks %v, want %q", remarks, tt.warning)
			}
		})
	}
}
