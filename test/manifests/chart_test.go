package manifests

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// TestChartREADME: the README of the chart lists each value with its default and its comment in
// values.yaml.
func TestChartREADME(t *testing.T) {
	t.Parallel()
	var document yamlv3.Node
	if err := yamlv3.Unmarshal(read(t, chart+"/values.yaml"), &document); err != nil {
		t.Fatal(err)
	}
	var described schemaNode
	if err := json.Unmarshal(read(t, chart+"/values.schema.json"), &described); err != nil {
		t.Fatal(err)
	}
	var plain, groups strings.Builder
	const head = "| value | default | meaning |\n|---|---|---|\n"
	plain.WriteString(head)
	pairs := document.Content[0].Content
	for i := 0; i < len(pairs); i += 2 {
		key, value := pairs[i], pairs[i+1]
		if !isGroup(key.Value, value) {
			plain.WriteString(row(t, "", key, value, &described))
			continue
		}
		fmt.Fprintf(&groups, "\n### %s\n\n", key.Value)
		if about := comment(key); about != "" {
			groups.WriteString(about + "\n\n")
		}
		groups.WriteString(head + rowsOf(t, key.Value+".", value, described.Properties[key.Value]))
	}
	heldTo(t, chart+"/README.md", "values", plain.String()+groups.String())
}

// isGroup reports whether the keys of a value are documented one by one. Those of Kubernetes' own
// types are not.
func isGroup(path string, value *yamlv3.Node) bool {
	switch path {
	case "affinity", "resources", "readinessProbe", "livenessProbe", "mps.updateStrategy", "monitoring.labels", "monitoring.dashboard.labels":
		return false
	}
	return value.Kind == yamlv3.MappingNode && len(value.Content) > 0
}

func rowsOf(t *testing.T, prefix string, mapping *yamlv3.Node, described *schemaNode) string {
	t.Helper()
	var rows strings.Builder
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		if isGroup(prefix+key.Value, value) {
			if about := comment(key); about != "" {
				fmt.Fprintf(&rows, "| `%s` | | %s |\n", prefix+key.Value, about)
			}
			rows.WriteString(rowsOf(t, prefix+key.Value+".", value, described.Properties[key.Value]))
			continue
		}
		rows.WriteString(row(t, prefix, key, value, described))
	}
	return rows.String()
}

// row returns the row of a value. The schema describes what has no comment.
func row(t *testing.T, prefix string, key, value *yamlv3.Node, described *schemaNode) string {
	t.Helper()
	var plain any
	if err := value.Decode(&plain); err != nil {
		t.Fatal(err)
	}
	node := &yamlv3.Node{}
	if err := node.Encode(plain); err != nil {
		t.Fatal(err)
	}
	if node.Kind != yamlv3.ScalarNode {
		node.Style = yamlv3.FlowStyle
	}
	text, err := yamlv3.Marshal(node)
	if err != nil {
		t.Fatal(err)
	}
	shown := "`" + strings.TrimSpace(string(text)) + "`"
	if len(shown) > 120 || strings.Contains(shown, "\n") {
		shown = "in `values.yaml`"
	}
	about := comment(key)
	if about == "" && described.Properties[key.Value] != nil {
		about = described.Properties[key.Value].Description
	}
	return fmt.Sprintf("| `%s%s` | %s | %s |\n", prefix, key.Value, shown, about)
}

// comment returns the comment above a key as one line for a table.
func comment(key *yamlv3.Node) string {
	lines := strings.Split(key.HeadComment, "\n")
	for i, line := range lines {
		if line == "" { // what stands before an empty line is about the whole file
			lines = lines[i+1:]
			break
		}
	}
	for i, line := range lines {
		lines[i] = strings.TrimSpace(strings.TrimPrefix(line, "#"))
	}
	return strings.ReplaceAll(strings.TrimSpace(strings.Join(lines, " ")), "|", `\|`)
}

// TestChartMetadata: Artifact Hub and Helm show the chart with its icon, licence, maintainers and
// image.
func TestChartMetadata(t *testing.T) {
	t.Parallel()
	loaded, err := loadChart()
	if err != nil {
		t.Fatal(err)
	}
	const raw = "https://raw.githubusercontent.com/gpu-device-plugin/gpu-device-plugin/main/"
	path, ours := strings.CutPrefix(loaded.Metadata.Icon, raw)
	if !ours {
		t.Fatalf("the icon is %s", loaded.Metadata.Icon)
	}
	icon := xml.NewDecoder(strings.NewReader(string(read(t, "../../"+path))))
	for {
		if _, err := icon.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the icon is no SVG: %v", err)
		}
	}
	if len(loaded.Metadata.Maintainers) == 0 || loaded.Metadata.Annotations["artifacthub.io/license"] != "Apache-2.0" {
		t.Errorf("maintainers %v, annotations %v", loaded.Metadata.Maintainers, loaded.Metadata.Annotations)
	}
	var images []struct{ Image string }
	if err := yaml.Unmarshal([]byte(loaded.Metadata.Annotations["artifacthub.io/images"]), &images); err != nil {
		t.Fatal(err)
	}
	if want := "ghcr.io/gpu-device-plugin/gpu-device-plugin:" + number(t); len(images) != 1 || images[0].Image != want {
		t.Errorf("the images are %v, want %s", images, want)
	}
	const blob = "https://github.com/gpu-device-plugin/gpu-device-plugin/blob/main/"
	var links []struct{ URL string }
	if err := yaml.Unmarshal([]byte(loaded.Metadata.Annotations["artifacthub.io/links"]), &links); err != nil ||
		len(links) == 0 {
		t.Fatalf("links %v, error %v", links, err)
	}
	for _, url := range append([]string{loaded.Metadata.Maintainers[0].URL}, urls(links)...) {
		if file, inside := strings.CutPrefix(url, blob); inside {
			if _, err := os.Stat("../../" + file); err != nil {
				t.Errorf("%s names no file", url)
			}
		}
	}
}

func urls(links []struct{ URL string }) (all []string) {
	for _, l := range links {
		all = append(all, l.URL)
	}
	return all
}
