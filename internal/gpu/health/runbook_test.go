package health_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
)

var update = flag.Bool("update", false, "write the table of XIDs in docs/runbook.md anew")

// advice says more about what to do after an XID than its class does.
var advice = map[uint64]string{
	13: "correct the program. If several programs fail on the same GPU, run NVIDIA's field diagnostic",
	31: "correct the program: it reads or writes memory that it does not have",
	43: "correct the program; look for an XID 13 or 31 just before",
	45: "usually none: the process was killed, or another XID came first",
	48: "reset; if it comes again, replace the GPU",
	54: "connect the auxiliary power, then `health clear`",
	63: "none now; the row is remapped at the next reset",
	64: "reset; if the remapping fails again, replace the GPU",
	74: "reset; if it comes again, check both ends of the NVLink and the NVSwitch",
	79: "restart the node; if it comes again, check power, temperature and the seating of the card",
	92: "none; watch `DCGM_FI_DEV_ECC_SBE_VOL_TOTAL`",
	94: "start the application again; the other processes are not affected",
	// The GSP is the GPU's own processor.
	119: "reset; if it fails, restart the node. Driver 575.51.02 or newer recovers from more of these",
	120: "reset; if it fails, restart the node",
}

// TestRunbook holds the table of XIDs in docs/runbook.md to the catalog. `go test
// ./internal/gpu/health -run TestRunbook -update` writes it anew.
func TestRunbook(t *testing.T) {
	t.Parallel()
	const page = "../../../docs/runbook.md"
	const begin, end = "<!-- xids: written by internal/gpu/health TestRunbook -->\n", "<!-- end of xids -->\n"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), begin)
	table, after, ends := strings.Cut(rest, end)
	if !begins || !ends {
		t.Fatalf("docs/runbook.md has no place for the table: %q … %q", begin, end)
	}
	var want strings.Builder
	want.WriteString("| XID | what it means | the GPU | what to do |\n|---|---|---|---|\n")
	for _, x := range health.Catalog() {
		state, remedy := consequence(x)
		if more := advice[x.Code]; more != "" {
			remedy = more
		}
		fmt.Fprintf(&want, "| %d | %s | %s | %s |\n", x.Code, x.Name, state, remedy)
	}
	if table == want.String() {
		return
	}
	if !*update {
		t.Fatal("the table of XIDs in docs/runbook.md is not that of the catalog; run: " +
			"go test ./internal/gpu/health -run TestRunbook -update")
	}
	if err := os.WriteFile(page, []byte(before+begin+want.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// consequence returns the state of a GPU after an XID, and what an operator has to do.
func consequence(x health.XID) (state, remedy string) {
	switch {
	case x.Class == health.Application:
		return "stays Healthy", "look at the program; start it again"
	case x.Class == health.Informational:
		return "stays Healthy", "none"
	case x.Class == health.Decode:
		return "the driver decides", "what `status` names"
	case x.Bucket == "RESTART_BM" || x.Bucket == "RESTART_VM":
		return "Unhealthy", "restart the node"
	case x.Class == health.Hardware:
		return "Unhealthy", "repair or replace the part, then `health clear`"
	}
	return "Unhealthy", "reset"
}
