package cluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func TestChoose(t *testing.T) {
	t.Parallel()
	const label = "nvidia.com/device-plugin.config"
	all := []config.Fallback{config.FallbackNamed, config.FallbackSingle, config.FallbackEmpty}
	for name, tt := range map[string]struct {
		value, byDefault string
		fallbacks        []config.Fallback
		names            []string
		want             string
		problem          string
	}{
		"the label's":                    {value: "a", byDefault: "b", names: []string{"a", "b"}, want: "a"},
		"an unknown one":                 {value: "c", byDefault: "b", fallbacks: all, names: []string{"a", "b"}, problem: label + "=c"},
		"no label":                       {byDefault: "b", fallbacks: all, names: []string{"a", "b", "default"}, want: "b"},
		"no label, an unknown default":   {byDefault: "c", fallbacks: all, names: []string{"a"}, problem: "the default configuration is c"},
		"the named one":                  {fallbacks: all, names: []string{"a", "default"}, want: "default"},
		"the single one":                 {fallbacks: all, names: []string{"a"}, want: "a"},
		"none of several":                {fallbacks: all, names: []string{"a", "b"}, want: ""},
		"none of none":                   {fallbacks: all, want: ""},
		"single, and there are several":  {fallbacks: all[:2], names: []string{"a", "b"}, problem: "no fallback is possible"},
		"single before named":            {fallbacks: []config.Fallback{"single", "named"}, names: []string{"default"}, want: "default"},
		"empty before named":             {fallbacks: []config.Fallback{"empty", "named"}, names: []string{"default"}, want: ""},
		"an unknown fallback":            {fallbacks: []config.Fallback{"named", "last"}, names: []string{"a"}, problem: `"last" is not one of: named`},
		"an unknown one comes too late":  {fallbacks: []config.Fallback{"named", "last"}, names: []string{"default"}, want: "default"},
		"nothing is said":                {names: []string{"default"}, problem: "no fallback is possible"},
		"no files":                       {value: "a", problem: "no files"},
		"a name that leaves the folder":  {value: "..", names: []string{"a"}, problem: "no such file"},
		"very many files are not listed": {value: "a", names: strings.Split(strings.Repeat("b", 100), ""), problem: "and 90 more"},
	} {
		o := config.NodeConfig{Dir: "/configs", Label: label, Default: tt.byDefault, Fallbacks: tt.fallbacks}
		got, err := choose(o, tt.value, tt.names)
		if got != tt.want || (err == nil) != (tt.problem == "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
			t.Errorf("%s: %q, %v, want %q, %q", name, got, err, tt.want, tt.problem)
		}
	}
}

// TestConfigurationsOfAConfigMap: kubelet's own names are left out, and so are folders.
func TestConfigurationsOfAConfigMap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(
		os.Mkdir(filepath.Join(dir, "..2026"), 0o700), os.Mkdir(filepath.Join(dir, "folder"), 0o700),
		os.Symlink("..2026", filepath.Join(dir, "..data")), os.WriteFile(filepath.Join(dir, "..2026", "a"), nil, 0o600),
		os.Symlink("..data/a", filepath.Join(dir, "a")), os.WriteFile(filepath.Join(dir, "b.yaml"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	names, err := configurations(dir)
	if strings.Join(names, " ") != "a b.yaml" || err != nil {
		t.Errorf("%q, %v", names, err)
	}
	if _, err := configurations(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there has files")
	}
}

func TestLastChoice(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	if c, err := readChoice(dir); c != nil || err != nil {
		t.Errorf("before: %v, %v", c, err)
	}
	for _, name := range []string{"a", ""} {
		if err := writeChoice(dir, name); err != nil {
			t.Fatal(err)
		}
		if c, err := readChoice(dir); err != nil || c == nil || c.File != name {
			t.Errorf("%q: %v, %v", name, c, err)
		}
	}
	for _, text := range []string{"{", `{"version": 2, "file": "a"}`} {
		if err := os.WriteFile(filepath.Join(dir, choiceFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := readChoice(dir); c != nil || err == nil {
			t.Errorf("%s: %v, %v", text, c, err)
		}
		kept, err := os.ReadFile(filepath.Join(dir, "node-config.json.damaged"))
		if string(kept) != text || err != nil {
			t.Errorf("%s: kept %q: %v", text, kept, err)
		}
		if c, err := readChoice(dir); c != nil || err != nil {
			t.Errorf("%s, once it is set aside: %v, %v", text, c, err)
		}
	}
}
