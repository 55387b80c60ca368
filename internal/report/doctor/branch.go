package doctor

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// maintainedUntil is the last month in which NVIDIA maintains a driver branch. Source: the tables
// of supported data center drivers of releases 570, 615 and 620
// (docs.nvidia.com/datacenter/tesla/drivers).
var maintainedUntil = map[int]time.Time{
	535: month(2026, time.June),
	570: month(2026, time.February),
	580: month(2028, time.June),
	595: month(2027, time.March),
	610: month(2026, time.August),
	620: month(2029, time.September),
}

// oldest is the oldest maintained branch. Older branches are unmaintained unless the table has
// them.
const oldest = 580

func month(year int, m time.Month) time.Time { return time.Date(year, m, 1, 0, 0, 0, 0, time.UTC) }

// maintained judges the branch of the driver. It has no finding for newer branches that are not in
// the table.
func maintained(f *NodeFacts, r *findings) {
	branch := inventory.Driver{Version: f.Module.Value}.Branch()
	until, known := maintainedUntil[branch]
	switch {
	case f.Simulated || f.Today.IsZero() || branch == 0:
	case known && !f.Today.Before(until.AddDate(0, 1, 0)):
		r.warn("branch-unmaintained",
			fmt.Sprintf("NVIDIA has not maintained driver branch R%d since the end of %s: its bugs are no longer fixed",
				branch,
				until.Format("January 2006")), []string{"/proc/driver/nvidia/version: " + f.Module.Value}, newerDriver)
	case !known && branch < oldest:
		r.warn("branch-unmaintained",
			fmt.Sprintf("NVIDIA no longer maintains driver branch R%d: its bugs are no longer fixed", branch),
			[]string{"/proc/driver/nvidia/version: " + f.Module.Value}, newerDriver)
	}
}

// newerDriver names the branches with long-term support. R580 is the last branch for GPUs before
// Turing.
const newerDriver = "# install a driver of a branch with long-term support, and restart the node: R620 (until " +
	"September 2029), or R580 for GPUs older than Turing"
