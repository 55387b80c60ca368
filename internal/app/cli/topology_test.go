package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// topo runs the topology command with some arguments and returns what it prints.
func topo(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return printed(t, append([]string{"topology"}, args...)...)
}

func TestTopologyMatrix(t *testing.T) {
	got, err := topo(t, "--simulate", "dgx-1")
	if err != nil {
		t.Fatal(err)
	}
	want := `      GPU0     GPU1     GPU2     GPU3     GPU4     GPU5     GPU6     GPU7     NUMA
GPU0  X        NV1 150  NV1 130  NV2 230  NV2 210  SYS 10   SYS 10   SYS 10   0
GPU1  NV1 150  X        NV2 230  NV1 130  SYS 10   NV2 210  SYS 10   SYS 10   0
GPU2  NV1 130  NV2 230  X        NV2 250  SYS 10   SYS 10   NV1 110  SYS 10   0
GPU3  NV2 230  NV1 130  NV2 250  X        SYS 10   SYS 10   SYS 10   NV1 110  0
GPU4  NV2 210  SYS 10   SYS 10   SYS 10   X        NV1 150  NV1 130  NV2 230  1
GPU5  SYS 10   NV2 210  SYS 10   SYS 10   NV1 150  X        NV2 230  NV1 130  1
GPU6  SYS 10   SYS 10   NV1 110  SYS 10   NV1 130  NV2 230  X        NV2 250  1
GPU7  SYS 10   SYS 10   SYS 10   NV1 110  NV2 230  NV1 130  NV2 250  X        1
`
	table, _, _ := strings.Cut(got, "\nNV<n>")
	if diff := cmp.Diff(want, table); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestSimulatedNodeOfTheDaemon: topology and plan show the simulated node of the daemon that
// answers, unless a node is named.
func TestSimulatedNodeOfTheDaemon(t *testing.T) {
	h := newHost(t, "--simulate", "dgx-1")
	h.says("simulated node dgx-1", "status")
	for _, command := range []string{"topology", "topology prefer", "plan", "plan -o classes"} {
		words := strings.Fields(command)
		beside, err := printed(t, append(words, "--control-socket", h.socket)...)
		if err != nil {
			t.Fatal(err)
		}
		named, err := printed(t, append(words, "--simulate", "dgx-1")...)
		if err != nil || beside != named || beside == "" {
			t.Errorf("%s: %v, prints %q beside the daemon, and with the node named %q", command, err, beside, named)
		}
	}
	const notice = "The daemon runs on the simulated node dgx-1, shown here without faults; " +
		"see status for its present state.\n"
	for arguments, want := range map[string]bool{
		"topology": true, "plan": true, "topology --simulate dgx-1": false, "plan --simulate dgx-1": false,
	} {
		cmd := program(t, append(strings.Fields(arguments), "--control-socket", h.socket)...)
		var complaints strings.Builder
		cmd.Stderr = &complaints
		if _, err := cmd.Output(); err != nil || strings.Contains(complaints.String(), notice) != want {
			t.Errorf("%s: %v, standard error has %q, want the notice: %v", arguments, err, complaints.String(), want)
		}
	}
	if got, err := topo(t, "--simulate", "t4", "--control-socket", h.socket); err != nil || strings.Contains(got, "GPU7") {
		t.Errorf("a node that is named: %v\n%s", err, got)
	}
}

func TestTopologyJSON(t *testing.T) {
	got, err := topo(t, "--simulate", "dgx-h100", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var m topology.Matrix
	if err := json.Unmarshal([]byte(got), &m); err != nil {
		t.Fatal(err)
	}
	if len(m.GPUs) != 8 || m.GPUs[0].Peers[7].Label != "NV18" || !m.GPUs[0].Peers[7].Switched {
		t.Errorf("got %s", got)
	}
}

// TestTopologyOfASlowDriver: all links are printed, also those that one scan does not tell.
func TestTopologyOfASlowDriver(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("the driver takes 6 s: make test-all runs it")
	}
	want, err := topo(t, "--simulate", "dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	p.Faults = []simulator.Fault{{Kind: simulator.KindSlow, Call: "DeviceGetNvLinkState", Delay: "20ms"}}
	text, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "dgx-h100.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := topo(t, "--simulate", file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestTopologyDOT(t *testing.T) {
	got, err := topo(t, "--simulate", "dgx-1", "-o", "dot")
	if err != nil {
		t.Fatal(err)
	}
	if edges := strings.Count(got, " -- "); edges != 28 || !strings.Contains(got,
		`gpu2 -- gpu3 [label="NV2 250", penwidth=4.5];`) {
		t.Errorf("%d edges in\n%s", edges, got)
	}
}

func TestTopologyPrefer(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want string
	}{
		{
			"required", []string{"--size", "2", "--available", "1,2,3,4", "--required", "1"},
			`              GPUS   SCORE   COST
choice        1 2    230     3840
runner-up 1   1 3    130     4740
runner-up 2   1 4    10      4140
`,
		},
		{
			"everything", []string{"--size", "4", "--runners-up", "1"},
			`              GPUS      SCORE   COST
choice        0 1 2 3   1120    6080
runner-up 1   4 5 6 7   1120    6080
`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := topo(t, append([]string{"prefer", "--simulate", "dgx-1"}, tt.args...)...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestTopologyPreferRefuses(t *testing.T) {
	tests := []struct {
		args []string
		want string
	}{
		{[]string{"--size", "9"}, "9 GPUs are requested, and 8 are available"},
		{[]string{"--size", "0"}, "--size must be 1 or more, and --runners-up not negative"},
		{[]string{"--available", "1,11"}, `--available: no GPU has the index or UUID "11"`},
		{[]string{"--required", "x"}, `--required: no GPU has the index or UUID "x"`},
	}
	for _, tt := range tests {
		t.Run(tt.want, func(t *testing.T) {
			_, err := topo(t, append([]string{"prefer", "--simulate", "dgx-1"}, tt.args...)...)
			if err == nil || err.Error() != tt.want {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
}
