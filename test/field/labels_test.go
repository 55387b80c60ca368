package field_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestLongLabels: the name of a GPU that is long is shortened, and not what tells its devices from
// those of other nodes (gop#2249, C5).
func TestLongLabels(t *testing.T) {
	t.Parallel()
	const shared = "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}, {name: nvidia.com/mig-1g.24gb, replicas: 2}]}}}"
	machine, err := os.ReadFile("testdata/long-label.yaml")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]string{} // the names of the cases, by value: no two nodes look alike
	for name, c := range map[string]struct {
		model, profiles, strategy, config string
		key, want                         string // a pattern
	}{
		"whole": {"Max-Q Workstation Edition", "", "none", "", "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition`},
		"shared": {"Max-Q Workstation Edition", "", "none", shared, "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition-SHARED`},
		"single": {"Max-Q Workstation Edition", "1g.24gb,1g.24gb", "single", "", "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstatio-[0-9a-f]{4}-MIG-1g\.24gb`},
		"single, shared": {"Max-Q Workstation Edition", "1g.24gb,1g.24gb", "single", shared, "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Wor-[0-9a-f]{4}-MIG-1g\.24gb-SHARED`},
		"mixed": {"Max-Q Workstation Edition", "1g.24gb-me", "mixed", "", "mig-1g.24gb-me.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Worksta-[0-9a-f]{4}-MIG-1g\.24gb-me`},
		"media engines": {"Max-Q Workstation Edition", "1g.24gb+me.all", "mixed", "", "mig-1g.24gb.me.all.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Wor-[0-9a-f]{4}-MIG-1g\.24gb\.me\.all`},
		"of two kinds": {"Max-Q Workstation Edition", "1g.24gb,1g.24gb-me", "single", "", "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstatio-[0-9a-f]{4}-MIG-INVALID`},
		"the other edition": {"Max-Q Workstation Edition Two", "1g.24gb,1g.24gb", "single", "", "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstatio-[0-9a-f]{4}-MIG-1g\.24gb`},
		"a longer one": {strings.Repeat("Very ", 10) + "Long", "", "none", "", "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-(Very-)*Ver(y-V)?-[0-9a-f]{4}`},
		"longer, shared": {strings.Repeat("Very ", 10) + "Long", "", "none", shared, "gpu.product",
			`NVIDIA-RTX-PRO-6000-Blackwell-(Very-)*V?e?r?y?-[0-9a-f]{4}-SHARED`},
	} {
		folder := t.TempDir()
		text := strings.NewReplacer("Max-Q Workstation Edition", c.model, "mig: [PROFILES]",
			"mig: ["+c.profiles+"]").Replace(string(machine))
		if c.profiles == "" {
			text = strings.ReplaceAll(text, ", mig: []", "")
		}
		args := []string{
			"gpu-feature-discovery", "--oneshot", "--output-file=", "--use-node-feature-api=false", "--mig-strategy", c.strategy, "--simulate", filepath.Join(folder, "node.yaml"),
		}
		if err := os.WriteFile(filepath.Join(folder, "node.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if c.config != "" {
			if err := os.WriteFile(filepath.Join(folder, "config.yaml"), []byte(c.config), 0o600); err != nil {
				t.Fatal(err)
			}
			args = append(args, "--config-file", filepath.Join(folder, "config.yaml"))
		}
		out, status := run(t, args...)
		value := ""
		for line := range strings.Lines(out) {
			key, v, is := strings.Cut(strings.TrimSpace(line), "=")
			if !is || !strings.HasPrefix(key, "nvidia.com/") {
				continue
			}
			if key == "nvidia.com/"+c.key {
				value = v
			}
			if len(v) > 63 || len(strings.TrimPrefix(key, "nvidia.com/")) > 63 || v != strings.Trim(v, "-_.") {
				t.Errorf("%s: %s is no label", name, line)
			}
		}
		if status != 0 || !regexp.MustCompile("^"+c.want+"$").MatchString(value) {
			t.Errorf("%s: exit status %d; %s is %q, want %s\n%s", name, status, c.key, value, c.want, out)
		}
		if of := fmt.Sprintf("%s, and %s", values[value], name); values[value] != "" {
			t.Errorf("%s have one value %s", of, value)
		}
		values[value] = name
	}
}
