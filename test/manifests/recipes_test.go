package manifests

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

const recipes = "../../deployments/recipes"

// TestRecipes: the chart takes the values of each recipe, what a controller is to look for is a
// condition that these values have on the Node, and its taint is tolerated. docs/recipes.md links each
// file, and shows no YAML but that of these files.
func TestRecipes(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/recipes.md")
	if err != nil {
		t.Fatal(err)
	}
	var shown []string
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		shown = append(shown, block[1])
	}
	var texts []string
	err = filepath.WalkDir(recipes, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text := string(read(t, path))
		texts = append(texts, text)
		if !strings.Contains(string(page), "(../"+strings.TrimPrefix(path, "../../")+")") {
			t.Errorf("docs/recipes.md has no link to %s", path)
		}
		var fields map[string]any
		if err := yaml.UnmarshalStrict([]byte(text), &fields); err != nil {
			t.Errorf("%s: %v", path, err)
			return nil
		}
		if fields["apiVersion"] != nil {
			values := string(read(t, filepath.Join(filepath.Dir(path), "values.yaml")))
			judgeRecipe(t, path, fields, values)
		}
		if entry.Name() == "values.yaml" {
			decode(t, path, render(t, text))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(texts) < 8 || len(shown) < 6 {
		t.Errorf("%d files, and %d on the page", len(texts), len(shown))
	}
	for _, text := range shown {
		if !slices.Contains(texts, text) {
			t.Errorf("docs/recipes.md shows what is in no file of deployments/recipes:\n%s", text)
		}
	}
}

// judgeRecipe checks the names in an object for a controller against the values of the chart beside it.
func judgeRecipe(t *testing.T, path string, object map[string]any, values string) {
	t.Helper()
	var chart struct {
		Features    struct{ Condition bool }
		Tolerations []struct{ Key, Effect string }
	}
	if err := yaml.Unmarshal([]byte(values), &chart); err != nil {
		t.Fatal(err)
	}
	if !chart.Features.Condition {
		t.Errorf("%s: the values write no condition", path)
	}
	spec, _ := object["spec"].(map[string]any)
	conditions := nested(spec, "conditions", "unhealthyConditions", "unhealthyNodeConditions")
	if len(conditions) == 0 {
		t.Errorf("%s: no conditions", path)
	}
	for _, c := range conditions {
		if name := c.(map[string]any)["type"]; name != config.GPUHealthy {
			t.Errorf("%s: the condition %v is not written by these values", path, name)
		}
	}
	if taint, ok := spec["taint"].(map[string]any); ok {
		tolerated := false
		for _, is := range chart.Tolerations {
			tolerated = tolerated || is.Key == taint["key"] && is.Effect == taint["effect"]
		}
		if !tolerated {
			t.Errorf("%s: the daemon's pods do not tolerate the taint %v", path, taint)
		}
	}
}

// nested returns the list with one of these names in an object or in the objects below it; nil if
// there is none.
func nested(object map[string]any, names ...string) []any {
	for name, value := range object {
		if list, ok := value.([]any); ok && slices.Contains(names, name) {
			return list
		}
		if below, ok := value.(map[string]any); ok {
			if list := nested(below, names...); list != nil {
				return list
			}
		}
	}
	return nil
}
