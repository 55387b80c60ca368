package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestOutputFormats: each command has its formats, and the first is the one for people.
func TestOutputFormats(t *testing.T) {
	t.Parallel()
	for want, o := range map[string]*output{
		"table|yaml|json":      {people: outputTable},
		"text|yaml|json":       {people: outputText},
		"yaml|json":            {people: outputYAML},
		"table|yaml|json|wide": {people: outputTable, further: []string{outputWide}},
	} {
		if o.Type() != want {
			t.Errorf("%s, want %s", o.Type(), want)
		}
		for format := range strings.SplitSeq(want, "|") {
			if err := o.Set(format); err != nil || o.String() != format {
				t.Errorf("%s: %v", format, err)
			}
		}
		if err := o.Set("xml"); err == nil || err.Error() != `unknown output "xml": give one of `+strings.ReplaceAll(want,
			"|", ", ") || o.String() == "xml" {
			t.Errorf("xml: %v", err)
		}
	}
	value := map[string]int{"b": 1}
	for format, want := range map[string]string{outputYAML: "b: 1\n", outputJSON: "{\n  \"b\": 1\n}\n",
		outputTable: "A   B\n"} {
		var b bytes.Buffer
		if err := (&output{format: format}).print(&b, &value, func(w io.Writer) { fmt.Fprintln(w, "A\tB") }); err != nil ||
			b.String() != want {
			t.Errorf("%s: %q, %v", format, b.String(), err)
		}
	}
	for _, format := range []string{outputYAML, outputJSON} {
		if err := (&output{format: format}).print(io.Discard, func() {}, nil); err == nil ||
			!strings.HasPrefix(err.Error(), "print result: ") {
			t.Errorf("%s of what has none: %v", format, err)
		}
	}
}

// TestDashes: one dash becomes two before a flag of the command with more than one letter, and
// before nothing else.
func TestDashes(t *testing.T) {
	t.Parallel()
	root := DevicePlugin().newRootCommand()
	for args, want := range map[string]string{
		"-mig-strategy=none -mig-strategy none": "--mig-strategy=none --mig-strategy none",
		"--mig-strategy=none -v 2 -v=2":         "--mig-strategy=none -v 2 -v=2",
		"-no-such-flag status -":                "-no-such-flag status -",
		"mps-control-daemon -mig-strategy=none": "mps-control-daemon --mig-strategy=none",
		"gpu-feature-discovery -oneshot":        "gpu-feature-discovery --oneshot",
		"-oneshot":                              "-oneshot",
		"plan -oneshot":                         "plan -oneshot",
	} {
		given := strings.Fields(args)
		if got := strings.Join(doubleDashed(given, root), " "); got != want || strings.Join(given, " ") != args {
			t.Errorf("%s is %s, want %s", args, got, want)
		}
	}
}

// TestNamesInExamples: each program's examples have its own name, in every line, and paths and
// images keep theirs.
func TestNamesInExamples(t *testing.T) {
	t.Parallel()
	root := NodeAgent(fakeCluster{}).newRootCommand()
	plan, _, err := root.Find([]string{"doctor"})
	if err != nil {
		t.Fatal(err)
	}
	want := "  gpu-node-agent doctor\n  kubectl -n kube-system exec POD -- gpu-node-agent doctor -o json\n" +
		"  gpu-node-agent doctor --simulate dgx-h100"
	if diff := cmp.Diff(want, plan.Example); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if clearing, _, err := root.Find([]string{"health", "clear"}); err != nil ||
		clearing.Example != "  gpu-node-agent health clear --gpu 3" {
		t.Errorf("%q, %v", clearing.Example, err)
	}
	if DevicePlugin().kind() != config.DevicePlugin || NodeAgent(fakeCluster{}).kind() != config.NodeAgent {
		t.Error("a program is taken for the other one")
	}
}

