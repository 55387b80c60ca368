//go:build !kubelet134

package claims

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// planner runs the command plan of the program.
type planner struct {
	t       *testing.T
	program string
}

func newPlanner(t *testing.T) planner {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpu-device-plugin")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", path, "./cmd/gpu-device-plugin")
	build.Dir = "../../../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return planner{t, path}
}

// run returns what plan prints to both outputs, and its exit status.
func (p planner) run(args ...string) (out []byte, says string, status int) {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), p.program, append([]string{"plan"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		p.t.Fatal(err)
	}
	return stdout.Bytes(), stderr.String(), cmd.ProcessState.ExitCode()
}

// decode returns what plan printed as a value.
func decode[T any](t *testing.T, text []byte) (value T) {
	t.Helper()
	if err := yaml.Unmarshal(text, &value); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return value
}

// A printedPlan is what plan -o yaml prints.
type printedPlan struct {
	Resources []struct {
		Name    string
		Devices []struct{ ID string }
	}
}

// uuids returns the UUIDs of the devices of a resource.
func (p printedPlan) uuids(name string) (all []string) {
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			if uuid, _, _ := strings.Cut(d.ID, "::"); r.Name == name && !slices.Contains(all, uuid) {
				all = append(all, uuid)
			}
		}
	}
	return all
}

// printedValues are what plan -o classes prints.
type printedValues struct {
	DRA struct {
		ShareBy dra.ShareBy
		Shares  int
		Classes []dra.DeviceClass
	}
}

// check holds that each resource of a configuration is called stranded, or that claims by its class
// get all of its devices and none of another resource. It reports false if the configuration is not
// valid.
func (p planner) check(args ...string) (valid bool, stranded []string) {
	p.t.Helper()
	text, says, status := p.run(append(args, "-o", "classes")...)
	if strings.Contains(says, "is not valid") {
		return false, nil
	}
	for _, line := range strings.Split(says, "\n") {
		if name, _, is := strings.Cut(line, ": no claim can have "); is {
			stranded = append(stranded, name)
		}
	}
	if (len(stranded) > 0) != (status == 1) || status > 1 {
		p.t.Errorf("exit status %d: %s", status, says)
	}
	values := decode[printedValues](p.t, text)
	text, _, _ = p.run(append(args, "-o", "yaml")...)
	plan := decode[printedPlan](p.t, text)
	if values.DRA.ShareBy != "" {
		args = append(args, "--dra-share-by", string(values.DRA.ShareBy), "--dra-shares", strconv.Itoa(values.DRA.Shares))
	}
	text, says, _ = p.run(append(args, "--dra", "-o", "yaml", "--node-name", node)...)
	published := decode[struct{ Items []*resourceapi.ResourceSlice }](p.t, text).Items
	if len(published) == 0 {
		p.t.Fatalf("no slices: %s", says)
	}
	for _, r := range plan.Resources {
		if !strings.Contains(string(says)+strings.Join(stranded, " "), r.Name) &&
			len(given(p.t, published, plan.uuids(r.Name))) > 0 &&
			!slices.ContainsFunc(values.DRA.Classes, func(c dra.DeviceClass) bool {
				return c.ExtendedResourceName == r.Name || c.ExtendedResourceName == r.Name+".shared"
			}) {
			p.t.Errorf("nothing is said of %s", r.Name)
		}
	}
	for _, class := range values.DRA.Classes {
		p.allocate(class, values, plan, published, stranded)
	}
	return true, stranded
}

// allocate has claims by a class come until no device is left.
func (p planner) allocate(class dra.DeviceClass, values printedValues, plan printedPlan,
	published []*resourceapi.ResourceSlice, stranded []string) {
	p.t.Helper()
	sched := schedulerOf(p.t, published)
	sched.classes = values.DRA.Classes
	resource := class.ExtendedResourceName
	if plan.uuids(resource) == nil && values.DRA.ShareBy != "" {
		resource = strings.TrimSuffix(resource, ".shared") // the configuration shares devices for claims alone
	}
	count := map[string]int{}
	for len(count) < 2000 {
		results := sched.results(request(p.t, class.Name, 1, ""))
		if len(results) == 0 || values.DRA.ShareBy == dra.Unlimited && count[results[0].Device] > 0 {
			break
		}
		count[results[0].Device]++
	}
	if len(count) == 0 {
		p.t.Errorf("no claim gets %s: %s", class.ExtendedResourceName, class.Selector)
	}
	mine, made := plan.uuids(resource), 0
	for device, n := range count {
		uuid, isMade := uuidOf(published, device)
		if isMade {
			made++
			continue
		}
		for _, r := range plan.Resources {
			if r.Name != resource && !slices.Contains(stranded, r.Name) && !slices.Contains(mine, uuid) &&
				slices.Contains(plan.uuids(r.Name), uuid) {
				p.t.Errorf("%s gives %s of %s: %s", class.Name, device, r.Name, class.Selector)
			}
		}
		if want := max(values.DRA.Shares, 1); n != want && values.DRA.ShareBy == dra.ByCount {
			p.t.Errorf("%s gives %s to %d claims, want %d", class.Name, device, n, want)
		}
	}
	if want := len(given(p.t, published, mine)); !slices.Contains(stranded, resource) &&
		values.DRA.ShareBy != dra.Unlimited && len(count)-made < want {
		p.t.Errorf("%s gives %d devices, want %d: %s", class.Name, len(count)-made, want, class.Selector)
	}
}

// given returns the UUIDs that are in slices.
func given(t *testing.T, published []*resourceapi.ResourceSlice, uuids []string) (in []string) {
	t.Helper()
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			if uuid := d.Attributes["uuid"].StringValue; uuid != nil && slices.Contains(uuids, *uuid) {
				in = append(in, *uuid)
			}
		}
	}
	return in
}

