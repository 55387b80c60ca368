package statefile_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// TestUnknownFields: fields of a newer version are kept beside the known fields, even if the known
// fields are not written.
func TestUnknownFields(t *testing.T) {
	type known struct {
		Name  string `json:"name"`
		Count int    `json:"count,omitempty"`
	}
	for text, want := range map[string]string{
		`{"name": "a", "count": 2, "later": {"b": [1]}, "x": "y"}`: `{"name": "b", "later": {"b": [1]}, "x": "y"}`,
		`{"name": "a", "count": 0}`:                                `{"name": "b"}`,
		`{"later": null}`:                                          `{"name": "b", "later": null}`,
		`{}`:                                                       `{"name": "b"}`,
		`null`:                                                     `{"name": "b"}`,
	} {
		var k known
		rest, err := statefile.Decode([]byte(text), &k)
		if err != nil {
			t.Fatal(err)
		}
		k.Name, k.Count = "b", 0
		got, err := statefile.Encode(k, rest)
		if err != nil {
			t.Fatal(err)
		}
		var g, w any
		if err := json.Unmarshal(got, &g); err != nil {
			t.Errorf("%s: %v", got, err)
		}
		if err := json.Unmarshal([]byte(want), &w); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(w, g); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
	for _, text := range []string{"", "[]", `{"name": 1}`, `{"name": "a"`} {
		if _, err := statefile.Decode([]byte(text), &known{}); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}
