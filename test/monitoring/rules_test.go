package monitoring

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// An alert is a rule of deployments/monitoring.
type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	Annotations map[string]string `json:"annotations"`
}

// rules returns the alerts, and writes them to a file in the form that Prometheus reads.
func rules(t *testing.T) (alerts []alert, file string) {
	t.Helper()
	var manifest struct {
		Spec struct {
			Groups []struct {
				Name  string  `json:"name"`
				Rules []alert `json:"rules"`
			} `json:"groups"`
		} `json:"spec"`
	}
	var raw struct {
		Spec any `json:"spec"`
	}
	text, err := os.ReadFile(filepath.Join(folder, "prometheusrule.yaml"))
	if err == nil {
		err = yaml.Unmarshal(text, &manifest)
	}
	if err == nil {
		err = yaml.Unmarshal(text, &raw)
	}
	if err == nil {
		text, err = yaml.Marshal(raw.Spec)
	}
	file = filepath.Join(t.TempDir(), "rules.yaml")
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range manifest.Spec.Groups {
		alerts = append(alerts, group.Rules...)
	}
	return alerts, file
}

// TestAlertsSayWhatToDo: each alert has a section in docs/runbook.md.
func TestAlertsSayWhatToDo(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts, _ := rules(t)
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
	}
}

// TestRules has promtool check the alerts, and play testdata/alerts.yaml.
func TestRules(t *testing.T) {
	t.Parallel()
	_, file := rules(t)
	promtool(t, nil, "check", "rules", file)
	play, err := os.ReadFile("testdata/alerts.yaml")
	if err == nil {
		err = os.WriteFile(filepath.Join(filepath.Dir(file), "alerts.yaml"), play, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	promtool(t, nil, "test", "rules", filepath.Join(filepath.Dir(file), "alerts.yaml"))
}
