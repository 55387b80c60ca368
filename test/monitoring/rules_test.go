package monitoring

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// An alert is a rule of the chart's file of rules.
type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// rules returns the alerts of the chart's file of rules.
func rules(t *testing.T) (alerts []alert) {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string  `json:"name"`
			Rules []alert `json:"rules"`
		} `json:"groups"`
	}
	text, err := os.ReadFile(filepath.Join(folder, rulesFile))
	if err == nil {
		err = yaml.UnmarshalStrict(text, &file)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range file.Groups {
		alerts = append(alerts, group.Rules...)
	}
	return alerts
}

// TestAlerts: each alert has a section in docs/runbook.md and names the node. None uses the label
// instance, which is the address of a pod and tells two daemons of a node apart.
func TestAlerts(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts := rules(t)
	if len(alerts) < 8 {
		t.Errorf("%d alerts, want at least 8", len(alerts))
	}
	for _, a := range alerts {
		if !strings.Contains(string(text), "\n### "+a.Alert+"\n") {
			t.Errorf("docs/runbook.md has no section %s", a.Alert)
		}
		if url := a.Annotations["runbook_url"]; !strings.HasSuffix(url, "/docs/runbook.md#"+strings.ToLower(a.Alert)) {
			t.Errorf("the runbook of %s is %s", a.Alert, url)
		}
		if summary := a.Annotations["summary"]; a.Alert != "GPUNodeLabelMissing" &&
			!strings.Contains(summary, "$labels.node") {
			t.Errorf("the summary of %s does not name the node: %s", a.Alert, summary)
		}
		if strings.Contains(fmt.Sprint(a), "instance") {
			t.Errorf("%s uses the label instance: %v", a.Alert, a)
		}
	}
}

// TestPrometheusRule: deployments/monitoring has the chart's rules as an object of the Prometheus
// operator.
func TestPrometheusRule(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(folder, rulesFile))
	if err != nil {
		t.Fatal(err)
	}
	head, groups, found := strings.Cut(string(text), "\ngroups:\n")
	if !found {
		t.Fatalf("%s has no groups", rulesFile)
	}
	var object strings.Builder
	for line := range strings.Lines(head) {
		if !strings.Contains(line, "deployments/monitoring") && !strings.Contains(line, "-update") {
			object.WriteString(line)
		}
	}
	object.WriteString(`# Written from deployments/helm/gpu-device-plugin/monitoring/rules.yaml by go test ./test/monitoring -update.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: gpu-device-plugin
  namespace: kube-system
  labels:
    release: kube-prometheus-stack # the label that your Prometheus selects
spec:
  groups:
`)
	for line := range strings.Lines(groups) {
		object.WriteString("  " + line)
	}
	path := "../../deployments/monitoring/prometheusrule.yaml"
	if *update {
		if err := os.WriteFile(path, []byte(object.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(object.String(), string(got)); diff != "" {
		t.Errorf("%s, go test -update writes it (-want +got):\n%s", path, diff)
	}
}

// TestRules has promtool check the alerts, and play testdata/alerts.yaml.
func TestRules(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for from, to := range map[string]string{filepath.Join(folder, rulesFile): rulesFile,
		"testdata/alerts.yaml": "alerts.yaml"} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	promtool(t, nil, "check", "rules", filepath.Join(dir, rulesFile))
	promtool(t, nil, "test", "rules", filepath.Join(dir, "alerts.yaml"))
}
