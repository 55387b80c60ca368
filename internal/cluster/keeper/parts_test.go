package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The tests of this file show what each part of the Node wants, without an API server or a clock.

var noon = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

// nodeWith returns a Node with these labels.
func nodeWith(labels map[string]string) kubeapi.Node { return kubeapi.Node{UID: "1", Labels: labels} }

// decide has a part look, and returns what the part wants.
func decide(t *testing.T, p keeper.Part, node kubeapi.Node, now time.Time) keeper.Decision {
	t.Helper()
	p.Look(t.Context(), node)
	return p.Want(node, now)
}

// written tells a part that its Decision was carried out.
func written(t *testing.T, d keeper.Decision, after kubeapi.Node, now time.Time) {
	t.Helper()
	if d.Done(t.Context(), after, nil, now) {
		t.Error("a success is handled like an error")
	}
}

func newLabels(on bool, wanted map[string]string) *keeper.LabelsPart {
	c := config.Config{Live: config.Live{Features: config.Features{Labels: config.LabelsOff}}}
	if on {
		c.Features.Labels = config.LabelsNode
	}
	return &keeper.LabelsPart{Configs: feed.New(c), Labels: feed.New(wanted)}
}

const countLabel = "nvidia.com/gpu.count"

// TestLabelsWanted: only labels that differ and belong to this program are written.
func TestLabelsWanted(t *testing.T) {
	t.Parallel()
	ours := map[string]string{countLabel: "8"}
	for name, tt := range map[string]struct {
		part  *keeper.LabelsPart
		node  kubeapi.Node
		patch kubeapi.NodePatch
	}{
		"off":           {newLabels(false, ours), nodeWith(nil), nil},
		"not known":     {newLabels(true, nil), nodeWith(nil), nil},
		"no Node":       {newLabels(true, ours), kubeapi.Node{}, nil},
		"missing":       {newLabels(true, ours), nodeWith(nil), kubeapi.LabelsPatch(ours)},
		"as wanted":     {newLabels(true, ours), nodeWith(ours), nil},
		"another value": {newLabels(true, ours), nodeWith(map[string]string{countLabel: "7"}), kubeapi.LabelsPatch(ours)},
		"one too many": {newLabels(true, map[string]string{}),
			nodeWith(map[string]string{"nvidia.com/mig-1g.10gb.count": "7"}), kubeapi.LabelsPatch{}},
		"others have more": {newLabels(true, ours), nodeWith(map[string]string{countLabel: "8", "zone": "a"}), nil},
	} {
		if d := decide(t, tt.part, tt.node, noon); !reflect.DeepEqual(d.Patch, tt.patch) {
			t.Errorf("%s: patch %v, want %v", name, d.Patch, tt.patch)
		}
	}
}

// TestPaceOfLabels: the first write waits for the turn of the node, and writes that another program
// undoes each time wait longer and longer.
func TestPaceOfLabels(t *testing.T) {
	t.Parallel()
	ours := map[string]string{countLabel: "8"}
	p, now := newLabels(true, ours), noon
	d := decide(t, p, nodeWith(nil), now)
	if !d.Crowd {
		t.Error("the first write does not wait for the turn of the node")
	}
	written(t, d, nodeWith(ours), now)
	var delays []time.Duration
	for range 9 {
		p.Want(nodeWith(ours), now)
		d := p.Want(nodeWith(nil), now)
		delays = append(delays, d.At.Sub(now))
		if now = d.At; d.Patch != nil {
			t.Fatal("a write that another program undid is not delayed")
		}
		if d = p.Want(nodeWith(nil), now); d.Patch == nil || d.Crowd {
			t.Fatalf("at its time, the write is %v", d.Patch)
		}
		written(t, d, nodeWith(ours), now)
	}
	if got := fmt.Sprint(delays); got != "[5s 5s 5s 8s 16s 32s 1m0s 1m0s 1m0s]" {
		t.Errorf("delays %s", got)
	}
	p.Labels.Publish(map[string]string{countLabel: "7"})
	if d := decide(t, p, nodeWith(nil), now.Add(2*time.Minute)); d.Patch == nil {
		t.Error("a change after a calm time waits")
	}
}

