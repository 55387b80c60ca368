package nodefacts_test

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

func allRows() []row {
	return slices.Concat(driverRows, branchRows, nextBootRows, runtimeRows, nodeRows, daemonRows, readerRows, claimRows,
		capabilityRows)
}

// atBoot makes preflight find these.
func atBoot(all ...diagnosis.Finding) func(*doctor.NodeFacts) {
	return func(f *doctor.NodeFacts) { f.NextBoot.Value = all }
}

// nextBootRows are findings of preflight.
var nextBootRows = []row{
	{name: "modules at each boot", facts: atBoot(diagnosis.Finding{Message: "as wanted"}), check: "next-boot", severity: diagnosis.OK,
		says: "The next boot starts the running kernel"},
	{name: "no modules at the next boot", facts: atBoot(diagnosis.Finding{Severity: diagnosis.Error, Code: "no-modules", Message: "There is no nvidia module",
		Remedy: []string{"dkms autoinstall"}}), check: "next-boot", severity: diagnosis.Warning, says: "There is no nvidia module",
		remedy: "dkms autoinstall"},
	{name: "a newer kernel", facts: atBoot(diagnosis.Finding{Severity: diagnosis.Info, Code: "other-kernel", Message: "The next boot starts kernel 6.9"}),
		check: "next-boot", severity: diagnosis.Info, says: "starts kernel 6.9"},
	{name: "a kernel that is not known", facts: atBoot(diagnosis.Finding{Severity: diagnosis.NotChecked, Message: "Cannot read"}),
		check: "next-boot", severity: diagnosis.NotChecked, says: "Cannot read"},
}
