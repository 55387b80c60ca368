package cli_test

import (
	"encoding/json"
	"fmt"
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

// brokenNode writes a simulated machine and returns its path: GPU 0 needs a reset, GPU 1 is lost, the
// firmware does not know the NUMA node of GPU 2, and the path between GPU 0 and 2 cannot be read.
func brokenNode(t *testing.T) string {
	t.Helper()
	return write(t, "node.yaml", `description: Four GPUs with faults
driver: 580.95.05
cuda: "13.0"
model: t4
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0, uuid: GPU-a}
- {bdf: "0000:18:00.0", pcie: 0/1/0}
- {bdf: "0000:a9:00.0", pcie: 1/0/0, numa: -1, uuid: GPU-c}
- {bdf: "0000:b9:00.0", pcie: 1/0/0, uuid: GPU-d}
faults:
- {kind: recovery-action, gpu: "0", action: reset}
- {kind: lost, gpu: "1"}
- {kind: fail, gpu: "0", call: DeviceGetTopologyCommonAncestor, return: UNKNOWN}
- {kind: fail, gpu: "2", call: DeviceGetTopologyCommonAncestor, return: UNKNOWN}
`)
}

// TestTopologyOfABrokenNode: a connection without a score has no number and no edge, and a GPU may
// have no NUMA node.
func TestTopologyOfABrokenNode(t *testing.T) {
	t.Parallel()
	node := brokenNode(t)
	matrix, err := topo(t, "--simulate", node)
	if err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(matrix, "\nNV<n>")
	if diff := cmp.Diff("      GPU0    GPU2    GPU3    NUMA\nGPU0  X       ?       SYS 10  0\n"+
		"GPU2  ?       X       PIX 50  -\nGPU3  SYS 10  PIX 50  X       1\n", table); diff != "" {
		t.Errorf("matrix (-want +got):\n%s", diff)
	}
	graph, err := topo(t, "--simulate", node, "-o", "dot")
	if err != nil {
		t.Fatal(err)
	}
	want := `graph gpus {
  node [shape=box];
  gpu0 [label="GPU0\n0000:17:00.0"];
  gpu1 [label="GPU2\n0000:a9:00.0"];
  gpu2 [label="GPU3\n0000:b9:00.0"];
  gpu0 -- gpu2 [label="SYS 10", penwidth=1.3];
  gpu1 -- gpu2 [label="PIX 50", penwidth=4.5];
}
`
	if diff := cmp.Diff(want, graph); diff != "" {
		t.Errorf("graph (-want +got):\n%s", diff)
	}
}

// TestPreferOnABrokenNode: GPUs that are not Healthy are chosen only if they are named.
func TestPreferOnABrokenNode(t *testing.T) {
	t.Parallel()
	node := brokenNode(t)
	for args, want := range map[string]string{
		"--size 2":                                "choice   2 3    50      0\n",
		"--size 1":                                "choice        2      0       400\nrunner-up 1   3      0       400\n",
		"--size 1 --runners-up 0":                 "choice   2      0       400\n",
		"--size 2 --available GPU-c,3":            "choice   2 3    50      0\n",
		"--size 2 --available 0,3":                "choice   0 3    10      50\n",
		"--size 1 --required 0":                   "choice   0      0       80\n",
		"--size 3":                                "3 GPUs are requested, and 2 are available",
		"--size 1 --available 1":                  `--available: no GPU has the index or UUID "1"`,
		"--size 1 --runners-up -1":                "--size must be 1 or more, and --runners-up not negative",
		"--size 2 --available 3 --required GPU-c": "choice   2 3    50      0\n",
	} {
		got, err := topo(t, append([]string{"prefer", "--simulate", node}, strings.Fields(args)...)...)
		if err != nil {
			got = err.Error()
		}
		if _, sets, _ := strings.Cut(got, "\n"); err == nil && sets != want || err != nil && got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
}

// TestPreferAmongManyGPUs: if the search ends before it has compared all sets, a limit of the best score is
// printed.
func TestPreferAmongManyGPUs(t *testing.T) {
	t.Parallel()
	const gpus, most = 40, 18 // NVLinks of an H100
	var list strings.Builder
	var links [gpus][gpus]int
	var lanes [gpus]int
	for a, random := 0, 1; a < gpus; a++ {
		fmt.Fprintf(&list, "- {bdf: \"0000:%02x:00.0\", pcie: 0/0/0}\n", 16+a)
		for b := range a {
			if random = random * 48271 % (1<<31 - 1); random%5 < 2 && lanes[a] < most && lanes[b] < most {
				links[a][b], links[b][a] = 1, 1
				lanes[a]++
				lanes[b]++
			}
		}
	}
	list.WriteString("nvlinks:\n")
	for _, row := range links {
		list.WriteString("- " + strings.Trim(fmt.Sprint(row), "[]") + "\n")
	}
	node := write(t, "node.yaml", "description: Random NVLinks\ndriver: 580.95.05\ncuda: \"13.0\"\n"+
		"model: h100-sxm5-80gb\ngpus:\n"+list.String())
	got, err := topo(t, "prefer", "--simulate", node, "--size", "14", "--runners-up", "0")
	if err != nil || !strings.Contains(got, "(the best set has at most 13650)") {
		t.Errorf("%v\n%s", err, got)
	}
}
