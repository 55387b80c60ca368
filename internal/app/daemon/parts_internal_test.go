package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// fakeCluster is a Cluster with one task of each kind.
type fakeCluster struct{ problem error }

func (fakeCluster) Observation(*feed.Feed[config.Config], string) []Task {
	return []Task{{Name: "own node"}}
}
func (c fakeCluster) Problem() error                             { return c.problem }
func (fakeCluster) Outputs(View) []Task                          { return []Task{{Name: "labels of the node"}} }
func (fakeCluster) Labels(View) []Task                           { return nil }
func (fakeCluster) Evict(context.Context, mig.Pod) error         { return nil }
func (fakeCluster) MayChange(string) error                       { return nil }
func (fakeCluster) SlotSince() time.Time                         { return time.Time{} }
func (fakeCluster) MayRepair(string) error                       { return nil }
func (fakeCluster) DriverRefusal() string                        { return "" }
func (fakeCluster) RankPods(context.Context, []repair.Pod) error { return nil }
func (fakeCluster) Pause(context.Context, []string) error        { return nil }
func (fakeCluster) Claim(context.Context, string, string) (dra.Claim, bool, error) {
	return dra.Claim{}, false, nil
}
func (fakeCluster) ClaimsOf(context.Context, string, []string, func(string) (string, bool)) (map[string][]string, error) {
	return nil, nil
}

// unstarted is a daemon on a simulated node without running tasks.
func unstarted(t *testing.T, cluster Cluster, args ...string) *daemon {
	t.Helper()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse(append([]string{"--simulate=a100-mig-mixed", "--cdi-dir", t.TempDir()}, args...)); err != nil {
		t.Fatal(err)
	}
	sources := config.Sources{Env: func(string) (string, bool) { return "", false }, Flags: flags}
	c, _, err := config.Load(sources)
	if err != nil {
		t.Fatal(err)
	}
	d, err := newDaemon(klog.NewContext(t.Context(), klog.Logger{}),
		Options{Config: c, Sources: sources, Cluster: cluster})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	d.tasks()
	return d
}

// alone are the arguments of a daemon without connections to the node.
var alone = []string{"--kubelet-socket=", "--pod-resources-socket=", "--state-dir=", "--control-socket="}

// scanning runs the monitor of a daemon, and waits for its first scan.
func scanning(t *testing.T, d *daemon) *daemon {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- d.gpus.monitor.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	if err := d.gpus.monitor.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestTasksOfADaemon: the tasks that each setting adds.
func TestTasksOfADaemon(t *testing.T) {
	t.Parallel()
	names := func(cluster Cluster, args ...string) (all []string, judged bool) {
		observation, outputs := unstarted(t, cluster, args...).tasks()
		for _, task := range append(observation, outputs...) {
			all = append(all, task.Name)
			judged = judged || task.Ready != nil
		}
		return all, judged
	}
	base, judged := names(nil, alone...)
	if judged || base[0] != "configuration" || base[len(base)-1] != "readiness" {
		t.Errorf("a daemon without a kubelet is judged: %v; tasks: %v", judged, base)
	}
	// besides owners of GPUs, which each daemon decides
	dra := []string{"claims", "MIG devices of claims", "devices in slices"}
	for name, test := range map[string]struct {
		cluster Cluster
		args    []string
		more    []string
		judged  bool
	}{
		"kubelet":         {nil, []string{"--kubelet-socket=/nowhere/kubelet.sock"}, []string{"kubelet's directory"}, true},
		"state directory": {nil, []string{"--state-dir", t.TempDir()}, dra, false},
		"MIG layouts":     {nil, []string{"--mig-enabled"}, []string{"desired MIG layout", "MIG"}, false},
		"control socket":  {nil, []string{"--control-socket=/nowhere/c.sock"}, []string{"control socket"}, false},
		"API server":      {fakeCluster{}, nil, []string{"own node", "labels of the node"}, false},
	} {
		got, judged := names(test.cluster, append(slices.Clone(alone), test.args...)...)
		more := slices.DeleteFunc(slices.Clone(got), func(name string) bool { return slices.Contains(base, name) })
		if diff := cmp.Diff(test.more, more); diff != "" || len(got) != len(base)+len(more) || judged != test.judged {
			t.Errorf("%s: it is judged: %v; tasks (-want +got):\n%s", name, judged, diff)
		}
	}
}

// TestViewOfTheCluster: the view has all parts of the daemon, except for disabled parts.
func TestViewOfTheCluster(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args []string
		lack []string
	}{
		"nothing else": {nil, []string{"MIGChoice", "MIG", "DRA", "ClaimsOf", "Checkpoint"}},
		"all": {[]string{"--kubelet-socket=/nowhere/kubelet.sock", "--mig-enabled", "--state-dir", t.TempDir()},
			nil},
	} {
		v := reflect.ValueOf(unstarted(t, fakeCluster{}, append(slices.Clone(alone), test.args...)...).view())
		var lack []string
		for _, field := range reflect.VisibleFields(v.Type()) { // with those of ConfigView and the like
			if !field.Anonymous && v.FieldByIndex(field.Index).IsZero() {
				lack = append(lack, field.Name)
			}
		}
		if diff := cmp.Diff(test.lack, lack); diff != "" {
			t.Errorf("%s: not there (-want +got):\n%s", name, diff)
		}
	}
}