// TestLabelConflict: labels of other programs are left to them and reported, until they let them go.
func TestLabelConflict(t *testing.T) {
	t.Parallel()
	p := newLabels(true, map[string]string{countLabel: "8", "nvidia.com/gpu.mode": "a"})
	theirs := nodeWith(map[string]string{countLabel: "7"})
	conflict := &kubeapi.Conflict{Labels: map[string]string{countLabel: `conflict with "nfd" using v1`}}
	if !decide(t, p, theirs, noon).Done(t.Context(), theirs, conflict, noon) {
		t.Error("the conflict is not handled")
	}
	d := p.Want(theirs, noon)
	if want := (kubeapi.LabelsPatch{"nvidia.com/gpu.mode": "a"}); !reflect.DeepEqual(d.Patch, want) {
		t.Errorf("patch %v, want %v", d.Patch, want)
	}
	theirs = nodeWith(map[string]string{countLabel: "7", "nvidia.com/gpu.mode": "a"})
	written(t, d, theirs, noon)
	if d = p.Want(theirs, noon); d.Patch != nil || !strings.Contains(fmt.Sprint(d.Problem), "written by nfd") {
		t.Errorf("afterwards: patch %v, problem %v", d.Patch, d.Problem)
	}
	free := nodeWith(map[string]string{"nvidia.com/gpu.mode": "a"})
	p.Want(free, noon.Add(time.Hour))
	d = p.Want(free, noon.Add(2*time.Hour))
	if patch, _ := d.Patch.(kubeapi.LabelsPatch); len(patch) != 2 {
		t.Fatalf("after its owner let it go: patch %v", d.Patch)
	}
	if d.Done(t.Context(), free, conflict, noon) {
		t.Error("a conflict about a label that the Node does not have is handled")
	}
	other := kubeapi.Node{UID: "2", Labels: map[string]string{countLabel: "7"}}
	d = p.Want(other, noon.Add(3*time.Hour))
	if patch, _ := d.Patch.(kubeapi.LabelsPatch); len(patch) != 2 {
		t.Errorf("a new Node of the name: patch %v", d.Patch)
	}
}

// A fakeChooser has chosen what the label names.
type fakeChooser struct{ choices *feed.Feed[choice.Choice] }

func (c fakeChooser) SetLabel(_ context.Context, value string) {
	c.choices.Publish(choice.Choice{Layout: value})
}

func (c fakeChooser) Choices() *feed.Feed[choice.Choice] { return c.choices }

// TestLayoutWanted: the state is written when it changes, a new reason waits, and a state of another
// program stays after the label is gone.
func TestLayoutWanted(t *testing.T) {
	t.Parallel()
	const label, state = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
	const reason = "gpu-device-plugin.github.io/mig.config.reason"
	progress := feed.New(mig.Status{})
	p := &keeper.LayoutPart{Configs: feed.New(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, Label: true}}}),
		Chooser: fakeChooser{feed.New(choice.Choice{})}, Progress: progress}
	node := func(named, is, why string) kubeapi.Node {
		return kubeapi.Node{UID: "1", Labels: map[string]string{label: named, state: is},
			Annotations: map[string]string{reason: why}}
	}
	patch := func(is, why string) (p kubeapi.MIGStatePatch) {
		if is != "" {
			p.Labels = map[string]string{state: is}
		}
		if why != "" {
			p.Annotations = map[string]string{reason: why}
		}
		return p
	}
	for _, tt := range []struct { // one after the other
		what  string
		after time.Duration
		node  kubeapi.Node
		is    mig.ConfigState
		why   string
		patch kubeapi.NodePatch
		at    time.Duration // of the next decision; 0 for never
	}{
		{"no Node", 0, kubeapi.Node{}, mig.StateSuccess, "", nil, 0},
		{"not read yet", 0, node("a", "", ""), mig.StateNone, "", patch("pending", "the layout has not been read yet"), 0},
		{"as wanted", 0, node("a", "success", ""), mig.StateSuccess, "", nil, 0},
		{"a new state", 0, node("a", "pending", "x"), mig.StateSuccess, "", patch("success", ""), 0},
		{"another state", 0, node("a", "success", ""), mig.StatePending, "a\nb", patch("pending", "a b"), 0},
		{"a new reason", time.Second, node("a", "pending", "a b"), mig.StatePending, "c", nil, 2 * time.Second},
		{"its time", 2 * time.Second, node("a", "pending", "a b"), mig.StatePending, "c", patch("pending", "c"), 0},
		{"no label", time.Minute, node("", "pending", "c"), mig.StateNone, "", patch("", ""), 0},
		{"another program", time.Minute, node("", "theirs", ""), mig.StateNone, "", nil, 0},
	} {
		progress.Publish(mig.Status{Layout: "a", State: tt.is, Reason: tt.why})
		d, at := decide(t, p, tt.node, noon.Add(tt.after)), time.Time{}
		if tt.at > 0 {
			at = noon.Add(tt.at)
		}
		if !reflect.DeepEqual(d.Patch, tt.patch) || !d.At.Equal(at) {
			t.Errorf("%s: patch %v at %v, want %v at %v", tt.what, d.Patch, d.At, tt.patch, at)
		}
		if d.Patch != nil {
			written(t, d, tt.node, noon.Add(tt.after))
		}
	}
}

