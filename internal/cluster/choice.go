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

// chooseFile returns the name of the configuration file for a node with this value of the label,
// chosen among names. The name is empty for no file.
func chooseFile(o config.NodeConfig, value string, names []string) (string, error) {
	if value != "" {
		if slices.Contains(names, value) {
			return value, nil
		}
		return "", fmt.Errorf("the node has the label %s=%s, and %s has no such file; it has: %s", o.Label, value,
			o.Dir,
			listNames(names))
	}
	if o.Default != "" {
		if slices.Contains(names, o.Default) {
			return o.Default, nil
		}
		return "", fmt.Errorf("the default configuration is %s, and %s has no such file; it has: %s", o.Default, o.Dir,
			listNames(names))
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
	return "",
		fmt.Errorf("the node has no label %s, there is no default configuration, "+
			"and no fallback is possible; %s has: %s",
			o.Label, o.Dir, listNames(names))
}

// namedDefault is the file name of the fallback named.
const namedDefault = "default"

// listNames returns names as text for messages.
func listNames(names []string) string {
	if len(names) == 0 {
		return "no files"
	}
	return inventory.Few(names)
}

// configurations returns the sorted names of the files in a directory. The files of a ConfigMap are
// links; names that begin with a dot belong to the kubelet.
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

// filePath returns the path of a file returned by chooseFile.
func filePath(o config.NodeConfig, name string) string {
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

// A lastChoice is the last configuration file in force, so that a process that starts without the
// API server advertises the same devices as the previous process.
type lastChoice struct {
	Version int `json:"version"`
	// File is the name of the file; empty for no file.
	File string `json:"file"`
}

// readChoice returns the last choice in a state directory; nil if there is none. An unreadable file
// is set aside, and the error says so.
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

// writeChoice writes the choice to a state directory.
func writeChoice(dir, name string) error {
	if err := statefile.WriteState(filepath.Join(dir, choiceFile),
		lastChoice{Version: choiceVersion, File: name}); err != nil {
		return fmt.Errorf("write the choice of the configuration: %w", err)
	}
	return nil
}
