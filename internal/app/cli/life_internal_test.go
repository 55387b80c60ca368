package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/logwriter"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestEndOfADaemon: an error is returned, or logged if the log is JSON. No new process is requested
// once this process is to end.
func TestEndOfADaemon(t *testing.T) {
	broken := errors.New("broken")
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		json bool
		err  error
		want error
	}{
		"well":                   {t.Context(), false, nil, nil},
		"well, in JSON":          {t.Context(), true, nil, nil},
		"broken":                 {t.Context(), false, broken, broken},
		"broken, in JSON":        {t.Context(), true, broken, ExitStatus(1)},
		"replaced, and it ended": {over, false, inventory.ErrDriverReplaced, inventory.ErrDriverReplaced},
	} {
		got := untilItEnds(test.ctx, func(_ context.Context, p *ownProcess) error {
			if p.log == nil || p.signals == nil {
				t.Errorf("%s: %+v", name, p)
			}
			p.json = test.json
			return test.err
		})
		if !errors.Is(got, test.want) || (got == nil) != (test.want == nil) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// TestFormatOfTheLog: the format may change in both directions.
func TestFormatOfTheLog(t *testing.T) {
	p := &ownProcess{log: logwriter.New(io.Discard)}
	defer p.logAs(config.LogText)
	for i, format := range []config.LoggingFormat{config.LogText, config.LogJSON, config.LogJSON, config.LogText,
		config.LogText, config.LogJSON} {
		if p.logAs(format); p.json != (format == config.LogJSON) {
			t.Errorf("change %d to %v: JSON is %v", i, format, p.json)
		}
	}
}

// TestChoiceByALabel: if a label of the node chooses the file, commands use the running daemon's
// file, unless a file is named.
func TestChoiceByALabel(t *testing.T) {
	t.Setenv("CONFIG_FILE", "")
	socket, came := answering(t, map[string][]any{daemon.CallStatus: {status.Status{ConfigFile: "/configs/chosen"}}})
	for args, want := range map[string]string{
		"--node-config-dir=/configs":                          "/configs/chosen",
		"--node-config-dir=/configs --config-file=/mine.yaml": "",
		"": "",
	} {
		cmd := &cobra.Command{}
		config.AddFlags(cmd.Flags())
		if err := cmd.Flags().Parse(append(strings.Fields(args), "--control-socket", socket)); err != nil {
			t.Fatal(err)
		}
		came.texts = nil
		chosen := ""
		if s := asTheDaemon(t.Context(), cmd.Flags()); s.Chosen != nil {
			chosen = s.Chosen.Value().File
		}
		if chosen != want || len(came.all()) != len(want)/len("/configs/chosen") {
			t.Errorf("%s: %q, and it asks %v", args, chosen, came.all())
		}
	}
}

// choosingCluster chooses a configuration file.
type choosingCluster struct {
	fakeCluster
	file string
}

func (c choosingCluster) Choose(context.Context, config.Startup) *feed.Feed[config.Chosen] {
	return feed.New(config.Chosen{File: c.file})
}

// TestBeginningOfAProcess: the file chosen by a label counts, a program without a client of the API
// server has none, and the log is as configured.
func TestBeginningOfAProcess(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("flags: {migStrategy: mixed, loggingFormat: json}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		program Program
		args    string
		mixed   bool
		json    bool
		fails   string
	}{
		"by a label": {NodeAgent(choosingCluster{file: file}), "--node-config-dir=/configs --node-name=a", true,
			true, ""},
		"without a client": {DevicePlugin(), "--node-config-dir=/configs --node-name=a", false, false,
			"gpu-node-agent"},
		"by a flag":      {DevicePlugin(), "--config-file=" + file, true, true, ""},
		"JSON by a flag": {DevicePlugin(), "--logging-format=json", false, true, ""},
		"JSON, and it is not used": {DevicePlugin(), "--logging-format=json --mig-strategy=some", false, true,
			"--mig-strategy"},
	} {
		cmd := &cobra.Command{}
		config.AddFlags(cmd.Flags())
		if err := cmd.Flags().Parse(strings.Fields(test.args)); err != nil {
			t.Fatal(err)
		}
		own := &ownProcess{log: logwriter.New(io.Discard)}
		c, err := test.program.begin(t.Context(), &config.Sources{Env: func(string) (string, bool) { return "", false },
			Flags: cmd.Flags()}, own)
		if fmt.Sprint(err == nil) != fmt.Sprint(test.fails == "") ||
			err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%s: %v", name, err)
		}
		if (c.Resource.MIG.String() == "mixed") != test.mixed || own.json != test.json {
			t.Errorf("%s: MIG strategy %v, JSON %v", name, c.Resource.MIG, own.json)
		}
		own.logAs(config.LogText)
	}
}

