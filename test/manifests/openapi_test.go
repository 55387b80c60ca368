package manifests

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

// openAPI returns for each version of Kubernetes, such as 1.29, a function that holds an object to
// Kubernetes' OpenAPI of that version. It refuses fields that are not there, as the API server does
// with strict validation.
func openAPI(t *testing.T) map[string]func(document []byte) error {
	t.Helper()
	file, err := os.Open("testdata/openapi.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	var releases []string
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &releases) != nil {
		t.Fatal("testdata/openapi.jsonl does not begin with its versions")
	}
	minor := func(release string) string { return release[:strings.LastIndex(release, ".")] }
	order := map[string]int{}
	for i, r := range releases {
		order[minor(r)] = i
	}
	schemas := make([]map[string]any, len(releases)) // of each version, by type
	for i := range schemas {
		schemas[i] = map[string]any{}
	}
	for lines.Scan() {
		var line struct {
			Type, Since string
			Schema      map[string]any
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		for i := order[line.Since]; i < len(releases); i++ { // later lines replace it
			schemas[i][line.Type] = line.Schema
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	checks := map[string]func([]byte) error{}
	for i, release := range releases {
		for name, schema := range schemas[i] {
			asJSONSchema(name, schema.(map[string]any))
		}
		data, err := json.Marshal(map[string]any{"$schema": "http://json-schema.org/draft-07/schema#",
			"definitions": schemas[i]})
		if err != nil {
			t.Fatal(err)
		}
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		compiler := jsonschema.NewCompiler()
		if err := compiler.AddResource("kubernetes.json", document); err != nil {
			t.Fatal(err)
		}
		checks[minor(release)] = func(document []byte) error {
			var meta struct{ APIVersion, Kind string }
			if err := sigsyaml.Unmarshal(document, &meta); err != nil {
				return err
			}
			group, version, found := strings.Cut(meta.APIVersion, "/")
			if !found {
				group, version = "core", meta.APIVersion
			}
			group, _, _ = strings.Cut(group, ".")
			name := fmt.Sprintf("io.k8s.api.%s.%s.%s", group, version, meta.Kind)
			if schemas[i][name] == nil {
				return fmt.Errorf("Kubernetes %s has no %s of %s", minor(release), meta.Kind, meta.APIVersion)
			}
			schema, err := compiler.Compile("kubernetes.json#/definitions/" + name)
			if err != nil {
				return err
			}
			converted, err := sigsyaml.YAMLToJSON(document)
			if err != nil {
				return err
			}
			object, err := jsonschema.UnmarshalJSON(bytes.NewReader(converted))
			if err != nil {
				return err
			}
			return schema.Validate(object)
		}
	}
	return checks
}

// asJSONSchema changes a schema of OpenAPI, which says some things in words, to one that says them.
func asJSONSchema(name string, schema map[string]any) {
	switch {
	case strings.HasSuffix(name, ".IntOrString") || strings.HasSuffix(name, ".Quantity"):
		schema["type"] = []string{"string", "integer"}
		delete(schema, "format")
	case schema["properties"] != nil:
		schema["additionalProperties"] = false
	}
}

// TestOpenAPI: every object of the chart with the values of the golden renders, and every static
// one, is valid in each version of Kubernetes that is supported. The admission policies are of
// 1.30.
func TestOpenAPI(t *testing.T) {
	t.Parallel()
	checks := openAPI(t)
	versions := slices.Sorted(maps.Keys(checks))
	if want := []string{"1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", newest}; !slices.Equal(versions,
		want) {
		t.Fatalf("schemas of %v, want those of %v", versions, want)
	}
	statics, err := filepath.Glob("../../deployments/[skn]*/*.yaml") // static, kubectl-gpu, node-agent
	if err != nil || len(statics) < 4 {
		t.Fatalf("manifests %v, error %v", statics, err)
	}
	statics = append(statics, filepath.Join(mpsFolder, "mps-control-daemon.yaml"),
		filepath.Join(cleanupFolder, "cleanup.yaml"))
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			check := checks[version]
			seen := 0
			hold := func(name string, text []byte) {
				for _, document := range documents(t, text) {
					seen++
					if err := check(document); err != nil {
						t.Errorf("%s: %v\n%s", name, err, document)
					}
				}
			}
			for name, values := range goldens {
				objects, _, err := renderFor(version, values)
				if err != nil {
					t.Fatal(err)
				}
				if policies := bytes.Contains(objects, []byte("kind: ValidatingAdmissionPolicy")); policies && version == "1.29" {
					t.Errorf("%s: admission policies, which %s does not have", name, version)
				}
				hold(name, objects)
			}
			for _, file := range statics {
				// The schemas are without DeviceClasses, which the API server of the tests on a real node takes
				// strictly.
				if filepath.Base(file) != "kustomization.yaml" && filepath.Base(file) != "classes.yaml" &&
					(version != "1.29" || filepath.Base(file) != "rights.yaml") {
					hold(file, read(t, file))
				}
			}
			if seen < 3*len(goldens) {
				t.Errorf("only %d objects were checked", seen)
			}
		})
	}
}

// TestOpenAPIRefuses: what the schemas are for.
func TestOpenAPIRefuses(t *testing.T) {
	t.Parallel()
	checks := openAPI(t)
	for _, tt := range []struct{ version, document, want string }{
		{newest, "{apiVersion: v1, kind: ConfigMap, dato: {}}", "dato"},
		{newest, "{apiVersion: v1, kind: ConfigMap, data: {a: 1}}", "want string"},
		{newest, "{apiVersion: apps/v1, kind: DaemonSet, spec: {template: {spec: {containers: [{name: a, imagePolicy: b}]}}}}", "imagePolicy"},
		{newest, "{apiVersion: apps/v1, kind: DaemonSet, spec: {template: {spec: {}}}}", "selector"},
		{"1.29", "{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy}",
			"1.29 has no ValidatingAdmissionPolicy"},
	} {
		if err := checks[tt.version]([]byte(tt.document)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s in %s: error %v, want one with %q", tt.document, tt.version, err, tt.want)
		}
	}
}

// documents returns those of a YAML stream that are not empty.
func documents(t *testing.T, data []byte) [][]byte {
	t.Helper()
	var found [][]byte
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		if converted, err := sigsyaml.YAMLToJSON(document); err != nil {
			t.Fatal(err)
		} else if string(bytes.TrimSpace(converted)) != "null" {
			found = append(found, document)
		}
	}
}
