// Command openapi writes what the tests need of Kubernetes' OpenAPI documents: the schemas of the
// kinds that are deployed, and of what these are made of. They come from the Go module
// k8s.io/kubernetes, which is downloaded and removed again.
//
//	go run ./openapi 1.29.6 1.30.14 ... >testdata/openapi.jsonl
//
// The first line of the output has the versions. Each other line is the schema of a type, and the
// first of these versions that has it.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

var kinds = []string{
	"apps.v1.DaemonSet", "core.v1.ConfigMap", "core.v1.Pod", "core.v1.ServiceAccount",
	"rbac.v1.ClusterRole", "rbac.v1.ClusterRoleBinding", "rbac.v1.Role", "rbac.v1.RoleBinding",
	"admissionregistration.v1.ValidatingAdmissionPolicy", "admissionregistration.v1.ValidatingAdmissionPolicyBinding",
}

// line is the schema of a type.
type line struct {
	Type   string `json:"type"`
	Since  string `json:"since"` // such as 1.29
	Schema any    `json:"schema"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(versions []string) error {
	if len(versions) == 0 {
		return errors.New("give versions of Kubernetes, such as 1.29.6, the oldest first")
	}
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(versions); err != nil {
		return err
	}
	last := map[string][]byte{}
	var lines []line
	for _, version := range versions {
		types, err := load(version)
		if err != nil {
			return err
		}
		for name, schema := range types {
			text, err := json.Marshal(schema)
			if err != nil {
				return err
			}
			if !bytes.Equal(text, last[name]) {
				last[name] = text
				lines = append(lines, line{name, version[:strings.LastIndex(version, ".")], schema})
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b line) int { return cmp.Compare(a.Type, b.Type) })
	for _, l := range lines {
		if err := out.Encode(l); err != nil {
			return err
		}
	}
	return nil
}

// load returns the types that the kinds are made of in a version of Kubernetes.
func load(version string) (map[string]any, error) {
	cache, err := os.MkdirTemp("", "openapi")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(cache)
	download := exec.Command("go", "mod", "download", "-modcacherw", "-json", "k8s.io/kubernetes@v"+version)
	download.Env = append(os.Environ(), "GOMODCACHE="+cache)
	download.Stderr = os.Stderr
	answer, err := download.Output()
	if err != nil {
		return nil, fmt.Errorf("download Kubernetes %s: %w", version, err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(answer, &module); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(filepath.Join(module.Dir, "api/openapi-spec/swagger.json"))
	if err != nil {
		return nil, err
	}
	var document struct{ Definitions map[string]json.RawMessage }
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, err
	}
	reference := regexp.MustCompile(`"#/definitions/([^"]+)"`)
	types := map[string]any{}
	var add func(name string) error
	add = func(name string) error {
		raw, known := document.Definitions[name]
		if _, done := types[name]; done || !known {
			return nil
		}
		var schema map[string]any
		if err := json.Unmarshal(raw, &schema); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		strip(schema)
		types[name] = schema
		for _, match := range reference.FindAllSubmatch(raw, -1) {
			if err := add(string(match[1])); err != nil {
				return err
			}
		}
		return nil
	}
	for _, kind := range kinds {
		if err := add("io.k8s.api." + kind); err != nil {
			return nil, err
		}
	}
	return types, nil
}

// strip takes away from a schema what no test reads.
func strip(schema map[string]any) {
	delete(schema, "description")
	for key, value := range schema {
		switch inner, _ := value.(map[string]any); {
		case strings.HasPrefix(key, "x-kubernetes-"):
			delete(schema, key)
		case key == "properties":
			for _, property := range inner {
				if p, is := property.(map[string]any); is {
					strip(p)
				}
			}
		case inner != nil:
			strip(inner)
		}
	}
}
