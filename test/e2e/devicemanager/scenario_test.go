package devicemanager

import (
	"flag"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

var minutes = flag.Bool("minutes", false, "also run the scenarios that wait for kubelet's five minutes, and 2,000 random pods")

// TestScenarios holds the table true.
func TestScenarios(t *testing.T) {
	setup := scenario.Setup{
		Version: version,
		Start: func(t *testing.T, dir, podResourcesSocket string) scenario.Subject {
			return startNode(t, dir, podResourcesSocket)
		},
	}
	if *minutes {
		setup.Pass = func(_ scenario.Subject, d time.Duration) { <-time.After(d) } // kubelet's clock is the machine's
	}
	scenario.Run(t, setup)
}
