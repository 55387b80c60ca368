package manifests

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Probes ask the port where kubelet reaches it, and otherwise run a command.
func TestProbes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		values              string
		port                int32 // 0 for none
		readiness, liveness string
	}{
		{"", 9400, "/readyz?wait=5s", "/healthz"},
		{"{metrics: {port: 9000, listen: all}}", 9000, "/readyz?wait=5s", "/healthz"},
		{"{metrics: {enabled: false}}", 0, "gpu-device-plugin ready --wait=5s", "gpu-device-plugin alive"},
		// another pod may have the port
		{"{devicePlugin: {enableHostNetwork: true}}", 0, "gpu-device-plugin ready --wait=5s", "gpu-device-plugin alive"},
		{"{metrics: {listen: loopback}}", 0, "gpu-device-plugin ready --wait=5s", "gpu-device-plugin alive"},
		{"{readinessProbe: {exec: {command: [a, b]}}, livenessProbe: null}", 9400, "a b", ""},
	} {
		t.Run(tt.values, func(t *testing.T) {
			t.Parallel()
			container := daemonSet(t, decode(t, "chart", render(t, tt.values)),
				"gpu-device-plugin").Spec.Template.Spec.Containers[0]
			port := int32(0)
			for _, p := range container.Ports {
				if p.Name == "metrics" {
					port = p.ContainerPort
				}
			}
			asks := func(probe *corev1.Probe) string {
				switch {
				case probe == nil:
					return ""
				case probe.Exec != nil && probe.HTTPGet == nil:
					return strings.Join(probe.Exec.Command, " ")
				case probe.HTTPGet != nil && probe.Exec == nil && probe.HTTPGet.Port.String() == "metrics":
					return probe.HTTPGet.Path
				}
				return probe.String()
			}
			readiness, liveness := asks(container.ReadinessProbe), asks(container.LivenessProbe)
			if port != tt.port || readiness != tt.readiness || liveness != tt.liveness {
				t.Errorf("port %d, probes %q and %q; want port %d, %q and %q", port, readiness, liveness, tt.port, tt.readiness,
					tt.liveness)
			}
		})
	}
}

// The old pod is there until the new one is ready, so a version that does not work stops its own
// roll-out.
func TestRollOutWaitsForReadiness(t *testing.T) {
	t.Parallel()
	d := daemonSet(t, decode(t, "chart", render(t, "")), "gpu-device-plugin")
	if u := d.Spec.UpdateStrategy.RollingUpdate; u == nil || u.MaxUnavailable.IntValue() != 0 ||
		u.MaxSurge.String() != "10%" {
		t.Errorf("update strategy %+v", d.Spec.UpdateStrategy)
	}
	probe := d.Spec.Template.Spec.Containers[0].ReadinessProbe
	if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != "/readyz?wait=5s" {
		t.Fatalf("readiness probe %+v", probe)
	}
	if wait := 5; int(probe.TimeoutSeconds) < 2*wait || probe.TimeoutSeconds > probe.PeriodSeconds {
		t.Errorf("a probe that waits for %d s has %d s every %d s", wait, probe.TimeoutSeconds, probe.PeriodSeconds)
	}
	none := daemonSet(t, decode(t, "chart", render(t, "{readinessProbe: null}")), "gpu-device-plugin")
	if probe := none.Spec.Template.Spec.Containers[0].ReadinessProbe; probe != nil {
		t.Errorf("a probe although there is to be none: %+v", probe)
	}
}
