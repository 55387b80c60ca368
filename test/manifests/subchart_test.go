package manifests

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	helm "helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
)

// TestSubchart: a chart has this one as a part, under its name or an alias, on a condition and
// beside global values.
func TestSubchart(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		alias, values string
		set           string // the DaemonSet that is rendered; empty for none
		refused       string
	}{
		{values: "{gpu-device-plugin: {enabled: true}}", set: "parent-gpu-device-plugin"},
		{values: "{gpu-device-plugin: {enabled: true, simulate: t4}, global: {imageRegistry: x, storageClass: null}}",
			set: "parent-gpu-device-plugin"},
		{values: "{gpu-device-plugin: {enabled: false}}"},
		{values: "{gpu-device-plugin: {enabled: true, tags: {gpu: true}, global: {a: b}}}", set: "parent-gpu-device-plugin"},
		{alias: "gpus", values: "{gpus: {enabled: true, fullnameOverride: gpu-device-plugin}}", set: "gpu-device-plugin"},
		{alias: "gpus", values: "{gpus: {enabled: true}}", set: "parent-gpus"},
		{alias: "gpus", values: "{gpus: {enabled: false}}"},
		{values: "{gpu-device-plugin: {enabled: true, enable: true}}", refused: "enable"},
		{values: "{gpu-device-plugin: {enabled: sometimes}}", refused: "enabled"},
	} {
		t.Run(tt.alias+tt.values, func(t *testing.T) {
			t.Parallel()
			text, err := renderPart(tt.alias, tt.values)
			if tt.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tt.refused) {
					t.Errorf("error %v, want one about %s", err, tt.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			objects := decode(t, "parent", text)
			switch {
			case tt.set == "" && len(objects) > 0:
				t.Errorf("%d objects although the condition is false", len(objects))
			case tt.set != "":
				if set := only[*appsv1.DaemonSet](t, objects); set.Name != tt.set {
					t.Errorf("the DaemonSet is %s, want %s", set.Name, tt.set)
				}
			}
		})
	}
}

// renderPart renders a chart that has this one as a part.
func renderPart(alias, text string) ([]byte, error) {
	part, err := loader.LoadDir(chart)
	if err != nil {
		return nil, fmt.Errorf("load chart: %w", err)
	}
	name := part.Name()
	if alias != "" {
		name = alias
	}
	parent := &helm.Chart{Metadata: &helm.Metadata{
		APIVersion: helm.APIVersionV2, Name: "parent", Version: "1.0.0", Type: "application",
		Dependencies: []*helm.Dependency{{Name: part.Name(), Version: "*", Alias: alias, Condition: name + ".enabled"}},
	}}
	parent.AddDependency(part)
	values, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("read values: %w", err)
	}
	if err := chartutil.ProcessDependenciesWithMerge(parent, values); err != nil {
		return nil, fmt.Errorf("process dependencies: %w", err)
	}
	release := chartutil.ReleaseOptions{Name: "parent", Namespace: "kube-system", IsInstall: true}
	cluster := chartutil.DefaultCapabilities.Copy()
	cluster.KubeVersion = chartutil.KubeVersion{Version: "v" + newest + ".0", Major: "1",
		Minor: strings.TrimPrefix(newest, "1.")}
	input, err := chartutil.ToRenderValues(parent, values, release, cluster)
	if err != nil {
		return nil, fmt.Errorf("join values: %w", err)
	}
	files, err := engine.Render(parent, input)
	if err != nil {
		return nil, fmt.Errorf("render: %w", err)
	}
	var out bytes.Buffer
	for file, content := range files {
		if strings.HasSuffix(file, ".yaml") && !strings.Contains(file, "/tests/") && strings.TrimSpace(content) != "" {
			fmt.Fprintf(&out, "---\n%s\n", content)
		}
	}
	return out.Bytes(), nil
}
