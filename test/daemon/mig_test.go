package daemon

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	migLabel  = "nvidia.com/mig.config"
	migState  = "nvidia.com/mig.config.state"
	migReason = "gpu-device-plugin.github.io/mig.config.reason"
)

// third is the resource of the largest MIG device of all-balanced: each GPU has one.
const third = "nvidia.com/mig-3g.40gb"

// A divisible is a node whose GPUs the daemon divides as the label of the node says.
type divisible struct {
	*stage
	api *apiserver.Server
}

func newDivisible(t *testing.T, args ...string) *divisible {
	t.Helper()
	s, api := openAgent(t, "", append([]string{"--mig-strategy", "mixed", "--mig-enabled", "--mig-label"}, args...)...)
	d := &divisible{s, api}
	d.label("")
	d.start()
	d.shows(8, 8)
	return d
}

// label sets the label of the node.
func (d *divisible) label(layout string) {
	d.t.Helper()
	if err := d.api.ChangeNode(nodeName, func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels[migLabel] = layout
	}); err != nil {
		d.t.Fatal(err)
	}
}

// told waits until the node has a state and a reason with a text.
func (d *divisible) told(state, text string) {
	d.t.Helper()
	var last string
	defer func() {
		if d.t.Failed() {
			d.t.Logf("the node has %s", last)
		}
	}()
	d.eventually(state+" "+text, func() bool {
		n, err := d.api.Node(nodeName)
		if err != nil {
			d.t.Fatal(err)
		}
		is, why := n.Labels[migState], n.Annotations[migReason]
		last = is + " " + why
		return is == state && strings.Contains(why, text) && (text != "" || why == "")
	})
}

// TestPodsAreEvictedForALayout: a label with an unknown layout fails with the names of the layouts, and
// changes nothing. For a known layout, a pod that holds a GPU is named, and evicted once its disruption
// budget allows the eviction; the other GPUs do not wait for the pod.
func TestPodsAreEvictedForALayout(t *testing.T) {
	t.Parallel()
	d := newDivisible(t, "--mig-disruption=evict", "--node-events")
	d.label("all-9g.90gb")
	d.told("failed", "all-balanced, all-disabled")
	d.shows(8, 8)
	d.admit("train", 1)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train", UID: "train"}}
	if err := d.api.AddPod(pod); err != nil {
		t.Fatal(err)
	}
	d.api.SetDisruptionBudget(true)
	d.label("all-balanced")
	d.told("pending", "default/train")
	d.told("pending", "disruption budget")
	d.until("seven divided GPUs", func() bool { return d.Allocatable(third) == 7 })
	if pods := d.api.Pods(); len(pods) != 1 {
		t.Fatalf("the pod was evicted: %v", pods)
	}
	d.api.SetDisruptionBudget(false)
	d.eventually("the pod is evicted", func() bool { return len(d.api.Pods()) == 0 })
	d.Remove("train")
	d.told("success", "")
	d.until("eight divided GPUs", func() bool { return d.Allocatable(third) == 8 })
	d.eventually("Events of the layout", func() bool {
		var reasons []string
		for _, e := range d.api.Events() {
			if strings.Contains(e.Note, "layout all-balanced (label)") {
				reasons = append(reasons, e.Reason)
			}
		}
		slices.Sort(reasons)
		return slices.Equal(slices.Compact(reasons), []string{"MIGLayoutMade", "MIGLayoutWaiting"})
	})
}

