package config_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestDiscoveryOptions: what NVIDIA's gpu-feature-discovery is told by flags, environment and file
// is what ours is told.
func TestDiscoveryOptions(t *testing.T) {
	t.Parallel()
	const shared = "flags: {migStrategy: mixed, useNodeFeatureAPI: true, gfd: {oneshot: true, noTimestamp: true, " +
		"sleepInterval: 2m, outputFile: /f, " +
		"machineTypeFile: /m}}\nsharing: {mps: {resources: []}}\n"
	type want struct {
		d         config.Discovery
		labels    config.LabelsOutput
		file      string
		machine   string
		timestamp bool
	}
	usual := want{config.Discovery{On: true, Sleep: time.Minute}, config.LabelsFile, config.DefaultDiscoveryFile,
		config.DefaultMachineTypeFile, true}
	with := func(change func(*want)) want {
		w := usual
		change(&w)
		return w
	}
	for _, tt := range []struct {
		name, file, env, args string
		program               config.Program
		want                  want
		fails                 string
	}{
		{name: "nothing", want: usual, program: config.DevicePlugin},
		{
			name: "file", file: strings.Replace(shared, "sharing: {mps: {resources: []}}\n", "",
				1), env: "NODE_NAME=n", program: config.NodeAgent,
			want: want{config.Discovery{On: true, Oneshot: true, Sleep: 2 * time.Minute, API: config.APIOn},
				config.LabelsNodeFeature, "/f", "/m", false},
		},
		{
			name: "environment over file", file: "flags: {gfd: {sleepInterval: 2m, outputFile: /f}}",
			env: "GFD_SLEEP_INTERVAL=infinite GFD_OUTPUT_FILE= GFD_MACHINE_TYPE_FILE=/e GFD_NO_TIMESTAMP=false " +
				"GFD_USE_NODE_FEATURE_API=false",
			want: with(func(w *want) {
				w.d.Sleep, w.file, w.machine, w.d.API = 0, "", "/e", config.APIOff
			}),
		},
		{name: "flags over environment", env: "GFD_ONESHOT=true",
			args: "--oneshot=false -o /o --kube-api-qps=7 --kube-api-burst=9", want: with(func(w *want) { w.file = "/o" })},
		{name: "an infinite interval", file: "flags: {gfd: {sleepInterval: infinite}}",
			want: with(func(w *want) { w.d.Sleep = 0 })},
		{name: "a short interval", args: "--sleep-interval=10ms", want: with(func(w *want) { w.d.Sleep = time.Second })},
		{name: "other discovery", args: "--device-discovery-strategy=vfio", fails: "auto, nvml"},
		{name: "an agent's default", env: "GFD_NODE_NAME=n", program: config.NodeAgent,
			want: with(func(w *want) { w.labels = config.LabelsNodeFeature })},
		{name: "features are of the daemon", file: "features: {labels: node, events: true}", program: config.DevicePlugin,
			want: usual},
		{name: "MPS without a root", file: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", want: usual},
		{name: "no client", args: "--use-node-feature-api", program: config.DevicePlugin,
			fails: "--use-node-feature-api: needs the API server"},
		{name: "no name of the node", program: config.NodeAgent, fails: "needs the name of the node"},
		{name: "a bad interval", args: "--sleep-interval=5", fails: "infinite"},
		{name: "a bad boolean", env: "USE_NODE_FEATURE_API=maybe", fails: "true or false"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := sources(t, tt.env, "")
			s.Flags = pflag.NewFlagSet("test", pflag.ContinueOnError)
			config.AddDiscoveryFlags(s.Flags)
			if err := s.Flags.Parse(strings.Fields(tt.args)); err != nil {
				t.Fatal(err)
			}
			s.Env, s.Program, s.Discovery = config.DiscoveryEnv(s.Env), tt.program, true
			c, _, err := s.Resolve("", []byte(tt.file))
			if tt.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fails) {
					t.Errorf("%v, want %q", err, tt.fails)
				}
				return
			}
			got := want{c.Discovery, c.Features.Labels, c.Features.LabelsFile, c.Features.MachineTypeFile,
				c.Features.LabelsTimestamp}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(want{})); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestDocsNameEveryFlagOfDiscovery keeps the table of the flags of gpu-feature-discovery complete.
func TestDocsNameEveryFlagOfDiscovery(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/dev/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	config.AddDiscoveryFlags(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(string(text), "`--"+f.Name+"`") {
			t.Errorf("docs/dev/compatibility.md says nothing of --%s", f.Name)
		}
	})
}
