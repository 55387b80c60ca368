package monitoring

import (
	"bytes"
	"context"
	"flag"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

var (
	daemon = flag.String("daemon", "", "the daemon's binary")
	tools  = flag.String("tools", "", "folder with the programs prometheus and promtool")
	update = flag.Bool("update", false, "write docs/monitoring.svg and deployments/monitoring/prometheusrule.yaml again")
)

// The chart's folder with the alerts and the dashboard, and their names.
const (
	folder        = "../../deployments/helm/gpu-device-plugin/monitoring"
	rulesFile     = "rules.yaml"
	dashboardFile = "dashboard.json"
)

// patience bounds every wait for something that must happen.
const patience = time.Minute

// tool returns the path of one of Prometheus' programs.
func tool(t *testing.T, name string) string {
	t.Helper()
	if *daemon == "" || *tools == "" {
		t.Skip("make e2e-monitoring runs these tests: they need the daemon's binary (-daemon) and Prometheus' programs (-tools)")
	}
	return filepath.Join(*tools, name)
}

// promtool runs promtool, which must succeed, and returns what it prints.
func promtool(t *testing.T, input []byte, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, tool(t, "promtool"), args...)
	cmd.Dir, cmd.Stdin = folder, bytes.NewReader(input)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("promtool %v: %v\n%s", args, err, output)
	}
	return string(output)
}

// eventually waits until a condition holds. The condition returns what is missing; empty if
// nothing.
func eventually(t *testing.T, what string, missing func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		last := missing()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %s", what, patience, last)
		}
		select {
		case <-t.Context().Done():
			t.Fatalf("%s: %s", what, last)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