// TestStrategyOfARequest: the last valid GpuConfig of the driver counts that is for the request,
// for its parent or for all requests.
func TestStrategyOfARequest(t *testing.T) {
	t.Parallel()
	const header = "apiVersion: resource.nvidia.com/v1beta1, kind: "
	mps, slicing := header+"GpuConfig, sharing: {strategy: MPS}", header+"GpuConfig, sharing: {strategy: TimeSlicing}"
	for name, test := range map[string]struct {
		configs string
		want    dra.SharingStrategy
	}{
		"none":              {"[]", ""},
		"for all":           {"[{opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}]", dra.MPS},
		"for it":            {"[{requests: [a/b], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}]", dra.MPS},
		"for its parent":    {"[{requests: [x, a], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}]", dra.MPS},
		"for another":       {"[{requests: [b, a/c], opaque: {driver: gpu.nvidia.com, parameters: {" + mps + "}}}]", ""},
		"of another driver": {"[{opaque: {driver: other, parameters: {" + mps + "}}}]", ""},
		"that is wrong":     {"[{opaque: {driver: gpu.nvidia.com, parameters: {" + mps + ", colour: 1}}}]", ""},
		"for MIG devices":   {"[{opaque: {driver: gpu.nvidia.com, parameters: {" + header + "MigDeviceConfig}}}]", ""},
		"the last of two": {"[{opaque: {driver: gpu.nvidia.com, parameters: {" + mps +
			"}}}, {opaque: {driver: gpu.nvidia.com, parameters: {" + slicing + "}}}]",
			dra.TimeSlicing},
	} {
		var configs []claimConfig
		if err := yaml.UnmarshalStrict([]byte(test.configs), &configs); err != nil {
			t.Fatal(err)
		}
		if got := (claimCheck{dra.Driver}).strategyOf("a/b", configs); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestStatusOfClaims: nothing without claims, and the problem of a claim.
func TestStatusOfClaims(t *testing.T) {
	t.Parallel()
	if allocationLine(nil) != "" || ownerSentences(nil) != nil || claimSentences(nil, view{}) != nil {
		t.Error("something is said where Dynamic Resource Allocation is not used")
	}
	s := &status.DRA{Mode: "dra", Slices: 0, Claims: []status.DRAClaim{
		{Namespace: "a", Name: "b", Devices: []string{"gpu-0"}, Since: statusTime.Add(-time.Minute), Problem: "gpu-0: lost"},
	}}
	if got := claimSentences(s, view{now: statusTime}); len(got) != 1 ||
		got[0] != "a/b has gpu-0 since 60s ago; gpu-0: lost" {
		t.Errorf("%q", got)
	}
	if got := allocationLine(s); got != "mode dra; not registered with the kubelet" {
		t.Errorf("%q", got)
	}
}

// fakeCluster is a Cluster without commands, tasks or a choice of a file.
type fakeCluster struct{ daemon.Cluster }

func (fakeCluster) Commands() []*cobra.Command                                         { return nil }
func (fakeCluster) Choose(context.Context, config.Startup) *feed.Feed[config.Chosen]   { return nil }
func (fakeCluster) LabelOnce(context.Context, config.Startup, map[string]string) error { return nil }
