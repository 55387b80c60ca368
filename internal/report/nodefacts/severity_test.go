package nodefacts_test

import (
	"reflect"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

func TestSeverityNames(t *testing.T) {
	t.Parallel()
	for severity, want := range map[doctor.Severity]string{
		doctor.OK: "ok", doctor.Info: "info", doctor.NotChecked: "not checked", doctor.Warning: "warning",
		doctor.Error: "error",
		-1:           "Severity(-1)", 5: "Severity(5)",
	} {
		if text, err := severity.MarshalText(); string(text) != want || err != nil || severity.String() != want {
			t.Errorf("severity %d is %q, %v, want %q", int(severity), text, err, want)
		}
	}
}

// TestUnreadableFacts: no check reports success or a problem, except for hanging reads.
func TestUnreadableFacts(t *testing.T) {
	t.Parallel()
	for _, hangs := range []bool{false, true} {
		facts := doctor.NodeFacts{Settings: cdi}
		facts.Settings.MPS, facts.Settings.Claims, facts.Settings.DriverRoot = true, true, "/run/nvidia/driver"
		facts.Settings.Companions = []doctor.CompanionModule{doctor.GDRCopy}
		for _, field := range reflect.ValueOf(&facts).Elem().Fields() {
			if field.Kind() == reflect.Struct && field.FieldByName("Missing").IsValid() {
				field.FieldByName("Missing").SetString("it cannot be seen")
				field.FieldByName("Hung").SetBool(hangs)
			}
		}
		worst := map[string]doctor.Severity{}
		found := doctor.Examine(facts)
		if got := doctor.Worst(found); (got == doctor.Warning) != hangs || got < doctor.NotChecked ||
			doctor.Worst(nil) != doctor.OK {
			t.Errorf("hangs %v: the worst is %s", hangs, got)
		}
		for _, f := range found {
			worst[f.Check] = max(worst[f.Check], f.Severity)
		}
		for _, c := range doctor.Checks {
			if got := worst[c.Name]; got != doctor.NotChecked && (!hangs || got != doctor.Warning) {
				t.Errorf("hangs %v: %s is %s", hangs, c.Name, got)
			}
		}
	}
}
