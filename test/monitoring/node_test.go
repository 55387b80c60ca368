package monitoring

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	resource = "nvidia.com/gpu"
	units    = "volcano.sh/gpu-mem.1Gi"
)

// A watched is a node whose daemon is scraped by a Prometheus every second.
type watched struct {
	*node.Node
	prometheus
	t       *testing.T
	address string // of the daemon's metrics
	config  string // path of the daemon's configuration file
	started time.Time
}

// watch starts a node and a Prometheus.
func watch(t *testing.T) *watched {
	t.Helper()
	tool(t, "prometheus") // skips without
	address, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{t: t, address: address, config: filepath.Join(t.TempDir(), "config.yaml"), started: time.Now()}
	w.write(w.config, "version: v1\n")
	w.Node, err = node.Open(node.Setup{Daemon: *daemon, Profile: "dgx-h100", Args: []string{
		"--metrics-address", address, "--gpu-metrics-interval", "1s", "--config-file", w.config, "--fail-on-init-error=false",
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", w.Logged())
		}
		if err := w.Close(); err != nil {
			t.Errorf("end the node: %v", err)
		}
	})
	file := filepath.Join(t.TempDir(), "prometheus.yaml")
	text, err := os.ReadFile(filepath.Join(folder, rulesFile))
	if err != nil {
		t.Fatal(err)
	}
	alerts := filepath.Join(filepath.Dir(file), rulesFile)
	w.write(alerts, regexp.MustCompile(`(?m)^ +for: .*\n`).ReplaceAllString(shorter.Replace(string(text)), ""))
	// The labels are those that the operator's PodMonitor gives a target.
	w.write(file, fmt.Sprintf(`global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s, scrape_native_histograms: true,
  always_scrape_classic_histograms: true}
rule_files: [%q]
scrape_configs:
  - job_name: gpu-device-plugin
    static_configs: [{targets: [%q], 
      labels: {node: simulated, namespace: kube-system, pod: gpu-device-plugin-x, container: gpu-device-plugin}}]
`, alerts, address))
	w.prometheus = startPrometheus(t, file)
	if err := w.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	w.allocatable(resource, 8)
	return w
}

// exposition returns what the daemon says of itself at a scrape. The names of dcgm-exporter, which
// it has beside that, do not follow Prometheus' rules.
func (w *watched) exposition() []byte {
	w.t.Helper()
	request, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, "http://"+w.address+"/metrics", http.NoBody)
	if err != nil {
		w.t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		w.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return regexp.MustCompile("(?m)^(# (HELP|TYPE) )?DCGM_.*\n").ReplaceAll(text, nil)
}

