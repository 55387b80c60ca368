package cluster

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/migwish"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

func TestMIGState(t *testing.T) {
	t.Parallel()
	chosen := func(from migwish.Origin, layout string, gpus ...string) migwish.Decision {
		return migwish.Decision{Layout: layout, From: from, Wish: mig.Wish{Layout: layout, GPUs: gpus, Again: 1}}
	}
	made := func(layout string, again uint64, state mig.ConfigState, reason string) mig.Status {
		return mig.Status{Layout: layout, Again: again, State: state, Reason: reason}
	}
	bad := chosen(migwish.FromLabel, "a")
	bad.Err = errors.New("give one of b, c")
	for name, tt := range map[string]struct {
		label  string
		chosen migwish.Decision
		made   mig.Status
		want   string // state, and what the reason has
	}{
		"no label":                    {"", chosen(migwish.FromKey, "a"), made("a", 1, mig.StateSuccess, ""), " "},
		"just set":                    {"a", chosen(migwish.FromKey, "b"), made("b", 1, mig.StateSuccess, ""), "pending not looked at"},
		"chosen, and not seen":        {"a", chosen(migwish.FromLabel, "a"), made("b", 1, mig.StateSuccess, ""), "pending not looked at"},
		"an earlier order of it":      {"a", chosen(migwish.FromLabel, "a"), made("a", 0, mig.StateSuccess, ""), "pending not looked at"},
		"seen, and nothing said":      {"a", chosen(migwish.FromLabel, "a"), made("a", 1, mig.StateNone, ""), "pending not looked at"},
		"waits":                       {"a", chosen(migwish.FromLabel, "a"), made("a", 1, mig.StatePending, "pod p holds GPU 1"), "pending pod p"},
		"needs a restart":             {"a", chosen(migwish.FromLabel, "a"), made("a", 1, mig.StateRebooting, "restart"), "rebooting restart"},
		"made":                        {"a", chosen(migwish.FromLabel, "a"), made("a", 1, mig.StateSuccess, ""), "success "},
		"failed":                      {"a", chosen(migwish.FromLabel, "a"), made("a", 1, mig.StateFailed, "no room"), "failed no room"},
		"unknown":                     {"a", bad, made("b", 1, mig.StateSuccess, ""), "failed give one of b, c"},
		"overruled":                   {"a", chosen(migwish.FromCommand, "b"), made("b", 1, mig.StateSuccess, ""), "failed mig apply --forget"},
		"overruled for some GPUs":     {"a", chosen(migwish.FromCommand, "a", "1"), made("a", 1, mig.StateSuccess, ""), "failed mig apply --forget"},
		"the same by mig apply":       {"a", chosen(migwish.FromCommand, "a"), made("a", 1, mig.StateSuccess, ""), "success "},
		"the configuration has it so": {"a", chosen(migwish.FromKey, "a"), made("a", 1, mig.StateSuccess, ""), "success "},
	} {
		state, reason := migState(tt.label, tt.chosen, tt.made)
		wantState, wantReason, _ := strings.Cut(tt.want, " ")
		if string(state) != wantState || !strings.Contains(reason, wantReason) || wantReason == "" && reason != "" {
			t.Errorf("%s: %q %q, want %q", name, state, reason, tt.want)
		}
	}
}

// A layoutRig is a node at an API server, with the task that follows its label and an owner that the test plays.
type layoutRig struct {
	t      *testing.T
	server *apiserver.Server
	daemon daemon.View
	yields feed.Feed[bool]
	stop   func()
}