// TestMIGCommands: apply shows each GPU before and after, and makes the layout; status says how far
// that is; a daemon that does not change layouts says what to set.
func TestMIGCommands(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := s.write("config.yaml", "mig: {enabled: true}\n")
	s.Args = []string{"--mig-strategy", "mixed", "--config-file", file}
	s.start()
	s.shows(8, 8)
	run := func(ok bool, args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), binary, append([]string{"mig"},
			append(args, "--control-socket", s.ControlSocket())...)...).CombinedOutput()
		if (err == nil) != ok {
			t.Errorf("mig %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	has := func(text string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(text, w) {
				t.Errorf("no %q in:\n%s", w, text)
			}
		}
	}
	has(run(true, "status"), "No layout is selected")
	has(run(true, "apply", "--layout", "all-balanced", "--gpu", "0,1", "--dry-run"), "It changes 2 of 2 GPUs",
		"before  MIG disabled", "|3g.40gb")
	has(run(false, "apply", "--layout", "all-9g.90gb"), "give one of all-1g.10gb")
	has(run(false, "apply", "--layout", "all-balanced", "--gpu", "9"), `no GPU has the index or UUID "9"`)
	has(run(true, "status"), "No layout is selected")
	s.shows(8, 8)

	s.admit("train", 1)
	held := slices.Collect(maps.Keys(s.PodStatus("train")[gpu]))[0]
	has(run(false, "apply", "--layout", "all-balanced", "--wait", "1ms"), "It changes 8 of 8 GPUs", "the daemon keeps trying")
	s.until("seven divided GPUs", func() bool { return s.Allocatable(third) == 7 })
	s.eventually("the pod is named", func() bool {
		return strings.Contains(run(true, "status"), "waiting: in use by pod default/train")
	})
	has(run(true, "status"), "Layout all-balanced of mig apply: pending", "before  MIG disabled")
	var told struct {
		State string
		GPUs  []struct {
			UUID    string
			Phase   string
			Holders []string
		}
	}
	if err := json.Unmarshal([]byte(run(true, "status", "-o", "json")), &told); err != nil {
		t.Fatal(err)
	}
	for _, g := range told.GPUs {
		if want := map[bool]string{true: "waiting", false: "done"}[g.UUID == held]; g.Phase != want {
			t.Errorf("GPU %s is %s, want %s", g.UUID, g.Phase, want)
		}
	}
	apply := s.runs("mig", "apply", "--layout", "all-balanced")
	apply.prints("pod default/train")
	s.Remove("train")
	apply.prints("success")
	s.until("eight divided GPUs", func() bool { return s.Allocatable(third) == 8 })

	s.write("config.yaml", "mig: {enabled: true, layout: all-disabled}\n") // the last word
	s.until("whole GPUs", func() bool { return s.Allocatable(gpu) == 8 })
	has(run(true, "status"), "Layout all-disabled of configuration file")
	s.write("config.yaml", "mig: {enabled: true, layout: no-such-layout}\n")
	s.says("the file is refused", func(now status) bool { return strings.Contains(now.ConfigError, "is not a built-in layout") })
	has(run(true, "status"), "Layout all-disabled of configuration file: success")
	s.write("config.yaml", "mig: {enabled: false}\n")
	s.eventually("layouts are no longer changed", func() bool {
		out, err := exec.CommandContext(t.Context(), binary, "mig", "status", "--control-socket",
			s.ControlSocket()).CombinedOutput()
		return err != nil && strings.Contains(string(out), "set mig.enabled to true")
	})
	other := serving(t, node.Setup{})
	out, err := exec.CommandContext(t.Context(), binary, "mig", "apply", "--layout", "all-enabled", "--control-socket",
		other.ControlSocket()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "set mig.enabled to true") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestAnOrderIsAboutGPUs: when a GPU is gone, the next one has its index. So an order by index is
// remembered as one about that GPU.
func TestAnOrderIsAboutGPUs(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Args: []string{"--mig-strategy", "mixed", "--mig-enabled"}})
	s.start()
	s.shows(8, 8)
	out, err := exec.CommandContext(t.Context(), binary, "mig", "apply", "--layout", "all-balanced", "--gpu", "0", "-o",
		"json",
		"--control-socket", s.ControlSocket()).Output()
	var plan struct{ GPUs []struct{ UUID string } }
	if err := errors.Join(err, json.Unmarshal(out, &plan)); err != nil || len(plan.GPUs) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	var kept struct{ Command struct{ GPUs []string } }
	text, err := os.ReadFile(s.Path("state/mig-wish.json"))
	if err := errors.Join(err, json.Unmarshal(text, &kept)); err != nil ||
		!slices.Equal(kept.Command.GPUs, []string{plan.GPUs[0].UUID}) {
		t.Errorf("%v: the order is about %q, want %s", err, kept.Command.GPUs, plan.GPUs[0].UUID)
	}
}

// TestTheDefaultOfTheOperatorAtAStart: a label that may be the default of NVIDIA's GPU operator
// removes no MIG devices, also where a process knows the label before the GPUs.
func TestTheDefaultOfTheOperatorAtAStart(t *testing.T) {
	t.Parallel()
	s, api := openAgent(t, "h100-mig-1g", "--mig-strategy", "mixed", "--mig-enabled", "--mig-label", "--mig-replace",
		"--state-dir", t.TempDir())
	d := &divisible{s, api}
	d.label("all-disabled")
	for range 2 {
		if err := api.ChangeNode(nodeName, func(n *corev1.Node) { delete(n.Labels, migState); delete(n.Annotations, migReason) }); err != nil {
			t.Fatal(err)
		}
		d.start()
		d.told("failed", "to confirm it")
		if d.until("MIG devices", func() bool { return d.Allocatable("nvidia.com/mig-1g.10gb") > 0 }); d.Allocatable(gpu) > 0 {
			t.Error("whole GPUs are offered")
		}
		d.stop()
	}
}