// TestConditionWanted: the condition keeps the time of its transition, and only the first condition
// of a healthy node waits for the turn of the node.
func TestConditionWanted(t *testing.T) {
	t.Parallel()
	before, later := noon.Add(-time.Hour), noon.Add(time.Hour)
	for name, tt := range map[string]struct {
		gpu        string
		status     string // of the present condition; empty for none
		want       string
		transition time.Time
		crowd      bool
	}{
		"first, healthy":    {"Healthy", "", "True", later, true},
		"first, not":        {"Unhealthy", "", "False", later, false},
		"worse":             {"Unhealthy", "True", "False", later, false},
		"better":            {"Healthy", "False", "True", later, false},
		"as bad, in others": {"Unhealthy", "False", "False", before, false},
	} {
		is := statusOf(tt.gpu)
		is.Looked = later
		p := keeper.NewConditionPart(feed.New(config.Config{Live: config.Live{Features: config.Features{Condition: true}}}), feed.New(is))
		node := nodeWith(nil)
		if tt.status != "" {
			node.Conditions = []kubeapi.Condition{{Type: keeper.ConditionType, Status: tt.status, Message: "GPU-7",
				LastTransitionTime: before}}
		}
		decide(t, p, node, noon)
		d := p.Want(node, later)
		c, ok := d.Patch.(kubeapi.ConditionPatch)
		if !ok || c.Status != tt.want || !c.LastTransitionTime.Equal(tt.transition) || d.Crowd != tt.crowd {
			t.Errorf("%s: %+v, with the crowd %v", name, c, d.Crowd)
		}
	}
	off := keeper.NewConditionPart(feed.New(config.Config{}), feed.New(statusOf("Unhealthy")))
	if d := decide(t, off, nodeWith(nil), noon); d.Patch != nil || !d.At.IsZero() || len(off.Inputs()) != 1 {
		t.Errorf("switched off: %+v, %d inputs", d, len(off.Inputs()))
	}
}

// TestConditionTypes: a node has the condition under each type, and the status of a type that names
// a problem is the opposite. One type that needs no write delays no other.
func TestConditionTypes(t *testing.T) {
	t.Parallel()
	features := config.Features{Condition: true, ConditionTypes: []config.ConditionType{
		{Name: "AcceleratedHardwareReady"}, {Name: "XidCriticalError", Problem: true}}}
	statuses := feed.New(statusOf("Healthy"))
	p := keeper.NewConditionPart(feed.New(config.Config{Live: config.Live{Features: features}}), statuses)
	node, now := nodeWith(nil), noon
	for _, tt := range []struct{ gpu, want string }{
		{"Healthy", "GPUHealthy=True AcceleratedHardwareReady=True XidCriticalError=False"},
		{"Unhealthy", "GPUHealthy=False AcceleratedHardwareReady=False XidCriticalError=True"},
		{"Healthy", "GPUHealthy=True AcceleratedHardwareReady=True XidCriticalError=False"},
	} {
		is := statusOf(tt.gpu)
		is.Looked = now.Add(time.Minute)
		statuses.Publish(is)
		decide(t, p, node, now) // the change begins
		now = is.Looked
		var got []string
		for d := p.Want(node, now); d.Patch != nil && len(got) < 4; d = p.Want(node, now) {
			c := kubeapi.Condition(d.Patch.(kubeapi.ConditionPatch))
			got = append(got, c.Type+"="+c.Status)
			node.Conditions = slices.DeleteFunc(slices.Clone(node.Conditions),
				func(o kubeapi.Condition) bool { return o.Type == c.Type })
			node.Conditions = append(node.Conditions, c)
			written(t, d, node, now)
		}
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%s: wrote %s, want %s", tt.gpu, s, tt.want)
		}
	}
}

// statusOf returns the status of a daemon with GPUs in these states.
func statusOf(states ...string) status.Status {
	s := status.Status{Version: "v1", Driver: "580", Looked: noon}
	for i, state := range states {
		s.GPUs = append(s.GPUs, status.Device{UUID: fmt.Sprint("GPU-", i), State: state})
	}
	return s
}

