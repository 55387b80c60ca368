package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

func TestRollout(t *testing.T) {
	t.Parallel()
	const file = `{mig: {enabled: true, label: true, budget: true}, rollout: {slots: 3, namespace: gpu, waveLabel: wave,
waveSoak: 1h, topologyLabel: rack, windows: ["Sat 22:00-04:00", "Mon-Fri 01:00-05:00"]}}`
	s := sources(t, "NODE_NAME=n ROLLOUT_SLOTS=5", "")
	s.Program = config.NodeAgent
	c, warnings, err := s.Resolve("a.yaml", []byte(file))
	if len(warnings) > 0 || err != nil || !c.MIG.Budget {
		t.Fatalf("%v, warnings %v, budget %t", err, warnings, c.MIG.Budget)
	}
	var windows []string
	for _, w := range c.Rollout.Windows {
		windows = append(windows, w.String())
	}
	c.Rollout.Windows = nil
	want := config.Rollout{Slots: 5, Namespace: "gpu", WaveLabel: "wave", WaveSoak: time.Hour, TopologyLabel: "rack"}
	if diff := cmp.Diff(want, c.Rollout) + cmp.Diff([]string{"Sat 22:00-04:00 UTC", "Mon-Fri 01:00-05:00 UTC"},
		windows); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// In YAML, off is false. The plan needs neither slots nor the API server.
func TestRepair(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		file string
		want repair.Mode
	}{
		{"version: v1", repair.Off}, {"{health: {repair: off}}", repair.Off}, {"{health: {repair: false}}", repair.Off},
		{"{health: {repair: plan}}", repair.Plan}, {"{health: {repair: idle}, rollout: {slots: 1}}", repair.Idle},
	} {
		s := sources(t, "NODE_NAME=n", "")
		s.Program = config.NodeAgent
		if c, warnings, err := s.Resolve("a.yaml", []byte(tt.file)); err != nil || len(warnings) > 0 || c.Repair != tt.want {
			t.Errorf("%s: %v, %v, %v", tt.file, c.Repair, warnings, err)
		}
		s.Program = config.DevicePlugin
		_, _, err := s.Resolve("a.yaml", []byte(tt.file))
		if refused := err != nil && strings.Contains(err.Error(), "run gpu-node-agent instead"); refused != tt.want.Acts() {
			t.Errorf("%s without a client of the API server: %v", tt.file, err)
		}
	}
}

// One sentence says what to do.
func TestRolloutThatIsRefused(t *testing.T) {
	t.Parallel()
	const layouts = "mig: {enabled: true, label: true, budget: true}"
	for _, tt := range []struct{ name, file, want string }{
		{"repairs without slots", "{health: {repair: idle}}", "set rollout.slots"},
		{"an unknown repair", "{health: {repair: reboot}}", `"reboot" is not one of: off, plan, idle, evict`},
		{"a budget without slots", "{" + layouts + "}", "set rollout.slots"},
		{"too many slots", "{rollout: {slots: 1001}}", "is not a number from 0 to 1000"},
		{"less than none", "{rollout: {slots: -1}}", "is not a number from 0 to 1000"},
		{"a short soak", "{rollout: {waveSoak: 1s}}", "is not between 1m0s and 168h0m0s"},
		{"a window in words", "{rollout: {windows: [Saturday]}}", `"Saturday" has no times such as 22:00-04:00`},
		{"a window without a day", "{rollout: {windows: [Samstag 22:00-04:00]}}", "has no days such as Sat or Mon-Fri"},
		{"waves of layouts without a label", "{mig: {enabled: true, layout: all-disabled, budget: true}, " +
			"rollout: {slots: 1, waveLabel: wave}}", "mig.label"},
	} {
		s := sources(t, "NODE_NAME=n", "")
		s.Program = config.NodeAgent
		if _, _, err := s.Resolve("a.yaml", []byte(tt.file)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	s := sources(t, "", "")
	s.Program = config.DevicePlugin
	if _, _, err := s.Resolve("a.yaml", []byte("{mig: {enabled: true, budget: true}, rollout: {slots: 1}}")); err == nil ||
		!strings.Contains(err.Error(), "run gpu-node-agent instead") {
		t.Errorf("without a client of the API server: %v", err)
	}
}