// TestFindingsInNumbers: the first line counts findings, the worst first, and leaves out what there
// is none of.
func TestFindingsInNumbers(t *testing.T) {
	t.Parallel()
	all := func(severities ...diagnosis.Severity) (findings []diagnosis.Finding) {
		for _, s := range severities {
			findings = append(findings, diagnosis.Finding{Severity: s, Check: "c", Message: "m", Evidence: []string{"e"}})
		}
		return findings
	}
	for want, findings := range map[string][]diagnosis.Finding{
		"doctor: no problems found: 1 ok (at)":    all(diagnosis.OK),
		"doctor: no problems found: 2 ok (at)":    all(diagnosis.OK, diagnosis.OK),
		"doctor: 1 error, 1 warning, 1 info (at)": all(diagnosis.Info, diagnosis.Warning, diagnosis.Error),
		"doctor: 2 errors, 3 warnings, 2 not checked (at)": all(diagnosis.NotChecked, diagnosis.NotChecked, diagnosis.Error,
			diagnosis.Error, diagnosis.Warning,
			diagnosis.Warning, diagnosis.Warning),
	} {
		got := findingsText("at", findings, 100)
		if first, _, _ := strings.Cut(got, "\n"); first != want {
			t.Errorf("%q, want %q", first, want)
		}
		if seen := strings.Count(got, "seen: e"); seen != strings.Count(got, "c  ")-strings.Count(got, "\nok ") {
			t.Errorf("the evidence of what is not ok: %d times in\n%s", seen, got)
		}
	}
	want := "\nerror        driver             broken\n" + strings.Repeat(" ", 32) +
		"seen: file\n    $ fix it\n\nok           kubelet            well\n"
	got := findingsText("", []diagnosis.Finding{
		{Severity: diagnosis.Error, Check: "driver", Message: "broken", Evidence: []string{"file"}, Remedy: []string{"fix it"}},
		{Severity: diagnosis.OK, Check: "kubelet", Message: "well", Evidence: []string{"file"}, Remedy: []string{"fix it"}},
	}, 100)
	if _, got, _ = strings.Cut(got, "\n"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestDoctorOfADaemon: what it says of a daemon that answers, one that does not, and one that
// cannot be asked; and of a file that is wrong.
func TestDoctorOfADaemon(t *testing.T) {
	t.Parallel()
	socket, _ := answering(t, map[string][]any{daemon.CallStatus: {status.Status{Version: "v1"}, errors.New("no")}})
	if fact := askStatus(t.Context(), socket); fact.Value.Status.Version != "v1" || fact.Missing != "" || fact.Hung {
		t.Errorf("one that answers: %+v", fact)
	}
	if fact := askStatus(t.Context(), socket); fact.Missing != "The daemon does not tell its status: no" || !fact.Hung {
		t.Errorf("one that refuses: %+v", fact)
	}
	if fact := askStatus(t.Context(), "/nowhere/c.sock"); !strings.HasPrefix(fact.Missing,
		"No daemon answers at /nowhere/c.sock") || fact.Hung {
		t.Errorf("none: %+v", fact)
	}
	if fact := askStatus(t.Context(), ""); !strings.Contains(fact.Missing, "--control-socket is empty") || fact.Hung {
		t.Errorf("one without a socket: %+v", fact)
	}
	for name, test := range map[string]struct {
		args          []string
		problem, fail string
	}{
		"well":         {nil, "", ""},
		"a wrong file": {[]string{"--config-file=/nowhere.yaml"}, "The configuration file cannot be used: ", ""},
		"a wrong flag": {[]string{"--mig-strategy=some", "--config-file=/nowhere.yaml"}, "", "--mig-strategy"},
	} {
		cmd := newDoctorCommand()
		if err := cmd.Flags().Parse(test.args); err != nil {
			t.Fatal(err)
		}
		_, problem, err := doctorConfig(config.Sources{Env: func(string) (string, bool) { return "", false },
			Flags: cmd.Flags()})
		if !strings.HasPrefix(problem, test.problem) || (problem == "") != (test.problem == "") ||
			(err == nil) != (test.fail == "") ||
			err != nil && !strings.Contains(err.Error(), test.fail) {
			t.Errorf("%s: %q, %v", name, problem, err)
		}
	}
	if got := ExitStatus(3).Error(); got != "exit status 3" {
		t.Error(got)
	}
}

// TestPlanInWords: each device with what is known of it, and each thing that a container gets.
func TestPlanInWords(t *testing.T) {
	t.Parallel()
	node := 1
	p := printedPlan{
		Resources: []printedResource{{Name: "a/b", Devices: []printedDevice{
			{ID: "GPU-0", Index: "0", NUMANode: &node, Healthy: true, Reason: "-"}, {ID: "GPU-1", Index: "1", Reason: "lost"},
		}, Container: printedEdits{
			Env: map[string]string{"B": "2", "A": "1"}, Mounts: []containeredits.Mount{{ContainerPath: "/c", HostPath: "/h"}},
			Nodes:       []containeredits.DeviceNode{{ContainerPath: "/dev/c", HostPath: "/dev/h", Permissions: "rw"}},
			Annotations: map[string]string{"y": "2", "x": "1"}, CDIDevices: []string{"v/c=n"},
		}}},
		LeftOut: []string{"l"}, Warnings: []string{"w"},
	}
	want := `a/b: 2
  DEVICE   INDEX   NUMA   HEALTH
  GPU-0    0       1      Healthy
  GPU-1    1       -      Unhealthy: lost
  a container with the first device gets:
    env A=1
    env B=2
    mount /c from /h
    device node /dev/c from /dev/h (rw)
    annotation x=1
    annotation y=2
    CDI device v/c=n
left out: l
warning: w
`
	var b bytes.Buffer
	if err := (&output{format: outputTable}).print(&b, &p, p.table); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestConnectionsInWords: one without a score has no number and no edge, and a GPU may have no NUMA
// node.
func TestConnectionsInWords(t *testing.T) {
	t.Parallel()
	m := topology.Matrix{GPUs: []topology.MatrixGPU{
		{Index: 0, BDF: "0000:01:00.0", NUMANode: 0, Peers: []topology.MatrixPeer{{Label: "X"}, {Label: "?"},
			{Label: "NV4", Score: 200}}},
		{Index: 2, BDF: "0000:02:00.0", NUMANode: inventory.NoNUMANode,
			Peers: []topology.MatrixPeer{{Label: "?"}, {Label: "X"}, {Label: "SYS", Score: 10}}},
		{Index: 5, BDF: "0000:03:00.0", NUMANode: 1, Peers: []topology.MatrixPeer{{Label: "NV4", Score: 200},
			{Label: "SYS", Score: 10}, {Label: "X"}}},
	}}
	var b bytes.Buffer
	if err := matrixOutput("matrix").print(&b, m); err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(b.String(), "\nNV<n>")
	if diff := cmp.Diff("      GPU0     GPU2    GPU5     NUMA\nGPU0  X        ?       NV4 200  0\n"+
		"GPU2  ?        X       SYS 10   -\nGPU5  NV4 200  SYS 10  X        1\n", table); diff != "" {
		t.Errorf("matrix (-want +got):\n%s", diff)
	}
	want := `graph gpus {
  node [shape=box];
  gpu0 [label="GPU0\n0000:01:00.0"];
  gpu1 [label="GPU2\n0000:02:00.0"];
  gpu2 [label="GPU5\n0000:03:00.0"];
  gpu0 -- gpu2 [label="NV4 200", penwidth=4.5];
  gpu1 -- gpu2 [label="SYS 10", penwidth=0.7];
}
`
	if diff := cmp.Diff(want, dot(m)); diff != "" {
		t.Errorf("graph (-want +got):\n%s", diff)
	}
	o := matrixOutput("matrix")
	if err := o.Set("xml"); err == nil || o != "matrix" {
		t.Errorf("xml: %v", err)
	}
	for _, format := range []string{"dot", "json", "matrix"} {
		if err := o.Set(format); err != nil || o.String() != format {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// TestPreferredSets: GPUs that are not Healthy are chosen only if they are named, others that are
// not available count as in use, and what is not certain is said.
func TestPreferredSets(t *testing.T) {
	t.Parallel()
	var gpus []inventory.GPU
	for i := range 4 {
		g := inventory.GPU{Index: i * 2, UUID: fmt.Sprint("GPU-", i), BDF: fmt.Sprintf("0000:0%d:00.0", i)}
		if g.Health.State = inventory.Healthy; i == 0 {
			g.Health.State = inventory.Unhealthy
		}
		gpus = append(gpus, g)
	}
	for name, test := range map[string]struct {
		available, required []string
		size, runnersUp     int
		sets                int
		first               string
		fails               string
	}{
		"all Healthy ones":          {nil, nil, 3, 3, 1, "[2 4 6]", ""},
		"runners-up":                {nil, nil, 2, 1, 2, "", ""},
		"no runners-up":             {nil, nil, 2, 0, 1, "", ""},
		"by index and UUID":         {[]string{"2", "GPU-2"}, nil, 2, 3, 1, "[2 4]", ""},
		"a sick one that is named":  {[]string{"0", "6"}, nil, 2, 0, 1, "[0 6]", ""},
		"what has to be there":      {nil, []string{"6"}, 1, 3, 1, "[6]", ""},
		"too many":                  {nil, nil, 4, 0, 0, "", "4 GPUs are requested, and 3 are available"},
		"one that is not available": {[]string{"1"}, nil, 1, 0, 0, "", `--available: no GPU has the index or UUID "1"`},
		"one that is not there": {nil, []string{"GPU-9"}, 1, 0, 0, "",
			`--required: no GPU has the index or UUID "GPU-9"`},
	} {
		p, err := newPreferredSets(gpus, test.available, test.required, test.size, test.runnersUp)
		if fails := fmt.Sprint(err); fails != test.fails && (err != nil || test.fails != "") {
			t.Errorf("%s: %v", name, err)
		}
		if len(p.Sets) != test.sets || test.first != "" && fmt.Sprint(p.Sets[0].Indices) != test.first {
			t.Errorf("%s: %+v", name, p.Sets)
		}
	}
	var b bytes.Buffer
	p := preferredSets{Sets: []preferredSet{{Indices: []int{1, 2}, Score: 5, Cost: 6, Bound: 7},
		{Indices: []int{3}, Score: 4, Exact: true, Bound: 9}}}
	p.table(&b)
	if want := "\tGPUS\tSCORE\tCOST\nchoice\t1 2\t5 (the best set has at most 7)\t6\nrunner-up 1\t3\t4\t0\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
	for args, fails := range map[string]bool{"--size 0": true, "--size 1 --runners-up -1": true,
		"--size 1 --runners-up 0": false} {
		if _, err := execute(t.Context(), append([]string{"topology", "prefer", "--simulate", "dgx-1"},
			strings.Fields(args)...)...); (err != nil) != fails {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestRowsOfMIG: instances are in their places, what is free is too, and a text never leaves its
// place.
func TestRowsOfMIG(t *testing.T) {
	t.Parallel()
	eighth := strings.Repeat(" ", 10)
	for name, test := range map[string]struct {
		p    layout.PlannedPartitions
		want string
	}{
		"off":      {layout.PlannedPartitions{MIG: "disabled", MemorySlices: 8}, "MIG disabled"},
		"none":     {layout.PlannedPartitions{MIG: "unsupported"}, "MIG unsupported"},
		"not read": {layout.PlannedPartitions{MIG: "enabled"}, "MIG enabled, not known how it is divided"},
		"empty":    {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8}, strings.Repeat("|"+eighth, 8) + "|"},
		"at the end": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
			Instances: []layout.PlannedInstance{{Profile: "1g.10gb", Start: 7, Size: 1,
				Devices: []string{"1g.10gb"}}}}, strings.Repeat("|"+eighth, 7) + "|1g.10gb   |"},
		"a long name": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
			Instances: []layout.PlannedInstance{{Profile: "1g.10gb+me.all", Size: 1}}}, "|1g.10gb+me" +
			strings.Repeat("|"+eighth, 7) + "|"},
		"without parts": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 4,
			Instances: []layout.PlannedInstance{{Profile: "2g.12gb", Size: 2}}}, "|" + "2g.12gb empty" +
			strings.Repeat(" ", 30) + strings.Repeat("|"+strings.Repeat(" ", 21), 2) + "|"},
	} {
		if got := rowOf(test.p); got != test.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, test.want)
		}
	}
	for slices, want := range map[int]int{0: 88, 1: 88, 8: 11, 12: 7, 88: 1, 100: 1} {
		if got := sliceWidth(slices); got != want {
			t.Errorf("%d slices: %d columns, want %d", slices, got, want)
		}
	}
	if got := ruler(2); got != "0"+strings.Repeat(" ", 43)+"1" {
		t.Errorf("ruler: %q", got)
	}
	for want, words := range map[string][]string{"": nil, "a": {"a"}, "2 x a": {"a", "a"},
		"a, 2 x b, a": {"a", "b", "b", "a"}} {
		if got := wordsWithCounts(words); got != want {
			t.Errorf("%q: %q", words, got)
		}
	}
}