// TestTaintWanted: the taint stays unchanged while the health of the GPUs is unknown, and is removed
// if it is not wanted.
func TestTaintWanted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		on, before bool
		status     status.Status
		want       bool
	}{
		"one of two is bad":        {true, false, statusOf("Unhealthy", "Healthy"), false},
		"all are bad":              {true, false, statusOf("Unhealthy", "Lost"), true},
		"not known, and tainted":   {true, true, status.Status{}, true},
		"not known":                {true, false, status.Status{}, false},
		"healthy":                  {true, true, statusOf("Healthy"), false},
		"bad, and no taint wanted": {false, true, statusOf("Unhealthy"), false},
	} {
		p := &keeper.TaintPart{Configs: feed.New(config.Config{Live: config.Live{Features: config.Features{Taint: tt.on}}}),
			Statuses: feed.New(tt.status)}
		node := nodeWith(nil)
		if tt.before {
			node.Taints = []kubeapi.Taint{{Key: kubeapi.NoHealthyGPU.String(), Effect: "NoSchedule"}}
		}
		decide(t, p, node, noon)
		patch, changes := p.Want(node, noon.Add(time.Minute)).Patch.(kubeapi.TaintPatch)
		if changes != (tt.before != tt.want) || changes && patch.Wanted != tt.want {
			t.Errorf("%s: %+v", name, patch)
		}
	}
}

// TestStartupWanted: the start-up taint is removed when the daemon is ready and the Node shows all
// devices, and not before. The status is read only while the Node has the taint.
func TestStartupWanted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		off     bool
		listed  int
		slices  int  // devices in slices
		ready   bool // the daemon
		shown   int  // devices in the Node's status
		removed bool
	}{
		"the GPUs are allocatable":   {false, 8, 0, true, 8, true},
		"the Node does not show all": {false, 8, 0, true, 7, false},
		"the daemon is not ready":    {false, 8, 0, false, 8, false},
		"there is no driver":         {false, 0, 0, true, 0, false},
		"the GPUs are in slices":     {false, 0, 8, true, 0, true},
		"the feature is off":         {true, 8, 0, true, 8, false},
	} {
		reads := 0
		p := &keeper.StartupPart{Daemon: daemon.View{
			ConfigView: daemon.ConfigView{Configs: feed.New(config.Config{Live: config.Live{Features: config.Features{StartupTaint: !tt.off}}})},
			ShrinkView: daemon.ShrinkView{Listed: func() map[string]int { return map[string]int{"nvidia.com/gpu": tt.listed} }},
			Status: func(context.Context) (status.Status, error) {
				reads++
				return status.Status{Readiness: status.Readiness{Ready: tt.ready}, DRA: &status.DRA{Devices: tt.slices}}, nil
			},
		}}
		if d := decide(t, p, nodeWith(nil), noon); d.Patch != nil || !d.At.IsZero() || reads > 0 {
			t.Errorf("%s, without the taint: %+v, %d reads", name, d, reads)
		}
		for _, effect := range []string{"NoSchedule", "NoExecute"} {
			node := kubeapi.Node{UID: "1", Allocatable: map[string]string{"nvidia.com/gpu": fmt.Sprint(tt.shown)},
				Taints: []kubeapi.Taint{{Key: kubeapi.Startup.String(), Effect: effect}}}
			d := decide(t, p, node, noon)
			patch, removes := d.Patch.(kubeapi.TaintPatch)
			if waits := !d.At.IsZero(); removes != tt.removed || patch.Wanted || waits != (!tt.removed && !tt.off) {
				t.Errorf("%s, %s: %+v", name, effect, d)
			}
		}
	}
}

// TestResumeWanted: pauses are resumed when the MIG controller allows it, except those of DaemonSets
// that are never paused.
func TestResumeWanted(t *testing.T) {
	t.Parallel()
	const deploy, paused = "nvidia.com/gpu.deploy.", "paused-for-mig-change"
	node := nodeWith(map[string]string{deploy + "dcgm": paused, deploy + "mig-manager": paused, deploy + "nvsm": "true"})
	progress := feed.New(mig.Status{})
	p := &keeper.ResumePart{Pauses: keeper.NewPauses(keeper.New(nil, nil)), Progress: progress,
		Configs: feed.New(config.Config{Live: config.Live{MIG: config.MIG{PauseClients: true}}})}
	if d := decide(t, p, node, noon); d.Patch != nil {
		t.Errorf("not allowed: %v", d.Patch)
	}
	progress.Publish(mig.Status{Resume: true})
	if d := decide(t, p, node, noon); !reflect.DeepEqual(d.Patch, keeper.Resume([]string{deploy + "dcgm"})) {
		t.Errorf("patch %v", d.Patch)
	}
	if d := decide(t, p, nodeWith(nil), noon); d.Patch != nil {
		t.Errorf("without a pause: %v", d.Patch)
	}
}

