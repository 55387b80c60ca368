package config_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func TestFeatures(t *testing.T) {
	t.Parallel()
	const file = `features: {labels: nodeFeature, events: pods, condition: true, taint: true}`
	s := sources(t, "NODE_NAME=n NODE_TAINT=false", "--node-labels=node")
	s.Program = config.NodeAgent
	c, warnings, err := s.Resolve("a.yaml", []byte(file))
	const labelsFile = "/etc/kubernetes/node-feature-discovery/features.d/gpu-device-plugin"
	want := config.Features{Labels: config.LabelsNode, LabelsFile: labelsFile,
		MachineTypeFile: config.DefaultMachineTypeFile, Events: true, PodEvents: true, Condition: true}
	if diff := cmp.Diff(want, c.Features); diff != "" || len(warnings) > 0 || err != nil {
		t.Errorf("%v, warnings %v (-want +got):\n%s", err, warnings, diff)
	}
	c, _, err = sources(t, "", "").Resolve("a.yaml", []byte("features: {labels: file, events: true}"))
	want = config.Features{
		Labels: config.LabelsFile, LabelsFile: labelsFile, MachineTypeFile: config.DefaultMachineTypeFile, Events: true,
	}
	if diff := cmp.Diff(want, c.Features); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	c, _, err = sources(t, "", "").Resolve("a.yaml", []byte("features: {labels: off}"))
	if c.Features.Labels != config.LabelsOff || err != nil {
		t.Errorf("labels %v: %v", c.Features.Labels, err)
	}
}

// TestFeaturesThatAreRefused: one sentence says what to do.
func TestFeaturesThatAreRefused(t *testing.T) {
	t.Parallel()
	const lean = "run gpu-node-agent instead"
	for _, tt := range []struct {
		name, file, env, args string
		program               config.Program
		want                  string
	}{
		{name: "an object without a client", file: "features: {labels: nodeFeature}",
			want: "line 1: features: needs the API server", program: config.DevicePlugin},
		{name: "labels without a client", env: "NODE_NAME=n", args: "--node-labels=node", want: lean,
			program: config.DevicePlugin},
		{name: "events without a client", env: "NODE_EVENTS=true", want: lean, program: config.DevicePlugin},
		{name: "a condition without a client", args: "--node-condition", want: lean, program: config.DevicePlugin},
		{name: "a taint without a client", args: "--node-taint", want: lean, program: config.DevicePlugin},
		{name: "a release by annotation without a client", args: "--node-quiesce", want: lean, program: config.DevicePlugin},
		{name: "a choice without a client", args: "--node-config-dir=/configs",
			want: "--node-config-dir: needs the API server", program: config.DevicePlugin},
		{name: "types without the condition", file: "features: {conditionTypes: [A]}",
			want: "line 1: features.conditionTypes: are types of the condition"},
		{name: "a type of the kubelet", file: "features: {condition: true, conditionTypes: [Ready]}",
			want: "belongs to the kubelet"},
		{name: "the type that is there", file: "features: {condition: true, conditionTypes: [GPUHealthy]}",
			want: "name further types only"},
		{name: "a type with another mark", file: "features: {condition: true, conditionTypes: [A=False]}",
			want: "TYPE=problem"},
		{name: "a type twice", file: "features: {condition: true, conditionTypes: [A, A=problem]}", want: "twice"},
		{name: "no type", file: "features: {condition: true, conditionTypes: [a b]}", want: "is not a type"},
		{name: "too many types", file: "features: {condition: true, conditionTypes: [A, B, C, D, E, F, G, H, I]}",
			want: "more than 8"},
		{name: "health events without the agent", file: "features: {healthEvents: 'unix:///a'}",
			program: config.DevicePlugin, want: "line 1: features.healthEvents: needs gpu-node-agent"},
		{name: "health events without a name", args: "--health-events=unix:///a", program: config.NodeAgent,
			want: "set --node-name or NODE_NAME"},
		{name: "health events need no API server", args: "--health-events=unix:///a --node-name=n", program: config.NodeAgent},
		{name: "health events by TCP", args: "--health-events=localhost:50051", want: "is not the address of a Unix socket"},
		{name: "health events to a folder", args: "--health-events=unix:///a/", want: "is not the address of a Unix socket"},
		{name: "health events to a long path", args: "--health-events=unix:///" + strings.Repeat("a", 107),
			want: "has 108 bytes; the kernel allows 107"},
		{name: "an unknown strategy", args: "--health-events-strategy=store", want: "storeOnly, executeRemediation"},
		{name: "an unknown machine", args: "--health-events-machine=vms", want: "bareMetal, vm"},
		{name: "no name of the node", file: "features: {events: true}", program: config.NodeAgent,
			want: "set --node-name or NODE_NAME"},
		{name: "a choice without a name", args: "--node-config-dir=/configs", program: config.NodeAgent,
			want: "set --node-name or NODE_NAME"},
		{name: "two configuration files", args: "--node-config-dir=/configs --config-file=/a.yaml --node-name=n",
			program: config.NodeAgent, want: "--config-file"},
		{name: "unknown events", file: "features: {events: cluster}", want: `"cluster" is not one of: false, true, pods`},
		{name: "events that are no word", file: "features: {events: [true]}", want: "must be true, false or a string"},
		{name: "an unknown output", args: "--node-labels=nfd", want: "off, file, nodeFeature, node"},
		{name: "an unknown fallback", args: "--node-config-fallbacks=named,last", want: "named, single, empty"},
		{name: "any program", file: "features: {events: true}"},
		{name: "another file, for a command", args: "--node-config-dir=/configs --config-file=/a.yaml"},
		{name: "no client asked for", file: "features: {labels: file}", program: config.DevicePlugin},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := sources(t, tt.env, tt.args)
			s.Program = tt.program
			_, _, err := s.Resolve("", []byte(tt.file))
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}