// TestStatusOfADaemon: the contribution of each part to the status.
func TestStatusOfADaemon(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, fakeCluster{errors.New("no API server")},
		append(slices.Clone(alone), "--kubelet-socket=/nowhere/kubelet.sock")...))
	s, err := d.status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Version != version.String() || s.Simulated != "a100-mig-mixed" || s.Driver == "" || s.CUDA == "" ||
		s.Generation == 0 || s.Looked.IsZero() ||
		s.Quiet || s.Quiesced != nil || s.DRA != nil || s.MIG != nil || s.ConfigGeneration != 1 || s.Reexecutions != 0 ||
		s.MetricsError+s.LabelsError+s.ConfigError != "" || s.APIServerError != "no API server" || len(s.GPUs) <= 8 {
		t.Errorf("%+v", s)
	}
	gpu := s.GPUs[0].UUID
	d.report.metricsProblem.Publish(errors.New("metrics"))
	d.report.labelsProblem.Publish(errors.New("labels"))
	d.watcher.Errors().Publish(errors.New("configuration"))
	d.kubelet.mps.Unready().Publish(map[string]string{"b": "second", "a": "first"})
	d.report.readiness.Answer().Publish(status.Readiness{Ready: true, Reason: "r"})
	d.kubelet.set.Offered().Publish(resource.Plan{Warnings: []string{"w"},
		Holds: []resource.Hold{{Resource: "a/b", UUID: gpu, Reason: "h"}, {UUID: "GPU-8", Row: resource.RowOwner},
			{UUID: "GPU-9", Hidden: true, Node: true}}})
	if err := d.gpus.monitor.Quiesce(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if s, err = d.status(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := status.Status{
		MetricsError: "metrics", LabelsError: "labels", ConfigError: "configuration", MPS: []string{"first",
			"second"}, Warnings: []string{"w"},
		Readiness: status.Readiness{Ready: true, Reason: "r"}, Quiet: true,
		Quiesced: &status.Quiesced{Since: s.Quiesced.Since, Allocate: true},
		Holds:    []status.Hold{{Device: gpu, Resource: "a/b", Reason: "h", Listed: true}, {Device: "GPU-9", Node: true}},
	}
	got := status.Status{
		MetricsError: s.MetricsError, LabelsError: s.LabelsError, ConfigError: s.ConfigError, MPS: s.MPS,
		Warnings:  s.Warnings,
		Readiness: s.Readiness, Quiet: s.Quiet, Quiesced: s.Quiesced, Holds: s.Holds,
	}
	if diff := cmp.Diff(want, got); diff != "" || s.Summary.State != status.ReleasedDriver {
		t.Errorf("%q (-want +got):\n%s", s.Summary.State, diff)
	}
}

// TestServersInTheStatus: each server with its devices and its departing devices.
func TestServersInTheStatus(t *testing.T) {
	t.Parallel()
	got := resources([]serve.Status{
		{Resource: "a/b", Phase: serve.PhaseServing, Devices: 3, Healthy: 2, Agreed: true, Problem: "p",
			Retiring: []listing.RetiringDevice{{ID: "GPU-0", Reason: "r", Waiting: "w"}}},
		{Resource: "a/c"},
	})
	want := []status.Resource{
		{Name: "a/b", Devices: 3, Healthy: 2, Server: "serving", Agreed: true, Problem: "p",
			Departing: []status.Departing{{ID: "GPU-0", Reason: "r", Waiting: "w"}}},
		{Name: "a/c"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text, err := json.Marshal(resources(nil)); err != nil || string(text) != "[]" {
		t.Errorf("none is %s, %v", text, err)
	}
}

// TestCallsOfADaemon: GPUs and MIG devices by index and UUID, and invalid requests.
func TestCallsOfADaemon(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, alone...))
	call := func(name, arguments string) (any, error) {
		return d.handlers()[name](t.Context(), json.RawMessage(arguments))
	}
	var part, whole string
	for _, g := range d.gpus.monitor.Snapshots().Value().GPUs {
		if len(g.MIGDevices) > 1 && part == "" {
			part, whole = fmt.Sprintf("%d:%d", g.Index, g.MIGDevices[1].Index), g.UUID
			if _, err := call(CallHealthClear, `{"gpu":"`+g.MIGDevices[1].UUID+`"}`); err != nil {
				t.Errorf("a MIG device by UUID: %v", err)
			}
		}
	}
	for _, known := range []string{part, whole, "0"} {
		if _, err := call(CallHealthClear, `{"gpu":"`+known+`"}`); err != nil {
			t.Errorf("%s: %v", known, err)
		}
	}
	for _, unknown := range []string{"99", "0:99", "GPU-9", ""} {
		if _, err := call(CallHealthClear, `{"gpu":"`+unknown+`"}`); err == nil {
			t.Errorf("%q is cleared", unknown)
		}
	}
	if _, err := call(CallHealthClear, `{"gpu":3}`); err == nil ||
		!strings.HasPrefix(err.Error(), "read the call's arguments: ") {
		t.Errorf("arguments of another form: %v", err)
	}
	if _, err := call(CallSimulateInject, `{"kind":"lost","gpu":"0"}`); err != nil {
		t.Error(err)
	}
	listed, err := call(CallSimulateList, "null")
	if gpus, ok := listed.([]simulator.Status); err != nil || !ok || gpus[0].State != "lost" {
		t.Errorf("%+v, %v", listed, err)
	}
	for _, name := range []string{CallMIGStatus, CallMIGApply} {
		if _, err := call(name, "{}"); !errors.Is(err, choice.ErrOff) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c := d.watcher.Configs().Value()
	c.MIG.Enabled = true
	d.watcher.Configs().Publish(c)
	if _, err := call(CallMIGStatus, "{}"); err == nil || !strings.Contains(err.Error(), "start it again") {
		t.Errorf("MIG layouts that were switched on later: %v", err)
	}
	node := d.gpus.node
	d.gpus.node = nil
	defer func() { d.gpus.node = node }()
	for name, arguments := range map[string]string{CallSimulateInject: `{"kind":"lost","gpu":"0"}`,
		CallSimulateList: "null"} {
		if _, err := call(name, arguments); !errors.Is(err, errNotSimulated) {
			t.Errorf("%s of real GPUs: %v", name, err)
		}
	}
}

// TestSignalsOfADaemon: SIGUSR1 releases the driver, SIGUSR2 resumes its use, SIGHUP scans the
// node.
func TestSignalsOfADaemon(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, alone...))
	handle := func(s syscall.Signal, quiet bool) {
		t.Helper()
		if err := handleSignal(t.Context(), s, d.watcher, d.gpus.monitor); err != nil {
			t.Fatal(err)
		}
		now, err := d.status(t.Context())
		if err != nil || now.Quiet != quiet || quiet && now.Quiesced.Allocate {
			t.Errorf("after %v: %+v, %v", s, now.Quiesced, err)
		}
	}
	handle(syscall.SIGUSR1, true)
	handle(syscall.SIGUSR2, false)
	if err := d.gpus.node.Inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "7"}); err != nil {
		t.Fatal(err)
	}
	handle(syscall.SIGHUP, false)
	if n := len(d.gpus.monitor.Snapshots().Value().GPUs); n != 7 {
		t.Errorf("%d GPUs after a look", n)
	}
}