// TestGPUsOfAPlan: the ruler is there where instances are, and a GPU that is not changed has one
// line.
func TestGPUsOfAPlan(t *testing.T) {
	t.Parallel()
	id := 3
	kept := layout.PlannedInstance{ID: &id, Profile: "1g.10gb", Start: 1, Size: 1, Devices: []string{"1g.10gb"},
		InUse: true}
	off, on := layout.PlannedPartitions{MIG: "disabled"}, layout.PlannedPartitions{MIG: "enabled", MemorySlices: 2,
		Instances: []layout.PlannedInstance{kept}}
	const head = "GPU 1  H100  GPU-1\n"
	ruled := "  slice    0" + strings.Repeat(" ", 43) + "1\n"
	row := "|" + strings.Repeat(" ", 43) + "|1g.10gb" + strings.Repeat(" ", 36) + "|\n"
	for name, test := range map[string]struct {
		gpu  layout.PlannedGPU
		want string
	}{
		"nothing to do": {layout.PlannedGPU{Before: on, After: on}, ruled + "  before  " + row + "  nothing to do\n"},
		"off":           {layout.PlannedGPU{Before: off, After: off}, "  before  MIG disabled\n  nothing to do\n"},
		"left out":      {layout.PlannedGPU{Before: off, After: off, Note: "n"}, "  before  MIG disabled\n  stays: n\n"},
		"not possible": {layout.PlannedGPU{Before: off, After: off, Reason: "r", Note: "n"},
			"  before  MIG disabled\n  not possible: r\n"},
		"switched on": {layout.PlannedGPU{Before: off, After: on,
			Steps: []layout.PlannedStep{{Action: inventory.MIGEnable}}}, ruled + "  before  MIG disabled\n  after   " + row +
			"   1. enable MIG mode while nothing uses the GPU\n   =  GPU instance 3, 1g.10gb at slice 1 stays, in use\n"},
		"switched off": {layout.PlannedGPU{Before: on, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGDisable}}}, ruled + "  before  " + row +
			"  after   MIG disabled\n   1. disable MIG mode while nothing uses the GPU\n"},
		"many steps": {layout.PlannedGPU{Before: off, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGCreateInstance, GPU: &layout.PlannedInstance{
				Profile: "7g.80gb", Size: 8, Devices: []string{"1c.7g.80gb", "2c.7g.80gb", "1c.7g.80gb", "3c.7g.80gb"},
			}}}}, "  before  MIG disabled\n  after   MIG disabled\n" +
			"   1. create GPU instance 7g.80gb at slices 0 to 7, with 1c.7g.80gb, 2c.7g.80gb, 1c.7g.80gb,\n      3c.7g.80gb\n"},
		"without places": {layout.PlannedGPU{Before: layout.PlannedPartitions{MIG: "enabled"}, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGDisable}}},
			"  before  MIG enabled, not known how it is divided\n  after   MIG disabled\n" +
				"   1. disable MIG mode while nothing uses the GPU\n"},
	} {
		var b bytes.Buffer
		test.gpu.Index, test.gpu.Model, test.gpu.UUID = 1, "H100", "GPU-1"
		printPlannedGPU(&b, test.gpu)
		if diff := cmp.Diff(head+test.want, b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestPlanForAProgram: the GPU's steps with the instances that they are about.
func TestPlanForAProgram(t *testing.T) {
	t.Parallel()
	part := layout.Part{GPUInstance: inventory.GPUInstance{ID: 1, Profile: "1g.10gb", Start: 2, Size: 1}, Exists: true}
	compute := inventory.ComputeInstance{ID: 5, Start: 1, Slices: 2}
	changes := layout.Changes{Layout: "a", Warnings: []string{"second"},
		GPUs: []layout.GPUChange{{GPU: layout.GPU{Index: 3, UUID: "GPU-3", Model: "H100"}, Steps: []layout.Step{
			{Action: inventory.MIGEnable, Part: part}, {Action: inventory.MIGDisable,
				Part: part}, {Action: inventory.MIGDestroyCompute, Part: part, Compute: compute},
			{Action: inventory.MIGDestroyInstance, Part: part}, {Action: inventory.MIGCreateInstance},
			{Action: inventory.MIGCreateCompute, Compute: compute},
		}}}}
	p := layout.NewPlanned(changes, map[string]string{"GPU-3": "ampere"}, []string{"first"})
	if p.Layout != "a" || !p.Possible || !p.GPUs[0].Resets || p.Err() != nil {
		t.Errorf("%+v", p)
	}
	if diff := cmp.Diff([]string{"first", "second"}, p.Warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	text, err := json.Marshal(p.GPUs[0].Steps)
	if err != nil {
		t.Fatal(err)
	}
	const instance, other = `{"id":1,"profile":"1g.10gb","start":2,"size":1,"devices":[]}`, `{"profile":"","start":0,"size":0,"devices":[]}`
	want := fmt.Sprintf(`[{"action":%q},{"action":%q},{"action":%q,"gpuInstance":%s,"computeInstance":{"id":5,"start":1,"slices":2}},`+
		`{"action":%q,"gpuInstance":%s},{"action":%q,"gpuInstance":%s},{"action":%q,"gpuInstance":%s,"computeInstance":{"start":1,"slices":2}}]`,
		inventory.MIGEnable, inventory.MIGDisable, inventory.MIGDestroyCompute, instance, inventory.MIGDestroyInstance,
		instance,
		inventory.MIGCreateInstance, other, inventory.MIGCreateCompute, other)
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
