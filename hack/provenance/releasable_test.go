package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReleasable: what hack/release refuses, and what it only warns of where nothing is signed.
func TestReleasable(t *testing.T) {
	t.Parallel()
	const (
		changelog = "## [v1.2.3] - 2026-11-28\n"
		dirty     = "THE TREE HAS CHANGES THAT ARE NOT COMMITTED"
		noSection = "CHANGELOG.md has no section for v1.2.3 with a date"
	)
	for name, tt := range map[string]struct {
		version   string // v1.2.3 if empty
		changelog string
		change    bool   // a file is not committed
		key       string // the file of the key
		built     string // the commit that was built; HEAD for that of the tree
		refused   bool
		commit    bool // the commit is printed
		says      string
	}{
		"a release":                           {changelog: changelog, key: "key.pem", commit: true},
		"a trial":                             {changelog: changelog, commit: true},
		"another version":                     {version: "v1.2.4", changelog: changelog, refused: true, says: "the source has version v1.2.3, and not v1.2.4"},
		"a version without a v":               {version: "1.2.3", changelog: changelog, refused: true, says: "and not 1.2.3"},
		"changes, signed":                     {changelog: changelog, change: true, key: "key.pem", refused: true, says: dirty},
		"changes, a trial":                    {changelog: changelog, change: true, says: dirty + ", so there is no provenance; do not publish this"},
		"no section, signed":                  {changelog: "## [Unreleased]\n", key: "key.pem", refused: true, says: noSection},
		"no section, a trial":                 {changelog: "## [Unreleased]\n", commit: true, says: noSection},
		"a section without a date, signed":    {changelog: "## [v1.2.3]\n", key: "key.pem", refused: true, says: noSection},
		"a section of a longer version":       {changelog: "## [v1.2.30] - 2026-11-28\n", key: "key.pem", refused: true, says: noSection},
		"a key that is missing":               {changelog: changelog, key: "none.pem", refused: true, says: "none.pem cannot be read"},
		"after the build":                     {changelog: changelog, key: "key.pem", built: "HEAD"},
		"after the build of another commit":   {changelog: changelog, built: "0123", refused: true, says: "has changed during the build"},
		"after a build that changes the tree": {changelog: changelog, built: "HEAD", change: true, refused: true, says: "has changed during the build"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree := t.TempDir()
			script, err := os.ReadFile(filepath.Join(root, "hack", "releasable"))
			if err != nil {
				t.Fatal(err)
			}
			for file, text := range map[string]string{
				"hack/releasable": string(script), "CHANGELOG.md": tt.changelog, ".gitignore": "*.pem\n", "key.pem": "a key",
				"internal/base/version/version.go": "const Number = \"v1.2.3\"\n",
			} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(tree, file)), 0o700); err != nil {
					t.Fatal(err)
				}
				put(t, filepath.Join(tree, file), text)
			}
			command(t, tree, nil, "git", "init", "-q")
			command(t, tree, nil, "git", "add", ".")
			command(t, tree, nil, "git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "a: b")
			head := strings.TrimSpace(command(t, tree, nil, "git", "rev-parse", "HEAD"))
			if tt.change {
				put(t, filepath.Join(tree, "CHANGELOG.md"), tt.changelog+"more\n")
			}
			version := tt.version
			if version == "" {
				version = "v1.2.3"
			}
			cmd := exec.CommandContext(t.Context(), "bash", "hack/releasable", version, strings.Replace(tt.built, "HEAD", head, 1))
			cmd.Dir, cmd.Env = tree, append(os.Environ(), "KEY="+tt.key)
			var out, problems bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &problems
			failed := cmd.Run() != nil
			if failed != tt.refused || (out.String() == head+"\n") != tt.commit || !tt.commit && out.Len() > 0 ||
				!strings.Contains(problems.String(), tt.says) || (problems.Len() > 0) != (tt.says != "") {
				t.Errorf("refused: %v, prints %q, says %q; want %+v", failed, out.String(), problems.String(), tt)
			}
		})
	}
}
