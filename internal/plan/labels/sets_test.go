package labels_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// A wanted set is a file of testdata/sets: what the node is, in comments, then the labels.
type wanted struct {
	profile, config, machine, timestamp string
	faults                              []simulator.Fault
	discovered, all                     map[string]string
}

func readSet(t *testing.T, file string) wanted {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	w := wanted{discovered: map[string]string{}, all: map[string]string{}}
	own := false
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSuffix(line, "\n")
		comment, isComment := strings.CutPrefix(line, "# ")
		name, value, _ := strings.Cut(comment, ": ")
		switch {
		case isComment && name == "profile":
			w.profile = value
		case isComment && name == "config":
			w.config = value
		case isComment && name == "machine":
			w.machine = value
		case isComment && name == "timestamp":
			w.timestamp = value
		case isComment && name == "fault":
			var f simulator.Fault
			if err := yaml.Unmarshal([]byte(value), &f); err != nil {
				t.Fatal(err)
			}
			w.faults = append(w.faults, f)
		case isComment:
			own = own || strings.HasPrefix(comment, "These are not of NVIDIA's")
		default:
			key, value, _ := strings.Cut(line, "=")
			w.all[key] = value
			if !own {
				w.discovered[key] = value
			}
		}
	}
	return w
}

// snapshot looks at the simulated node by the code that looks at real ones.
func (w wanted) snapshot(t *testing.T) inventory.Snapshot {
	t.Helper()
	name := w.profile
	if filepath.Ext(name) != "" {
		name = filepath.Join("testdata/nodes", name)
	}
	lost := map[int]bool{}
	var s inventory.Snapshot
	simulated.InVirtualTime(t, func(t testing.TB) {
		node, session := simulated.Open(t, name)
		look := func() {
			var err error
			if s, err = session.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		look()
		for _, f := range w.faults {
			if err := node.Inject(f); err != nil {
				t.Fatal(err)
			}
			if f.Kind == simulator.KindLost {
				i, _ := strconv.Atoi(f.GPU)
				lost[i] = true
			}
		}
		look()
	})
	s = simulated.Healthy(s)
	for i := range lost {
		s.GPUs[i].Health.State = inventory.Lost
	}
	return s
}

func (w wanted) options(t *testing.T) labels.Options {
	t.Helper()
	c, _, err := config.Sources{}.Resolve("config.yaml", []byte(w.config))
	if err != nil {
		t.Fatal(err)
	}
	timestamp, _ := strconv.ParseInt(w.timestamp, 10, 64)
	return labels.Options{Resources: c.Resource, Machine: w.machine, Timestamp: timestamp}
}

var (
	legalKey   = regexp.MustCompile(`^[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	legalValue = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$`)
)

// TestSets compares the labels of simulated nodes with sets that were written from the rules of
// NVIDIA's feature discovery: at least one for each profile and MIG strategy, and each way of
// sharing.
func TestSets(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/sets/*.txt")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d sets, want 40 or more: %v", len(files), err)
	}
	for _, profile := range simulator.Names() {
		for _, strategy := range []string{"none", "single", "mixed"} {
			if file := "testdata/sets/" + profile + "-" + strategy + ".txt"; !slices.Contains(files, file) {
				t.Errorf("%s: no such file", file)
			}
		}
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			w := readSet(t, file)
			s, o := w.snapshot(t), w.options(t)
			if diff := cmp.Diff(w.discovered, labels.Discovered(s, o)); diff != "" {
				t.Errorf("labels of feature discovery (-want +got):\n%s", diff)
			}
			all := labels.All(s, o)
			if diff := cmp.Diff(w.all, all); diff != "" {
				t.Errorf("all labels (-want +got):\n%s", diff)
			}
			for key, value := range all {
				if !legalKey.MatchString(key) || !legalValue.MatchString(value) {
					t.Errorf("%s=%s is not a legal label", key, value)
				}
				if !labels.Owns(key) {
					t.Errorf("Owns does not know %s", key)
				}
			}
		})
	}
}

// TestForeignKeys: labels of others are not ours, although they have the same prefix.
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	for _, key := range []string{
		"nvidia.com/gpu.deploy.driver", "nvidia.com/gpu-driver-upgrade-state", "nvidia.com/mig.config",
		"nvidia.com/mig.config.state",
		"nvidia.com/device-plugin.config", "nvidia.com/gpu.workload.config", "nvidia.com/vgpu.config",
		"nvidia.com/mig-manager.version",
		"nvidia.com/mig-1g.10gb.other", "feature.node.kubernetes.io/pci-10df.present", "kubernetes.io/hostname",
		"gpu-device-plugin.github.io/other",
	} {
		if labels.Owns(key) {
			t.Errorf("Owns claims %s", key)
		}
	}
}

// FuzzLegal: whatever a driver, a machine or a configuration says, labels are legal.
func FuzzLegal(f *testing.F) {
	f.Add("NVIDIA H100 80GB HBM3", "DGX H100", "580.95.05", "13.0", "1g.10gb+me")
	f.Add("\x00ä-–", strings.Repeat(". ", 90), "1.2.3.4", ".", "--")
	f.Fuzz(func(t *testing.T, model, machine, driver, cuda, profile string) {
		s := inventory.Snapshot{
			Driver: inventory.Driver{Version: driver, CUDA: cuda},
			GPUs: []inventory.GPU{{
				Model: model, MemoryBytes: 1 << 40, MIG: inventory.MIGEnabled, Class: machine, Clique: profile,
				VGPU:       inventory.VGPU{Present: true, HostDriver: machine, HostBranch: model},
				MIGDevices: []inventory.MIGDevice{{Profile: "1g.10gb", MemoryBytes: 1 << 30}},
			}, {Model: machine, Links: []inventory.Link{{NVLinks: 1}}}},
		}
		for _, config := range []string{"none", "single", "mixed"} {
			o := wanted{config: "{flags: {migStrategy: " + config + "}}", timestamp: "-1"}.options(t)
			o.Machine = machine
			for key, value := range labels.All(s, o) {
				if !legalKey.MatchString(key) || !legalValue.MatchString(value) {
					t.Errorf("%q=%q is not a legal label", key, value)
				}
			}
		}
	})
}

// TestHealth: the label sums up devices, MIG devices on their own.
func TestHealth(t *testing.T) {
	t.Parallel()
	good, bad := inventory.Health{State: inventory.Healthy}, inventory.Health{State: inventory.Unhealthy}
	gpu := func(h inventory.Health, migs ...inventory.Health) inventory.GPU {
		g := inventory.GPU{Health: h}
		for _, m := range migs {
			g.MIGDevices = append(g.MIGDevices, inventory.MIGDevice{Health: m})
		}
		return g
	}
	for want, nodes := range map[string][][]inventory.GPU{
		labels.HealthHealthy: {{gpu(good)}, {gpu(good, good, good), gpu(good)},
			{gpu(inventory.Health{State: inventory.Suspect})}},
		labels.HealthDegraded: {{gpu(good), gpu(bad)}, {gpu(good, good, bad)}, {gpu(bad, good), gpu(good, good)}},
		labels.HealthUnhealthy: {{gpu(bad)}, {gpu(bad, good, good)}, {gpu(good, bad)},
			{gpu(inventory.Health{State: inventory.Lost})}},
	} {
		for _, gpus := range nodes {
			if got := labels.All(inventory.Snapshot{GPUs: gpus}, labels.Options{})[labels.Health]; got != want {
				t.Errorf("%v: %s, want %s", gpus, got, want)
			}
		}
	}
	unread := inventory.Snapshot{LeftOut: []inventory.LeftOut{{Index: 0, Reason: "it cannot be identified"}}}
	if all := labels.All(unread, labels.Options{}); all[labels.Present] != "true" || all[labels.PCIPresent] != "true" {
		t.Errorf("with a GPU that cannot be read: %v; DaemonSets would leave the node", all)
	}
	if all := labels.All(inventory.Snapshot{}, labels.Options{Machine: "m"}); !maps.Equal(all, map[string]string{
		"nvidia.com/gpu.machine": "m", "nvidia.com/vgpu.present": "false",
	}) {
		t.Errorf("without GPUs: %v", all)
	}
}
