package nodefacts_test

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// branchRows have drivers of maintained and other branches.
var branchRows = []row{
	{
		name: "maintained", facts: func(f *doctor.NodeFacts) { f.Today = day("2028-06-30") },
		check: "driver", severity: diagnosis.OK, says: "have version 580.95.05",
	},
	{
		name: "not maintained any more", facts: func(f *doctor.NodeFacts) { f.Today = day("2028-07-01") },
		check: "driver", severity: diagnosis.Warning, says: "has not maintained driver branch R580 since the end of June 2028",
	},
	{
		name: "the advice names branches with long-term support", facts: func(f *doctor.NodeFacts) {
			f.Today, f.Module.Value, f.Library.Value.Version = day("2027-04-01"), "595.45.04", "595.45.04"
		},
		check: "driver", severity: diagnosis.Warning,
		remedy: "R620 (until September 2029), or R580 for GPUs older than Turing",
	},
	{
		name: "a branch without a date", facts: func(f *doctor.NodeFacts) {
			f.Today, f.Module.Value, f.Library.Value.Version = day("2026-11-26"), "550.54.15", "550.54.15"
		},
		check: "driver", severity: diagnosis.Warning, says: "no longer maintains driver branch R550",
	},
	{
		name: "a later branch", facts: func(f *doctor.NodeFacts) {
			f.Today, f.Module.Value, f.Library.Value.Version = day("2026-11-26"), "640.1", "640.1"
		},
		check: "driver", severity: diagnosis.OK, says: "have version 640.1",
	},
}

func day(text string) time.Time {
	t, err := time.Parse(time.DateOnly, text)
	if err != nil {
		panic(err)
	}
	return t
}
