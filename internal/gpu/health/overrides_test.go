package health_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

func TestParseOverrides(t *testing.T) {
	const ignore, fatal, catalog = health.RuleIgnore, health.RuleFatal, health.RuleCatalog
	tests := map[string]struct {
		disable, enable string
		want            map[uint64]health.Rule
		malformed       int
	}{
		"nothing": {"", "", map[uint64]health.Rule{13: catalog, 79: catalog}, 0},
		"a list": {"48, 79 ,", "", map[uint64]health.Rule{48: ignore, 79: ignore, 95: catalog},
			0},
		"all":                          {"ALL", "", map[uint64]health.Rule{48: ignore, 13: ignore}, 0},
		"xids means all":               {"xids", "", map[uint64]health.Rule{48: ignore}, 0},
		"all within a list":            {"13,all,48", "", map[uint64]health.Rule{13: ignore, 79: ignore}, 0},
		"enabled":                      {"", "109", map[uint64]health.Rule{109: fatal, 48: catalog}, 0},
		"enabled wins over disabled":   {"48,109", "109", map[uint64]health.Rule{48: ignore, 109: fatal}, 0},
		"one enabled of all disabled":  {"all", "79", map[uint64]health.Rule{79: fatal, 48: ignore}, 0},
		"all enabled wins over a list": {"48", "all", map[uint64]health.Rule{48: fatal, 13: fatal}, 0},
		"malformed entries":            {"48,x,-1", "1e3", map[uint64]health.Rule{48: ignore, 1: catalog}, 3},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			o, malformed := health.ParseOverrides(tt.disable, tt.enable)
			for code, want := range tt.want {
				if got := o.Rule(code); got != want {
					t.Errorf("Rule(%d) = %q, want %q", code, got, want)
				}
			}
			if len(malformed) != tt.malformed {
				t.Errorf("malformed: %q, want %d", malformed, tt.malformed)
			}
		})
	}
}

// Only where every XID is ignored are all checks off.
func TestOff(t *testing.T) {
	for _, tt := range []struct {
		disable, enable string
		off             bool
	}{
		{"", "", false}, {"all", "", true}, {"all,48", "", true}, {"48", "", false},
		{"", "all", false}, {"all", "79", false}, {"all", "all", false},
	} {
		o, _ := health.ParseOverrides(tt.disable, tt.enable)
		if got := o.Off(); got != tt.off {
			t.Errorf("disable %q, enable %q: off %v, want %v", tt.disable, tt.enable, got, tt.off)
		}
		s := begin(t, 580)
		s.policy.Overrides = o
		s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
		verdict := s.policy.Verdict(s.gpu.Device)
		if healthy := verdict.State == inventory.Healthy && verdict.Reason == "" &&
			!verdict.Since.IsZero(); healthy != tt.off {
			t.Errorf("disable %q, enable %q: %+v of a lost GPU", tt.disable, tt.enable, verdict)
		}
		s.want(inventory.Lost, inventory.RemedyReboot)
	}
}

func TestWithLeavesTheOriginalAlone(t *testing.T) {
	var zero health.Overrides
	one := zero.With(48, health.RuleIgnore)
	two := one.With(48, health.RuleFatal)
	if zero.Rule(48) != health.RuleCatalog || one.Rule(48) != health.RuleIgnore || two.Rule(48) != health.RuleFatal {
		t.Errorf("rules: %q %q %q", zero.Rule(48), one.Rule(48), two.Rule(48))
	}
	if one.Equal(two) || !one.Equal(zero.With(48, health.RuleIgnore)) {
		t.Error("Equal does not tell rules apart")
	}
	all, _ := health.ParseOverrides("all", "")
	if again, _ := health.ParseOverrides("xids", ""); all.Equal(zero) || zero.Equal(all) || !all.Equal(again) {
		t.Error("Equal does not tell what holds for all XIDs apart")
	}
}
