package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func TestMIG(t *testing.T) {
	t.Parallel()
	const file = `{flags: {migStrategy: mixed}, mig: {enabled: true, layout: mine, configFile: /layouts.yaml, label: true, replace: true, disruption: pause, evictTimeout: 2h}}`
	s := sources(t, "NODE_NAME=n MIG_REPLACE=false", "--mig-layout=other")
	s.Program = config.NodeAgent
	c, warnings, err := s.Resolve("a.yaml", []byte(file))
	want := config.MIG{Enabled: true, Layout: "other", File: "/layouts.yaml", Label: true, Evict: true,
		EvictTimeout: 2 * time.Hour, PauseClients: true}
	if diff := cmp.Diff(want, c.MIG); diff != "" || len(warnings) > 0 || err != nil {
		t.Errorf("%v, warnings %v (-want +got):\n%s", err, warnings, diff)
	}
	c, _, err = sources(t, "", "").Resolve("a.yaml", nil)
	if diff := cmp.Diff(config.MIG{EvictTimeout: 10 * time.Minute}, c.MIG); diff != "" || err != nil {
		t.Errorf("%v, without a file (-want +got):\n%s", err, diff)
	}
}

// TestMIGThatIsRefused: one sentence says what to do. A remark that is only a warning says so in
// want.
func TestMIGThatIsRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file string
		program    config.Program
		want       string
	}{
		{name: "a label without a client", file: "{enabled: true, label: true}", program: config.DevicePlugin,
			want: "run gpu-node-agent instead"},
		{name: "eviction without a client", file: "{enabled: true, disruption: evict}", program: config.DevicePlugin,
			want: "mig: needs the API server"},
		{name: "a label without a name", file: "{enabled: true, label: true}", program: config.NodeAgent,
			want: "set --node-name or NODE_NAME"},
		{name: "a name that is not built in", file: "{enabled: true, layout: training}", want: "mig.configFile"},
		{name: "a profile that cannot be", file: "{enabled: true, layout: all-1g.10}", want: "all-balanced or all-PROFILE"},
		{name: "an unknown disruption", file: "{enabled: true, disruption: drain}",
			want: `"drain" is not one of: none, evict, pause`},
		{name: "a short time", file: "{enabled: true, evictTimeout: 1s}", want: "is not between 1m0s and 24h0m0s"},
		{name: "a path that is none", file: "{enabled: true, configFile: layouts.yaml}", want: "is not an absolute path"},
		{name: "not enabled", file: "{layout: training}", want: "warning: set mig.enabled"},
		{name: "no strategy", file: "{enabled: true, layout: all-balanced}",
			want: "warning: not offered with the MIG strategy none"},
		{name: "not enabled, and no client", file: "{label: true}", program: config.DevicePlugin,
			want: "warning: set mig.enabled"},
		{name: "a name of a file", file: "{enabled: true, layout: training, configFile: /a}",
			want: "warning: MIG strategy none"},
		{name: "a profile with an attribute", file: "{enabled: true, layout: all-1g.10gb.me}",
			want: "warning: MIG strategy none"},
		{name: "a profile without media", file: "{enabled: true, layout: all-1g.24gb-me}",
			want: "warning: MIG strategy none"},
		{name: "MIG mode off", file: "{enabled: true, layout: all-disabled}"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := sources(t, "", "")
			s.Program = tt.program
			_, warnings, err := s.Resolve("", []byte("mig: "+tt.file))
			warning, warned := strings.CutPrefix(tt.want, "warning: ")
			switch {
			case tt.want == "" && (err != nil || len(warnings) > 0):
				t.Error(err, warnings)
			case warned && (err != nil || len(warnings) != 1 || !strings.Contains(warnings[0].String(), warning)):
				t.Errorf("%v, warnings %v, want %q", err, warnings, warning)
			case tt.want != "" && !warned && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// TestPauseNeedsVisibleProcesses: a process that does not see those of other containers can pause
// nothing.
func TestPauseNeedsVisibleProcesses(t *testing.T) {
	t.Parallel()
	for own, want := range map[bool]int{true: 1, false: 0} {
		s := sources(t, "NODE_NAME=n", "")
		s.Program, s.OwnPIDNamespace = config.NodeAgent, own
		_, warnings, err := s.Resolve("", []byte("mig: {enabled: true, disruption: pause}"))
		if err != nil || len(warnings) != want || want > 0 && !strings.Contains(warnings[0].String(), "set hostPID: true") {
			t.Errorf("in a PID namespace of its own %v: %v, warnings %v", own, err, warnings)
		}
	}
}
