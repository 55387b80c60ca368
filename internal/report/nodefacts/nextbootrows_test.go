package nodefacts_test

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

func allRows() []row {
	return slices.Concat(driverRows, branchRows, nextBootRows, runtimeRows, nodeRows, daemonRows, readerRows, claimRows,
		capabilityRows)
}

// atBoot makes preflight find these.
func atBoot(all ...doctor.Finding) func(*doctor.NodeFacts) {
	return func(f *doctor.NodeFacts) { f.NextBoot.Value = all }
}

// nextBootRows are findings of preflight.
var nextBootRows = []row{
	{name: "modules at each boot", facts: atBoot(doctor.Finding{Message: "as wanted"}), check: "next-boot", severity: doctor.OK,
		says: "The next boot starts the running kernel"},
	{name: "no modules at the next boot", facts: atBoot(doctor.Finding{Severity: doctor.Error, Code: "no-modules", Message: "There is no nvidia module",
		Remedy: []string{"dkms autoinstall"}}), check: "next-boot", severity: doctor.Warning, says: "There is no nvidia module",
		remedy: "dkms autoinstall"},
	{name: "a newer kernel", facts: atBoot(doctor.Finding{Severity: doctor.Info, Code: "other-kernel", Message: "The next boot starts kernel 6.9"}),
		check: "next-boot", severity: doctor.Info, says: "starts kernel 6.9"},
	{name: "a kernel that is not known", facts: atBoot(doctor.Finding{Severity: doctor.NotChecked, Message: "Cannot read"}),
		check: "next-boot", severity: doctor.NotChecked, says: "Cannot read"},
}
