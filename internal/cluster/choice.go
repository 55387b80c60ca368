package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// choose returns the name of the file that a node with this value of the label uses, among the
// names of those that there are; the name is empty for no file.
func choose(o config.NodeConfig, value string, names []string) (string, error) {
	if value != "" {
		if slices.Contains(names, value) {
			return value, nil
		}
		return "", fmt.Errorf("the node has the label %s=%s, and %s has no such file; it has: %s", o.Label, value, o.Dir,
			list(names))
	}
	if o.Default != "" {
		if slices.Contains(names, o.Default) {
			return o.Default, nil
		}
		return "", fmt.Errorf("the default configuration is %s, and %s has no such file; it has: %s", o.Default, o.Dir,
			list(names))
	}
	for _, f := range o.Fallbacks {
		switch {
		case f == config.FallbackNamed && slices.Contains(names, namedDefault):
			return namedDefault, nil
		case f == config.FallbackSingle && len(names) == 1:
			return names[0], nil
		case f == config.FallbackEmpty:
			return "", nil
		case f != config.FallbackNamed && f != config.FallbackSingle:
			return "", fmt.Errorf("the fallback %q is not one of: named, single, empty", f)
		}
	}
	return "", fmt.Errorf("the node has no label %s, there is no default configuration, and no fallback is possible; %s has: %s",
		o.Label, o.Dir, list(names))
}

// namedDefault is the name of the file that the fallback named uses.
const namedDefault = "default"

// list returns names for people.
func list(names []string) string {
	if len(names) == 0 {
		return "no files"
	}
	return inventory.Few(names)
}

// configurations returns the names of the files of a directory, in order. Those of a ConfigMap are
// links; names that begin with a dot are kubelet's own.
func configurations(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the directory of configuration files: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// path returns the path of the file with a name of choose.
func path(o config.NodeConfig, name string) string {
	if name == "" {
		return ""
	}
	return filepath.Join(o.Dir, name)
}

// The file of the last choice in the state directory.
const (
	choiceFile    = "node-config.json"
	choiceVersion = 1
	maxChoice     = 64 << 10
)

// A lastChoice is the file that was in force last, so that a process that starts while the API
// server is away offers what the one before it did.
type lastChoice struct {
	Version int `json:"version"`
	// File is the file's name; empty for no file.
	File string `json:"file"`
}

// readChoice returns the last choice that a state directory has; nil if there is none. A file that
// cannot be read is set aside, and the error says so.
func readChoice(dir string) (*lastChoice, error) {
	if dir == "" {
		return nil, nil
	}
	c := &lastChoice{}
	found, err := statefile.ReadState(filepath.Join(dir, choiceFile), maxChoice, choiceVersion, c)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the last choice of the configuration, which is kept as %s: %w",
			choiceFile+statefile.Damaged, err)
	case !found:
		return nil, nil
	}
	return c, nil
}

// writeChoice writes the choice into a state directory.
func writeChoice(dir, name string) error {
	if err := statefile.WriteState(filepath.Join(dir, choiceFile),
		lastChoice{Version: choiceVersion, File: name}); err != nil {
		return fmt.Errorf("write the choice of the configuration: %w", err)
	}
	return nil
}
