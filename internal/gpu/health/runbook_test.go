package health_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

var update = flag.Bool("update", false, "write the table of XIDs in docs/runbook.md")

// advice says more about what to do after an XID than its class does.
var advice = map[uint64]string{
	13: "correct the program. If several programs fail on the same GPU, run NVIDIA's field diagnostic",
	31: "correct the program: it reads or writes memory that it does not have",
	43: "correct the program; look for an XID 13 or 31 just before",
	45: "usually none: the process was killed, or another XID came first. If it comes alone again and again on a " +
		"machine with NVSwitches, restart Fabric Manager",
	48: "reset; if it comes again, replace the GPU",
	54: "connect the auxiliary power, then `health clear`",
	63: "reset when the GPU is free: the reset remaps the row",
	64: "what `status` names: `reset`; or `hardware`, when the driver has no spare row for the bad one: then replace " +
		"the GPU",
	74: "reset; if it comes again, check both ends of the NVLink and the NVSwitch",
	79: "restart the node; if it comes again, check power, temperature and the seating of the card",
	92: "none; watch `DCGM_FI_DEV_ECC_SBE_VOL_TOTAL`",
	94: "start the application again; the other processes are not affected",
	// The GSP is the GPU's own processor.
	119: "reset; if the reset fails, restart the node",
	120: "reset; if the reset fails, restart the node",
}

// TestRunbook holds the table of XIDs in docs/runbook.md to the catalog. `go test
// ./internal/gpu/health -run TestRunbook -update` writes it.
func TestRunbook(t *testing.T) {
	t.Parallel()
	var want strings.Builder
	want.WriteString("| XID | what it means | the GPU | what to do |\n|---|---|---|---|\n")
	for _, x := range health.Catalog() {
		state, remedy := consequence(t, x)
		if more := advice[x.Code]; more != "" {
			remedy = more
		}
		fmt.Fprintf(&want, "| XID %d | %s | %s | %s |\n", x.Code, x.Name, state, linked(remedy))
	}
	documents.HoldPart(t, "../../../docs/runbook.md", "xids", want.String(), *update)
}

// linked returns a remedy with links to the sections of the runbook that explain it.
func linked(remedy string) string {
	for _, link := range []struct{ words, section string }{
		{"`reset`", "reset-a-gpu"}, {"reset", "reset-a-gpu"}, {"restart the node", "restart-the-node"}, {"`health clear`", "health-clear"},
		{"what `status` names", "remedies"}, {"restart Fabric Manager", "fabric-manager"},
	} {
		if !strings.Contains(remedy, "#"+link.section) {
			remedy = strings.Replace(remedy, link.words, "["+link.words+"](#"+link.section+")", 1)
		}
	}
	return remedy
}

// consequence returns the state of a GPU after an XID, as the policy decides it for a GPU whose
// driver has a recovery action, and what an operator has to do.
func consequence(t *testing.T, x health.XID) (state, remedy string) {
	t.Helper()
	s := begin(t, 580)
	s.xid(x.Code)
	switch h := s.gpu.Health; {
	case h.State == inventory.Suspect:
		return "the driver decides", "what `status` names"
	case h.State == inventory.Healthy && x.Class == health.Application:
		return "stays Healthy", "look at the program; start it again"
	case h.State == inventory.Healthy:
		return "stays Healthy", "none"
	case h.Remedy == inventory.RemedyReboot:
		return h.State.String(), "restart the node"
	case h.Remedy == inventory.RemedyHardware:
		return h.State.String(), "repair or replace the part, then `health clear`"
	case h.Remedy == inventory.RemedyReset:
		return h.State.String(), "reset"
	default:
		t.Fatalf("XID %d makes a GPU %v with the remedy %s, which has no words here", x.Code, h.State, h.Remedy)
		return "", ""
	}
}
