package field_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Files that users have given in place of a configuration file or a file of layouts.
const (
	daemonFile = "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	layoutFile = "version: v1\nmig-configs:\n  all-1g.5gb:\n  - {devices: all, device-filter: [\"0x20B010DE\"], mig-enabled: true, mig-devices: {1g.5gb: 7}}\n" +
		"  spare: [{devices: [20], mig-enabled: false}]\n"
	configMap = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plugin-config}\ndata:\n  config.yaml: |\n    version: v1\n    flags: {migStrategy: mixed}\n"
)

// TestFilesOfOtherKinds: a file that is no configuration file is refused with what it is, by config
// check and by the daemon's start, which would serve the defaults (C4).
func TestFilesOfOtherKinds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text, says string
		status     int
	}{
		"a configuration file": {daemonFile, "is valid", 0},
		"a version alone":      {"version: v1\n", "is valid", 0},
		"an empty file":        {"", "file: is empty; the defaults apply", 0},
		"a ConfigMap":          {configMap, "is a Kubernetes ConfigMap; give the text of one key of its data", 1},
		"a ConfigMap in JSON": {`{"kind": "ConfigMap", "apiVersion": "v1", "data": {"a": "version: v1"}}`,
			"is a Kubernetes ConfigMap", 1},
		"a DaemonSet": {"apiVersion: apps/v1\nkind: DaemonSet\nspec: {}\n",
			`is a Kubernetes object of the kind "DaemonSet"`, 1},
		"a list": {"apiVersion: v1\nkind: List\nitems: []\n", `is a Kubernetes object of the kind "List"`,
			1},
		"an object without a kind": {"apiVersion: v1\ndata: {}\n", "is a Kubernetes object", 1},
		"a ConfigMap's data": {"config.yaml: |\n  version: v1\n",
			`has no key of a configuration file, but "config.yaml"`, 1},
		"values of the chart": {"config: {map: {default: 'version: v1'}}\n",
			`has no key of a configuration file, but "config"`, 1},
		"layouts of mig-parted": {layoutFile, "has the MIG layouts of mig-parted (mig-configs), and is no configuration file; name it with mig.configFile", 1},
		"two documents": {daemonFile + "---\n" + daemonFile,
			"has a second document at line 5; only one is allowed", 1},
		"a ConfigMap and a file":    {configMap + "---\n" + daemonFile, "has a second document", 1},
		"an unknown key beside one": {"version: v1\nshaaring: {}\n", "shaaring: unknown key, ignored", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			text, status := run(t, "config", "check", file)
			if status != c.status || !strings.Contains(text, c.says) {
				t.Errorf("config check: exit status %d, want %d and %q:\n%s", status, c.status, c.says, text)
			}
			if c.status == 0 {
				return
			}
			text, status = run(t, "--simulate=t4", "--config-file", file, "--kubelet-socket=", "--control-socket=",
				"--state-dir=", "--cdi-dir="+t.TempDir())
			if status != 1 || !strings.Contains(text, c.says) {
				t.Errorf("the daemon: exit status %d, want 1 and %q:\n%s", status, c.says, text)
			}
		})
	}
}

// TestLayoutsForOtherGPUs: a layout that has an item for no GPU of the node is not possible, with
// the layouts that are (gop#646, C4). A file of another kind is called what it is.
func TestLayoutsForOtherGPUs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text, args string
		says       []string
		status     int
	}{
		"of other GPUs": {
			layoutFile, "--layout all-1g.5gb", []string{"Layout all-1g.5gb is not possible. It changes 0 of 8 GPUs.",
				"the layout all-1g.5gb has no item for any GPU of this node (PCI device 0x233010DE); add an item for them; the GPUs have the profiles 1g.10gb"}, 1,
		},
		"of an index that is not there": {layoutFile, "--layout spare",
			[]string{"the layout spare has no item for any GPU", "the layout names GPU 20, and there is no such GPU"}, 1},
		"with one that fits": {
			layoutFile + "  ours: [{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}]\n", "--layout all-1g.5gb", []string{"layouts that have one: ours"}, 1,
		},
		"of some GPUs": {"version: v1\nmig-configs: {some: [{devices: [3], mig-enabled: true, mig-devices: {1g.10gb: 7}}]}\n",
			"", []string{
				"Layout some is possible. It changes 1 of 8 GPUs.", "stays: the layout has no item for this GPU"}, 0},
		"a ConfigMap":          {configMap, "", []string{"the file is a Kubernetes ConfigMap: give the text of one key of its data"}, 1},
		"a configuration file": {daemonFile, "", []string{"the file is a configuration file of the daemon (it has the key flags), and has no layouts"}, 1},
		"another object": {"apiVersion: v1\nkind: Pod\n", "",
			[]string{"the file is a Kubernetes object of the kind \"Pod\", and has no layouts"}, 1},
		"an empty file": {"", "", []string{"the file has no keys: it needs version: v1 and mig-configs"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "layouts.yaml")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			text, status := run(t, append([]string{"mig", "plan", "--simulate=dgx-h100", "--config", file},
				strings.Fields(c.args)...)...)
			joined := strings.Join(strings.Fields(text), " ")
			for _, says := range c.says {
				if !strings.Contains(joined, says) {
					t.Errorf("no %q in:\n%s", says, text)
				}
			}
			if status != c.status {
				t.Errorf("exit status %d, want %d:\n%s", status, c.status, text)
			}
		})
	}
}