func (w *watched) write(path, text string) {
	w.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// allocatable waits until kubelet has so many Healthy devices of a resource.
func (w *watched) allocatable(resource string, count int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if err := w.WaitFor(ctx, func() bool { return w.Allocatable(resource) == count }); err != nil {
		w.t.Fatalf("%d of %s: %v", count, resource, err)
	}
}

func (w *watched) admit(pod, resource string, devices int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if _, err := w.Admit(ctx, standin.Container{Pod: pod, Name: "main", Resource: resource, Count: devices}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *watched) inject(f simulator.Fault) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if err := control.Call(ctx, w.ControlSocket(), "simulate.inject", f, nil); err != nil {
		w.t.Fatal(err)
	}
}

// withoutDriver starts the daemon on a node whose driver is not installed.
func (w *watched) withoutDriver() {
	w.t.Helper()
	profile, err := simulator.Load(w.Profile)
	if err != nil {
		w.t.Fatal(err)
	}
	profile.Faults = []simulator.Fault{{Kind: simulator.KindDriver, Driver: "no-library"}}
	text, err := yaml.Marshal(profile)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Profile = filepath.Join(w.t.TempDir(), "node.yaml")
	w.write(w.Profile, string(text))
	if err := w.StartDaemon(); err != nil {
		w.t.Fatal(err)
	}
}

// hasData waits until an expression gives at least one series.
func (w *watched) hasData(what, expression string) {
	w.t.Helper()
	eventually(w.t, what+": "+expression, func() string {
		switch found, err := w.query(w.t.Context(), expression); {
		case err != nil:
			return err.Error()
		case len(found) == 0:
			return "no data"
		}
		return ""
	})
}

// shorter has rules that look back over hours look back over the minute that a test takes.
var shorter = strings.NewReplacer("[6h:5m]", "[5m:1s]", "[1h]", "[5m]", "> 300", "> 15")

// TestSeriesOfClaims: what the row about claims and the alerts about them ask for are series that
// the daemon has.
func TestSeriesOfClaims(t *testing.T) {
	t.Parallel()
	known, err := os.ReadFile("../../docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts := rules(t)
	var asked []string
	for _, p := range panels(t) {
		if p.row == "Claims" {
			for _, target := range p.Targets {
				asked = append(asked, target.Expr)
			}
		}
	}
	if len(asked) < 4 {
		t.Errorf("the row about claims asks for %d things", len(asked))
	}
	for _, a := range alerts {
		asked = append(asked, a.Expr)
	}
	for _, expression := range asked {
		for _, name := range regexp.MustCompile("gpu_device_plugin_[a-z_]+").FindAllString(expression, -1) {
			name = strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count")
			if !strings.Contains(string(known), "| `"+name+"` |") {
				t.Errorf("%s: the daemon has no metric %s", expression, name)
			}
		}
	}
}

// TestDashboardAndAlertsOnANode plays a fault for each alert on a simulated node, and asks
// Prometheus for what the alert and, in the end, each panel of the dashboard asks for.
func TestDashboardAndAlertsOnANode(t *testing.T) {
	t.Parallel()
	w := watch(t)
	alerts := rules(t)
	expressions := make(map[string]string)
	for _, a := range alerts {
		expressions[a.Alert] = shorter.Replace(a.Expr)
	}
	fires := func(name string) {
		t.Helper()
		w.hasData(name, expressions[name])
		delete(expressions, name)
	}
	w.admit("training", resource, 2)
	w.admit("serving", resource, 1)
	w.hasData("pods of GPUs", `DCGM_FI_DEV_FB_USED{exported_pod="training",exported_namespace="default",exported_container="main"}`)
	w.hasData("native histogram", `histogram_count(gpu_device_plugin_rpc_duration_seconds{method="Allocate"}) > 1`)
	promtool(t, w.exposition(), "check", "metrics", "--lint", "all")
	delete(expressions, "GPUNodeLabelMissing") // the test's Prometheus adds the label; testdata/alerts.yaml has it fire
	for name, expression := range expressions {
		if found, err := w.query(t.Context(), expression); err != nil || len(found) > 0 {
			t.Errorf("%s on a node where all is well: %v, %v", name, found, err)
		}
	}

	w.write(w.config, "version: v1\nselectors: [{indices: [7], units: true}]\nunits: {size: 1Gi, enforce: none}\n")
	w.allocatable(units, 79)
	w.admit("part", units, 4)
	w.write(w.config, "version: v1\n")
	fires("GPUUnitsDiffer")
	w.Remove("part")
	w.allocatable(resource, 8)
	w.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 48})
	fires("GPUXidCritical")
	fires("GPUUnhealthy")
	w.inject(simulator.Fault{Kind: simulator.KindThrottle, GPU: "3"})
	fires("GPUSlowed")
	w.inject(simulator.Fault{Kind: simulator.KindRemapFailure, GPU: "4"})
	fires("GPUMemoryFailing")
	w.inject(simulator.Fault{Kind: simulator.KindRemapPending, GPU: "5"})
	w.hasData("remapped rows", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS > 0")
	w.hasData("alerts by the rules", `ALERTS{alertname="GPUMemoryFailing",alertstate="firing",node="simulated"}`)
	w.hasData("three faults", "count(gpu_device_plugin_gpu_fault) >= 3")
	worst := time.Now()
	w.write(w.config, "version: v1\nsharing: nonsense\n")
	fires("GPUConfigRejected")
	w.write(w.config, "version: v1\n")
	w.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "7"})
	fires("GPUMissing")
	w.inject(simulator.Fault{Kind: simulator.KindAdd, GPU: "7"})
	w.inject(simulator.Fault{Kind: simulator.KindRestore})
	w.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "2", Call: "DeviceGetMemoryInfo"})
	fires("GPUNVMLHung")
	w.inject(simulator.Fault{Kind: simulator.KindRestore})
	if err := w.Do(t.Context(), "health", "clear", "--gpu", "4"); err != nil { // its part was replaced
		t.Error(err)
	}
	w.allocatable(resource, 8)
	for range 7 {
		if err := w.Restart(); err != nil {
			t.Fatal(err)
		}
		w.allocatable(resource, 8)
	}
	fires("GPURegistrationChurn")
	w.Stop()
	fires("GPUResourceNotRegistered")
	if err := w.Resume(); err != nil {
		t.Fatal(err)
	}
	w.allocatable(resource, 8)
	w.inject(simulator.Fault{Kind: simulator.KindHang})
	fires("GPUPluginStalled")
	end := time.Now()
	if err := w.StopDaemon(); err != nil {
		t.Error(err)
	}
	fires("GPUPluginDown")
	w.withoutDriver()
	fires("GPUDriverMissing")
	// These need a second daemon that hangs; testdata/alerts.yaml has them fire. That their series are
	// there is seen here.
	for name, well := range map[string]string{
		"GPUNoLead": "gpu_device_plugin_leads == 1", "GPUHardwareHeld": "gpu_device_plugin_hardware_held == 0",
	} {
		w.hasData(name, well)
		delete(expressions, name)
	}
	// this node changes no layouts; testdata/alerts.yaml has it fire
	delete(expressions, "GPUMIGLayoutNotMade")
	for _, name := range []string{"GPUSlicesNotPublished", "GPUClaimsRefused"} { // nor does it give GPUs by claims
		delete(expressions, name)
	}
	delete(expressions, "GPUNVSwitchFatal") // nor does a simulated NVSwitch fail; the same holds
	for name := range expressions {
		t.Errorf("nothing was done to have the alert %s fire", name)
	}

	var all []drawn
	for _, p := range panels(t) {
		if p.row == "Claims" || p.Title == "Claims" {
			continue
		}
		d := drawn{panel: p}
		for _, target := range p.Targets {
			var found []series
			var err error
			if p.Type == "timeseries" {
				step := end.Sub(w.started) / 100
				if p.Interval != "" {
					step = 10 * time.Second // as $__interval
				}
				found, err = w.queryRange(t.Context(), target.Expr, w.started, end, step)
			} else {
				found, err = w.queryAt(t.Context(), target.Expr, worst)
			}
			if err != nil || len(found) == 0 {
				t.Errorf("panel %q: %s: no data, %v", p.Title, target.Expr, err)
			}
			d.results = append(d.results, found)
		}
		all = append(all, d)
	}
	if *update {
		w.write("../../docs/monitoring.svg", draw(t, all, w.started, end))
	}
}
