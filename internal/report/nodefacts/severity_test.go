package nodefacts_test

import (
	"reflect"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

func TestSeverityNames(t *testing.T) {
	t.Parallel()
	for severity, want := range map[diagnosis.Severity]string{
		diagnosis.OK: "ok", diagnosis.Info: "info", diagnosis.NotChecked: "not checked", diagnosis.Warning: "warning",
		diagnosis.Error: "error",
		-1:              "Severity(-1)", 5: "Severity(5)",
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
		worst := map[string]diagnosis.Severity{}
		found := doctor.Examine(facts)
		if got := diagnosis.Worst(found); (got == diagnosis.Warning) != hangs || got < diagnosis.NotChecked ||
			diagnosis.Worst(nil) != diagnosis.OK {
			t.Errorf("hangs %v: the worst is %s", hangs, got)
		}
		for _, f := range found {
			worst[f.Check] = max(worst[f.Check], f.Severity)
		}
		for _, c := range doctor.Checks {
			if got := worst[c.Name]; got != diagnosis.NotChecked && (!hangs || got != diagnosis.Warning) {
				t.Errorf("hangs %v: %s is %s", hangs, c.Name, got)
			}
		}
	}
}
