package cli

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// fill gives every field a value: two elements to a slice, and to a text the name of its field.
func fill(v reflect.Value, name string) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(statusTime.Add(-90 * time.Second)))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), v.Type().Field(i).Name)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), name)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), name)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, name)
		fill(value, name)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("<" + name + ">")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(3)
	case reflect.Uint64:
		v.SetUint(3)
	case reflect.Float64:
		v.SetFloat(3)
	default:
		panic(v.Kind().String() + " of " + name)
	}
}

// TestPrintStatusOfEverything: every sentence of status at once. `go test ./internal/app/cli -run
// TestPrintStatusOfEverything -update` rewrites the texts.
func TestPrintStatusOfEverything(t *testing.T) {
	t.Parallel()
	var s status.Status
	fill(reflect.ValueOf(&s).Elem(), "")
	s.DRA = nil // DRA has tests of its own
	for name, v := range map[string]view{"narrow": {}, "wide": {wide: true}, "colour": {colour: true, columns: 80}} {
		path := "testdata/status/" + name + ".txt"
		got := printed(s, v)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got := printed(status.Status{}, view{}); strings.Contains(got, "<") || strings.Count(got, "\n") > 4 {
		t.Errorf("of nothing: %s", got)
	}
}
