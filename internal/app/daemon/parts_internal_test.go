package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// fakeCluster is a Cluster with one task of each kind, and no other methods.
type fakeCluster struct{ Cluster }

func (fakeCluster) Problem() error { return errors.New("no API server") }
func (fakeCluster) Observation(*feed.Feed[config.Config], string) []Task {
	return []Task{{Name: "own node"}}
}
func (fakeCluster) Outputs(View) []Task { return []Task{{Name: "labels of the node"}} }

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

// TestStatusOfADaemon: the contribution of each part to the status.
func TestStatusOfADaemon(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, fakeCluster{},
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