// TestReadinessIsAwaited: the answer comes when the daemon is ready, or after the wait.
func TestReadinessIsAwaited(t *testing.T) {
	t.Parallel()
	d := unstarted(t, nil, append(slices.Clone(alone), "--kubelet-socket=/nowhere/kubelet.sock")...)
	ask := func(ctx context.Context, wait int64) status.Readiness {
		answer, err := d.ready(ctx, ReadyArguments{WaitMilliseconds: wait})
		if err != nil {
			t.Fatal(err)
		}
		return answer.(status.Readiness)
	}
	began := time.Now()
	if answer := ask(t.Context(), 0); answer.Ready || answer.Reason != "the daemon is starting" {
		t.Errorf("%+v", answer)
	}
	if answer := ask(t.Context(), 20); answer.Ready || time.Since(began) < 20*time.Millisecond {
		t.Errorf("%+v after %v", answer, time.Since(began))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if answer := ask(ctx, 1<<40); answer.Ready {
		t.Errorf("%+v", answer)
	}
	answers := make(chan status.Readiness, 1)
	go func() { answers <- d.awaitReady(t.Context(), time.Hour, true) }()
	d.report.readiness.Answer().Publish(status.Readiness{Reason: "another"})
	d.report.readiness.Answer().Publish(status.Readiness{Ready: true})
	if answer := <-answers; !answer.Ready {
		t.Errorf("%+v", answer)
	}
}
