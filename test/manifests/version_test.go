package manifests

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// number returns the version of the program, such as v1.2.3.
func number(t *testing.T) string {
	t.Helper()
	found := regexp.MustCompile(`\nconst Number = "(v\d+\.\d+\.\d+)"\n`).FindSubmatch(read(t,
		"../../internal/base/version/version.go"))
	if found == nil {
		t.Fatal("internal/base/version has no Number such as v1.2.3")
	}
	return string(found[1])
}

// TestVersion: chart, manifests and the changelog name the version of the program. make set-version
// writes them.
func TestVersion(t *testing.T) {
	t.Parallel()
	version := number(t)
	loaded, err := loadChart()
	if err != nil {
		t.Fatal(err)
	}
	if "v"+loaded.Metadata.Version != version || loaded.Metadata.AppVersion != version {
		t.Errorf("the chart has the versions %s and %s, want %s", loaded.Metadata.Version, loaded.Metadata.AppVersion,
			version)
	}
	log := string(read(t, "../../CHANGELOG.md"))
	_, section, _ := strings.Cut(log, "\n## ["+version+"] - ")
	section, _, _ = strings.Cut(section, "\n## ")
	if !regexp.MustCompile(`^\d{4}-\d\d-\d\d\n`).MatchString(section) ||
		!strings.Contains(section, "\n### Known issues\n") {
		t.Errorf("CHANGELOG.md has no section for %s with a date and its known issues", version)
	}
	if !strings.Contains(log, "\n## [Unreleased]\n") || !strings.Contains(log, "\n["+version+"]: https://") {
		t.Errorf("CHANGELOG.md has no section for what is not released, or no link for %s", version)
	}
	image := regexp.MustCompile(`image: (ghcr\.io/gpu-device-plugin/[^ \n]+)`)
	files, err := filepath.Glob("../../deployments/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		for _, named := range image.FindAllStringSubmatch(string(read(t, file)), -1) {
			if found++; named[1] != "ghcr.io/gpu-device-plugin/gpu-device-plugin:"+version {
				t.Errorf("%s names %s", file, named[1])
			}
		}
	}
	if found == 0 {
		t.Error("no manifest names an image")
	}
}