// uuidOf returns the UUID of a device; one that is made for claims has none.
func uuidOf(published []*resourceapi.ResourceSlice, device string) (uuid string, made bool) {
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			if value := d.Attributes["uuid"].StringValue; d.Name == device && value != nil {
				return *value, false
			}
		}
	}
	return "", true
}

// write writes a configuration file.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestClassesOfResources: with the class for a resource, claims get what pods got that asked for
// the resource, and nothing else. A resource of which they cannot have all devices is named.
func TestClassesOfResources(t *testing.T) {
	p := newPlanner(t)
	undivided := write(t, "{description: an A100, driver: 580.95.05, cuda: \"13.0\", model: a100-sxm4-40gb, gpus: [{bdf: \"0000:43:00.0\", pcie: 0/1/0, mig: []}]}")
	for name, tt := range map[string]struct {
		machine, file string
		args          []string
		stranded      []string
	}{
		"GPUs":        {machine: "l4-x8", file: "version: v1"},
		"MIG devices": {machine: "a100-mig-mixed", file: "version: v1", args: []string{"--mig-strategy=mixed"}},
		"GPUs and shares (kdp#1786)": {
			machine: "dgx-h100", file: `{version: v1, sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, devices: ["0"], replicas: 4}]}}}`,
			stranded: []string{"nvidia.com/gpu"},
		},
		"shares by a selector": {
			machine: "dgx-h100", file: `{version: v1, selectors: [{indices: ["3"], replicas: 2, rename: nvidia.com/half}]}`,
			stranded: []string{"nvidia.com/gpu"},
		},
		"shares":           {machine: "l4-x8", file: "{version: v1, sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"},
		"renamed":          {machine: "l4-x8", file: `{version: v1, resources: {gpus: [{pattern: "*L4*", name: small}]}}`},
		"renamed by index": {machine: "l4-x8", file: `{version: v1, selectors: [{indices: ["1"], rename: nvidia.com/mine}]}`},
		"strategy none":    {machine: "h100-mig-1g", file: "version: v1", stranded: []string{"nvidia.com/gpu"}},
		"units": {
			machine: "l4-x8", file: `{version: v1, units: {enforce: none}, selectors: [{indices: ["1"], units: true}]}`,
			stranded: []string{"volcano.sh/gpu-mem.128Mi"},
		},
		"made for claims": {machine: undivided, file: "{version: v1, dra: {dynamicMIG: true}}",
			args: []string{"--mig-strategy=mixed"}},
		"shared without end": {machine: "dgx-h100", file: "{version: v1, dra: {shareBy: unlimited}}"},
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			valid, stranded := p.check(append(tt.args, "--simulate", tt.machine, "--config-file", write(t, tt.file))...)
			if !valid || !slices.Equal(stranded, tt.stranded) {
				t.Errorf("stranded %q (a valid file: %v), want %q", stranded, valid, tt.stranded)
			}
		})
	}
}

// TestClassesOfAnyConfiguration: so it is with random configurations on all kinds of machines.
func TestClassesOfAnyConfiguration(t *testing.T) {
	p := newPlanner(t)
	random := rand.New(rand.NewPCG(11, 12))
	one := func(of ...string) string { return of[random.IntN(len(of))] }
	machines := []string{"a100-mig-mixed", "dgx-h100", "h100-mig-1g", "l4-x8", "t4", "a30-x4"}
	sharing := func() string {
		rule := fmt.Sprintf("{name: %s, replicas: %d%s%s}", one("nvidia.com/gpu", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb",
			"nvidia.com/mine"), 2+random.IntN(60),
			one("", "", `, devices: ["0"]`, `, devices: ["6:0"]`, ", devices: 2"), one("", "", ", rename: nvidia.com/part"))
		return fmt.Sprintf("sharing: {%s: {renameByDefault: %s, resources: [%s]}}\n",
			one("timeSlicing", "timeSlicing", "mps"), one("true", "false"), rule)
	}
	valid, lost := 0, 0
	for i := range 120 {
		file := "version: v1\n"
		if random.IntN(3) > 0 {
			file += sharing()
		}
		file += one("", "", "resources: {gpus: [{pattern: \"*A100*\", name: gpu.big}], migs: [{pattern: \"1g*\", name: small}]}\n")
		file += one("", "", `selectors: [{indices: ["0"], exclude: true}]`+"\n",
			`selectors: [{indices: ["1", "2"], rename: nvidia.com/mine}]`+"\n",
			`selectors: [{indices: ["3"], replicas: 3}]`+"\n", "units: {enforce: none}\n"+
				`selectors: [{indices: ["3"], units: true}]`+"\n")
		file += one("", "", "", "dra: {dynamicMIG: true}\n", "dra: {shares: 3, shareBy: count}\n", "dra: {shares: 3}\n",
			"dra: {dynamicMIG: true, switchMIG: true}\n",
			`dra: {mode: split, gpus: {indices: ["0", "6"]}}`+"\n")
		machine, strategy := one(machines...), one("none", "single", "mixed")
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			p.t = t
			ok, stranded := p.check("--simulate", machine, "--mig-strategy", strategy, "--mps-root", "/mps", "--config-file",
				write(t, file))
			if t.Failed() {
				t.Logf("on %s, strategy %s:\n%s", machine, strategy, file)
			}
			if ok {
				valid, lost = valid+1, lost+min(len(stranded), 1)
			}
		})
	}
	t.Logf("%d valid configurations, %d strand a resource", valid, lost)
	if valid < 60 || lost < 5 || valid-lost < 20 {
		t.Errorf("%d configurations are valid, of which %d strand a resource: too few tell something", valid, lost)
	}
}