const quiesceKey = "gpu-device-plugin.github.io/quiesce."

// newRelease returns a ReleasePart of a process whose driver is in use.
func newRelease(pausesClients bool, owed *time.Time) *keeper.ReleasePart {
	c := config.Config{Live: config.Live{Features: config.Features{Quiesce: true}, MIG: config.MIG{PauseClients: pausesClients}}}
	return &keeper.ReleasePart{ResumeOwed: owed, Daemon: daemon.View{
		ConfigView: daemon.ConfigView{Configs: feed.New(c)},
		Snapshots:  feed.New(inventory.Snapshot{}),
		Lead:       lead.New(lead.Options{}),
		Status:     func(context.Context) (status.Status, error) { return status.Status{}, nil },
	}}
}

// answerOf returns the first answer of a process to the request on a Node.
func answerOf(t *testing.T, pausesClients bool, node kubeapi.Node) string {
	t.Helper()
	d := decide(t, newRelease(pausesClients, new(time.Time)), node, noon)
	patch, _ := d.Patch.(kubeapi.ReleaseAnswerPatch)
	return patch[quiesceKey+"state"] + " " + patch[quiesceKey+"answer"]
}

// TestReleaseLabels has each value of the labels that can request the release of the driver.
func TestReleaseLabels(t *testing.T) {
	t.Parallel()
	const plugin, client = "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.client"
	const forDriver, forMIG = "paused-for-driver-upgrade", "paused-for-mig-change"
	for name, tt := range map[string]struct {
		labels        map[string]string
		pausesClients bool   // by this program itself, for a MIG layout
		by            string // empty: the driver stays in use
	}{
		"no label": {},
		"in use":   {labels: map[string]string{plugin: "true", client: "true"}},
		"by driver-manager": {labels: map[string]string{plugin: forDriver, client: forDriver},
			by: plugin + "=" + forDriver},
		"by mig-manager":          {labels: map[string]string{plugin: forMIG, client: forMIG}, by: plugin + "=" + forMIG},
		"an operator before 26.7": {labels: map[string]string{plugin: forDriver}, by: plugin + "=" + forDriver},
		"the plugin alone": {labels: map[string]string{plugin: forDriver, client: "true"},
			by: plugin + "=" + forDriver},
		"the clients alone": {labels: map[string]string{plugin: "true", client: forDriver},
			by: client + "=" + forDriver},
		"the plugin kept away, and the clients paused": {labels: map[string]string{plugin: "false", client: forDriver},
			by: client + "=" + forDriver},
		"two reasons": {labels: map[string]string{plugin: forMIG, client: forDriver}, by: plugin + "=" + forMIG},
		"by driver-manager during a pause by mig-manager": {labels: map[string]string{plugin: forMIG + "_" + forDriver},
			by: plugin + "=" + forMIG + "_" + forDriver},
		"behind a value of the cluster's own": {labels: map[string]string{client: "gpu_" + forDriver},
			by: client + "=gpu_" + forDriver},
		"a reason of another tool": {labels: map[string]string{plugin: "paused-for-gpu-reset"},
			by: plugin + "=paused-for-gpu-reset"},
		"empty, which driver-manager writes where there is none": {
			labels: map[string]string{plugin: "", client: ""}},
		"NVIDIA's plugin is always kept away": {labels: map[string]string{plugin: "false", client: "false"}},
		"unknown":                             {labels: map[string]string{plugin: "maybe", client: "paused"}},
		"another operand": {
			labels: map[string]string{"nvidia.com/gpu.deploy.dcgm": forDriver, plugin: "true"}},
		"this program's own pause": {labels: map[string]string{plugin: forMIG, client: forMIG}, pausesClients: true},
		"driver-manager's, beside this program's own": {labels: map[string]string{plugin: forDriver, client: forMIG},
			pausesClients: true, by: plugin + "=" + forDriver},
	} {
		want := " "
		if tt.by != "" {
			want = `pending {"by":"` + tt.by + `","since":"2026-11-28T12:00:00Z","own":true}`
		}
		if got := answerOf(t, tt.pausesClients, nodeWith(tt.labels)); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestReleaseAnnotations has times of a request by annotation. The name of the requester is cut.
func TestReleaseAnnotations(t *testing.T) {
	t.Parallel()
	for until, want := range map[string]string{
		"tomorrow \x01\n":           "refused is not a time such as",
		" ":                         "refused is not a time such as",
		"2026-11-26 16:00":          "refused is not a time such as",
		"2999-01-01T00:00:00Z":      "refused is more than 24h0m0s ahead",
		"2026-11-28T11:59:59Z":      "ended the time had passed",
		"2026-11-28T13:00:00Z":      `pending "until":"2026-11-28T13:00:00Z"`,
		"2026-11-28T14:00:00+01:00": `pending "until":"2026-11-28T13:00:00Z"`,
	} {
		state, text, _ := strings.Cut(want, " ")
		node := kubeapi.Node{UID: "1", Annotations: map[string]string{quiesceKey + "until": until,
			quiesceKey + "by": "x" + strings.Repeat("é", 5000)}}
		if got := answerOf(t, false, node); !strings.HasPrefix(got, state+" ") || !strings.Contains(got, text) ||
			len(got) > 500 {
			t.Errorf("%q: %s, want %q", until, got, want)
		}
	}
}

// TestReleaseWanted: the Node has the answer before the driver is released, and the driver is in use
// again before the Node says so. A rejected write holds up neither.
func TestReleaseWanted(t *testing.T) {
	t.Parallel()
	owed, standbys := new(time.Time), 0
	p := newRelease(false, owed)
	node, now, quiet := kubeapi.Node{UID: "1"}, noon, false
	p.Daemon.Status = func(context.Context) (status.Status, error) { return status.Status{Quiet: quiet}, nil }
	var fails error // of the driver
	p.Daemon.Quiesce = func(context.Context) error { quiet = fails == nil; return fails }
	p.Daemon.Resume = func(context.Context) error { quiet = false; return nil }
	// expect checks what the part wants, and carries it out; a write has the result err.
	expect := func(err error, want string) {
		t.Helper()
		p.Daemon.Lead.Statuses().Publish(lead.Status{Standbys: standbys})
		d := decide(t, p, node, now)
		patch, _ := d.Patch.(kubeapi.ReleaseAnswerPatch)
		got := "write " + patch[quiesceKey+"state"]
		switch {
		case d.Act != nil:
			got = "act"
			d.Done(t.Context(), node, d.Act(t.Context()), now)
		case d.Patch == nil && d.At.IsZero():
			got = "nothing"
		case d.Patch == nil:
			got = fmt.Sprint("wait ", d.At.Sub(now))
		default:
			if d.Done(t.Context(), node, err, now); err == nil {
				annotations := map[string]string{quiesceKey + "until": node.Annotations[quiesceKey+"until"]}
				maps.Copy(annotations, patch)
				node.Annotations = annotations
			}
		}
		if got != want {
			t.Fatalf("the part wants: %s, want %s", got, want)
		}
	}
	forbidden := errors.New("forbidden")
	expect(nil, "nothing")
	node.Annotations = map[string]string{quiesceKey + "until": now.Add(time.Hour).Format(time.RFC3339)}
	expect(forbidden, "write pending")
	expect(nil, "write pending")
	if !owed.IsZero() || quiet {
		t.Error("the driver is released, and the Node does not say so")
	}
	fails = errors.New("nvmlShutdown does not return")
	expect(nil, "act")
	if owed.IsZero() {
		t.Error("the process does not remember that it must use the driver again")
	}
	expect(nil, "write pending")
	if !strings.Contains(node.Annotations[quiesceKey+"answer"], "does not return") {
		t.Errorf("the Node has %v", node.Annotations)
	}
	expect(nil, "wait 30s")
	now, fails = now.Add(31*time.Second), nil
	expect(nil, "act")
	expect(nil, "write done")
	expect(nil, "wait 59m29s")
	standbys = 1
	expect(nil, "write pending")
	standbys = 0
	expect(nil, "write done")
	now = noon.Add(time.Hour)
	expect(nil, "act")
	expect(forbidden, "write ended")
	expect(nil, "write ended")
	if !owed.IsZero() || quiet {
		t.Errorf("the driver is released: %v, since %v", quiet, owed)
	}
	expect(nil, "nothing")
	p.Daemon.Status = func(context.Context) (status.Status, error) { return status.Status{}, errors.New("busy") }
	expect(nil, "wait 5s")
}