func newLayoutRig(t *testing.T, label string) *layoutRig {
	t.Helper()
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	r := &layoutRig{t: t, server: server}
	r.label(label)
	configs := feed.New(config.Config{MIG: config.MIG{Enabled: true, Label: true}})
	r.daemon = daemon.View{
		Configs: configs, MIGWish: migwish.New(t.Context(), configs, t.TempDir(), clock.RealClock{}), MIG: feed.New(mig.Status{}),
		Yields: r.yields.Value,
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// start starts the task, as a process does.
func (r *layoutRig) start() {
	c := &Cluster{client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n", Version: "v1"})}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.client.Watch(ctx, hasty{}) })
	running.Go(func() { c.followLayout(ctx, r.daemon, hasty{}) })
	r.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
}

// label sets the label of the node, or takes it away.
func (r *layoutRig) label(value string) {
	r.t.Helper()
	err := r.server.ChangeNode("n", func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{"zone": "a"}
		}
		if n.Labels[migLabel] = value; value == "" {
			delete(n.Labels, migLabel)
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// makes waits until the owner is told a layout, and has it say how far it is.
func (r *layoutRig) makes(layout string, state mig.ConfigState, reason string) {
	r.t.Helper()
	r.until("the owner is told "+layout, func() bool { return r.daemon.MIGWish.Wishes().Value().Layout == layout })
	w := r.daemon.MIGWish.Wishes().Value()
	r.daemon.MIG.Publish(mig.Status{Layout: w.Layout, Origin: w.Origin, Again: w.Again, State: state, Reason: reason})
}

func (r *layoutRig) until(what string, holds func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(labelPatience); !holds(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("not within %v: %s; the node has %q", labelPatience, what, r.says())
		}
	}
}

// says is the state and the reason that the node has.
func (r *layoutRig) says() string {
	n, err := r.server.Node("n")
	if err != nil {
		return err.Error()
	}
	return n.Labels[migStateLabel] + " " + n.Annotations[migReasonAnnotation]
}

func (r *layoutRig) shows(want string) {
	r.t.Helper()
	r.until(want, func() bool { return r.says() == want })
}

// The label is acted on at the start and whenever it changes; the node has the state and the reason, and loses them with the label.
func TestTheLabelNamesTheLayout(t *testing.T) {
	r := newLayoutRig(t, "all-balanced")
	r.shows("pending the layout is not looked at yet")
	r.makes("all-balanced", mig.StatePending, "pod default/p holds GPU 1")
	r.shows("pending pod default/p holds GPU 1")
	r.makes("all-balanced", mig.StateSuccess, "")
	r.shows("success ")
	r.label("all-disabled")
	r.makes("all-disabled", mig.StateFailed, "line 1\nline 2")
	r.shows("failed line 1 line 2")
	r.makes("all-disabled", mig.StateSuccess, "") // the label has not changed since
	r.shows("success ")
	if _, err := r.daemon.MIGWish.Apply(t.Context(), "all-enabled", nil); err != nil {
		t.Fatal(err)
	}
	r.until("mig apply counts", func() bool {
		return strings.HasPrefix(r.says(), "failed mig apply asked this node for layout all-enabled")
	})
	r.label("")
	r.shows(" ")
	r.until("nothing is named", func() bool { return r.daemon.MIGWish.Wishes().Value().Layout == "" })
	n, err := r.server.Node("n")
	if err != nil || n.Labels["zone"] != "a" {
		t.Errorf("%v, labels %v", err, n.Labels)
	}
}

// Where layouts are not changed, the label names none, and the node loses the state.
func TestTheLabelWhileLayoutsAreNotChanged(t *testing.T) {
	r := newLayoutRig(t, "all-balanced")
	r.shows("pending the layout is not looked at yet")
	r.daemon.Configs.Publish(config.Config{MIG: config.MIG{Label: true}})
	r.shows(" ")
}

// A node is written when its state changes; reasons that follow each other wait, and what is so already is not written.
func TestTheStateIsWrittenSparingly(t *testing.T) {
	r := newLayoutRig(t, "all-balanced")
	r.makes("all-balanced", mig.StateSuccess, "")
	r.shows("success ")
	r.stop()
	writes := r.server.Writes()
	r.start()
	r.makes("all-balanced", mig.StatePending, "first")
	r.shows("pending first")
	for range 200 {
		r.makes("all-balanced", mig.StatePending, "other")
		r.makes("all-balanced", mig.StatePending, "last")
	}
	r.shows("pending last")
	if more := r.server.Writes() - writes; more > 60 {
		t.Errorf("%d writes", more)
	}
	if err := r.server.ChangeNode("n", func(n *corev1.Node) { n.Labels[migStateLabel] = "success" }); err != nil {
		t.Fatal(err)
	}
	r.shows("pending last") // another program's word does not stand
}

// While another process serves the node, this one writes nothing.
func TestTheStateOfAnotherProcessStands(t *testing.T) {
	r := newLayoutRig(t, "")
	r.yields.Publish(true)
	r.label("all-balanced")
	r.makes("all-balanced", mig.StateSuccess, "")
	<-time.After(50 * time.Millisecond)
	if says := r.says(); says != " " {
		t.Errorf("the node has %q", says)
	}
	r.yields.Publish(false)
	r.shows("success ")
}

// Whatever the API server does meanwhile, the owner is told the label of the end, and the node has the state of it.
func TestTheLayoutThroughFaultsOfTheAPIServer(t *testing.T) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			r := newLayoutRig(t, "all-balanced")
			r.makes("all-balanced", mig.StateSuccess, "")
			r.shows("success ")
			if err := fault.Begin(r.server); err != nil {
				t.Fatal(err)
			}
			r.label("all-disabled")
			<-time.After(20 * time.Millisecond)
			if err := fault.End(r.server); err != nil {
				t.Fatal(err)
			}
			r.makes("all-disabled", mig.StateSuccess, "")
			r.shows("success ")
		})
	}
}
