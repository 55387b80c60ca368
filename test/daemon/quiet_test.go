package daemon

import (
	"os"
	"strings"
	"testing"
)

// TestQuietStartWithClaims: gpu-node-agent with all that it can write to the API server, CDI, MIG
// and claims logs at most 12 lines at its first start on eight GPUs with which nothing is wrong.
// test/mps has the same for MPS, and what comes afterwards.
func TestQuietStartWithClaims(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra", "--v=0", "--node-labels=node", "--node-events=pods", "--node-condition", "--node-taint",
		"--device-list-strategy=envvar,cdi-cri", "--mig-enabled")
	c.published(8)
	c.logs(`"Ready"`)
	log, err := os.ReadFile(c.LogPath())
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "\n"); n > 12 {
		t.Errorf("%d lines:\n%s", n, log)
	}
}
