package manifests

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/yaml"
)

// goldens are values whose whole render is in testdata/golden, so that a change of the chart shows
// what becomes of it.
var goldens = map[string]string{
	"default":      "{}",
	"mig-mixed":    "{migStrategy: mixed}",
	"time-slicing": "{config: {map: {default: \"version: v1\\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\"}}}",
	"cdi":          "{deviceListStrategy: [cdi-annotations, cdi-cri], nvidiaDriverRoot: /run/nvidia/driver, cdi: {nvidiaHookPath: /usr/bin/nvidia-cdi-hook}}",
	"units":        "{config: {map: {default: \"version: v1\\nselectors: [{indices: [0], units: true}]\"}}}",
	"simulated":    "{simulate: dgx-h100, affinity: null}",
	"gfd":          "{gfd: {enabled: true}}",
	"driver":       "{driver: {images: {r580: {reference: \"registry.example.com/driver:580.95.05\"}}}}",
	"mps":          "{config: {map: {default: \"version: v1\\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\"}}}",
	"node-config":  "{config: {map: {default: \"version: v1\", mig: \"version: v1\\nflags: {migStrategy: mixed}\"}}}",
	"features-on": "{features: {labels: nodeFeature, events: pods, condition: true, taint: true, changeTaint: true, nodeConfig: true}, " +
		"config: {name: gpu-configs, default: a100}, mps: {enabled: true}, kernelLog: true, preStartChecks: reset-clocks, metrics: {listen: all}}",
}

// TestGoldenRenders: go test -update rewrites them.
func TestGoldenRenders(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/golden/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); goldens[name] == "" {
			t.Errorf("%s belongs to no values", file)
		}
	}
	for name, values := range goldens {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects := render(t, values)
			decode(t, name, objects)
			// So that a release changes none of them.
			objects = bytes.ReplaceAll(objects, []byte(strings.TrimPrefix(number(t), "v")), []byte("VERSION"))
			got := append([]byte("# helm template, with the values "+values+"\n"), objects...)
			file := filepath.Join("testdata/golden", name+".yaml")
			if *update {
				if err := os.WriteFile(file, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if want := read(t, file); !bytes.Equal(want, got) {
				t.Errorf("%s (-want +got), go test -update writes it:\n%s", file, cmp.Diff(string(want), string(got)))
			}
		})
	}
}

// TestLint: helm lint --strict finds nothing, with the default values and others.
func TestLint(t *testing.T) {
	t.Parallel()
	version := chartutil.KubeVersion{Version: "v" + newest + ".0", Major: "1", Minor: strings.TrimPrefix(newest, "1.")}
	for name, text := range goldens {
		var values map[string]any
		if err := yaml.Unmarshal([]byte(text), &values); err != nil {
			t.Fatal(err)
		}
		linter := lint.AllWithKubeVersion(chart, values, "kube-system", &version)
		for _, m := range linter.Messages {
			if m.Severity >= support.InfoSev {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}
