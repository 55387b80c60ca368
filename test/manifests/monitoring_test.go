package manifests

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

const monitored = `{monitoring: {podMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}}`

// TestMonitoring: with the default labels, a kube-prometheus-stack whose release has this name
// selects the monitor and the rules, and its Grafana loads the dashboard. The objects are valid for
// the operator's own types.
func TestMonitoring(t *testing.T) {
	t.Parallel()
	objects := decode(t, "chart", render(t, monitored))
	monitor := only[*monitoringv1.PodMonitor](t, objects)
	rule := only[*monitoringv1.PrometheusRule](t, objects)
	// The default selectors of kube-prometheus-stack.
	stack := labels.SelectorFromSet(labels.Set{"release": "kube-prometheus-stack"})
	if !stack.Matches(labels.Set(monitor.Labels)) || !stack.Matches(labels.Set(rule.Labels)) {
		t.Errorf("the monitor has the labels %v, the rules %v", monitor.Labels, rule.Labels)
	}
	pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template
	if !labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels)) {
		t.Errorf("the monitor selects %v, the pods have %v", monitor.Spec.Selector.MatchLabels, pod.Labels)
	}
	dashboard := only[*corev1.ConfigMap](t, objects)
	if dashboard.Labels["grafana_dashboard"] != "1" {
		t.Errorf("the dashboard has the labels %v", dashboard.Labels)
	}
	var got, want any
	if err := json.Unmarshal([]byte(dashboard.Data["gpu-device-plugin.json"]), &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(read(t, chart+"/monitoring/dashboard.json"), &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("dashboard (-want +got):\n%s", diff)
	}
	var rules monitoringv1.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(read(t, chart+"/monitoring/rules.yaml"), &rules); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(rules, rule.Spec); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}

// TestMonitors: a PodMonitor, a ServiceMonitor and the static PodMonitor give targets the same
// labels.
func TestMonitors(t *testing.T) {
	t.Parallel()
	pod := only[*monitoringv1.PodMonitor](t, decode(t, "chart", render(t, monitored))).Spec.PodMetricsEndpoints[0]
	objects := decode(t, "chart", render(t, "{monitoring: {serviceMonitor: {enabled: true}, labels: {team: gpu}}, selectorLabelsOverride: {a: b}}"))
	monitor := only[*monitoringv1.ServiceMonitor](t, objects)
	if monitor.Labels["team"] != "gpu" {
		t.Errorf("the ServiceMonitor has the labels %v", monitor.Labels)
	}
	service := only[*corev1.Service](t, objects)
	if !labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels).Matches(labels.Set(service.Labels)) {
		t.Errorf("the monitor selects %v, the Service has %v", monitor.Spec.Selector.MatchLabels, service.Labels)
	}
	template := daemonSet(t, objects, "gpu-device-plugin").Spec.Template
	if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(template.Labels)) {
		t.Errorf("the Service selects %v, the pods have %v", service.Spec.Selector, template.Labels)
	}
	if diff := cmp.Diff(pod.RelabelConfigs, monitor.Spec.Endpoints[0].RelabelConfigs); diff != "" {
		t.Errorf("relabelings (-PodMonitor +ServiceMonitor):\n%s", diff)
	}
	files, err := filepath.Glob("../../deployments/monitoring/*.yaml")
	if err != nil || len(files) != 2 {
		t.Fatalf("manifests %v, error %v", files, err)
	}
	for _, file := range files {
		for _, object := range decode(t, file, read(t, file)) {
			if static, is := object.(*monitoringv1.PodMonitor); is {
				if diff := cmp.Diff(pod, static.Spec.PodMetricsEndpoints[0]); diff != "" {
					t.Errorf("%s (-chart +static):\n%s", file, diff)
				}
			}
		}
	}
}

// TestMonitorsRefused: values with which Prometheus would scrape nothing, or everything twice, are
// refused.
func TestMonitorsRefused(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"{monitoring: {podMonitor: {enabled: true}, serviceMonitor: {enabled: true}}}":                    "twice",
		"{monitoring: {podMonitor: {enabled: true}}, metrics: {enabled: false}}":                          "metrics.enabled: true",
		"{monitoring: {serviceMonitor: {enabled: true}}, metrics: {listen: loopback}}":                    "metrics.listen",
		"{monitoring: {podMonitor: {enabled: true}}, devicePlugin: {enableHostNetwork: true}}":            "enableHostNetwork",
		"{monitoring: {interval: often}}":                                                                 "interval",
		"{monitoring: {labels: {a: \"b c\"}}, metrics: {enabled: false}}":                                 "labels",
		"{monitoring: {prometheusRule: {enabled: true}, dashboard: {enabled: true, labels: {a: \"-\"}}}}": "labels",
	} {
		if _, err := renderChart(values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", values, err, want)
		}
	}
}
