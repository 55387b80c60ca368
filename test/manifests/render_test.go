package manifests

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	helm "helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"
)

// newest is the Kubernetes that the chart is rendered for where no other is named.
const newest = "1.37"

// loadChart loads the package that a release delivers.
var loadChart = sync.OnceValues(func() (*helm.Chart, error) {
	folder, err := os.MkdirTemp("", "chart")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	cmd := exec.Command("make", "-C", "../..", "chart", "DIST="+folder)
	cmd.Env = append(os.Environ(), "MAKEFLAGS=") // not those of the make that runs the tests
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make chart: %w: %s", err, out)
	}
	packages, err := filepath.Glob(filepath.Join(folder, "gpu-device-plugin-*.tgz"))
	if err != nil || len(packages) != 1 {
		return nil, fmt.Errorf("make chart made %v, %w", packages, err)
	}
	return loader.Load(packages[0])
})

// objects are those that the function lookup of templates finds.
type objects struct{ texts []string }

// GetClientFor returns a client of an API server that has them.
func (o objects) GetClientFor(version, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	group, err := schema.ParseGroupVersion(version)
	if err != nil {
		return nil, false, err
	}
	var all []runtime.Object
	for _, text := range o.texts {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
			return nil, false, err
		}
		all = append(all, object)
	}
	resource, _ := meta.UnsafeGuessKindToResource(group.WithKind(kind))
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{resource: kind + "List"}, all...)
	return client.Resource(resource), kind != "Node" && kind != "RuntimeClass" && kind != "DeviceClass", nil
}

// render returns the chart's objects for values, a YAML text.
func render(t *testing.T, values string) []byte {
	t.Helper()
	text, err := renderChart(values)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func renderChart(values string) ([]byte, error) {
	objects, _, err := renderFor(newest, values)
	return objects, err
}

// renderFor renders the chart as Helm does, for a Kubernetes such as 1.29, and returns its objects
// and its NOTES.txt. Helm holds the values to the schema first.
func renderFor(kubernetes, text string) (objects []byte, notes string, err error) {
	return renderServed(kubernetes, chartutil.DefaultVersionSet, text)
}

// renderServed does that for an API server that serves these APIs, each as VERSION or VERSION/KIND.
func renderServed(
	kubernetes string, served chartutil.VersionSet, text string,
) (rendered []byte, notes string, err error) {
	return renderIn(kubernetes, served, text)
}

// renderIn does that for a cluster that has these objects, each a YAML text.
func renderIn(kubernetes string, served chartutil.VersionSet, text string, there ...string) (rendered []byte,
	notes string, err error) {
	release := chartutil.ReleaseOptions{Name: "gpu-device-plugin", Namespace: "kube-system", IsInstall: true}
	return renderAs(release, kubernetes, served, text, there...)
}

// renderAs does that for a release of another name or namespace.
func renderAs(
	release chartutil.ReleaseOptions, kubernetes string, served chartutil.VersionSet, text string, there ...string,
) (rendered []byte, notes string, err error) {
	loaded, err := loadChart()
	if err != nil {
		return nil, "", fmt.Errorf("load chart: %w", err)
	}
	values, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		return nil, "", fmt.Errorf("read values: %w", err)
	}
	cluster := chartutil.DefaultCapabilities.Copy()
	cluster.APIVersions = served
	_, minor, _ := strings.Cut(kubernetes, ".")
	cluster.KubeVersion = chartutil.KubeVersion{Version: "v" + kubernetes + ".0", Major: "1", Minor: minor}
	input, err := chartutil.ToRenderValues(loaded, values, release, cluster)
	if err != nil {
		return nil, "", fmt.Errorf("join values: %w", err)
	}
	files, err := engine.RenderWithClientProvider(loaded, input, objects{there})
	if err != nil {
		return nil, "", fmt.Errorf("render chart: %w", err)
	}
	var out bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if filepath.Ext(name) == ".yaml" && strings.TrimSpace(files[name]) != "" {
			fmt.Fprintf(&out, "---\n%s\n", files[name])
		}
	}
	return out.Bytes(), files["gpu-device-plugin/templates/NOTES.txt"], nil
}
