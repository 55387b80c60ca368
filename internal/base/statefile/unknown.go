package statefile

import (
	"encoding/json"
	"reflect"
	"strings"
)

// Unknown holds the unknown fields of a JSON object, as a JSON object; empty without any. A newer
// version of this program may have written them.
type Unknown string

// Decode reads a JSON object into the struct at the pointer known, and returns the fields missing
// in the struct.
func Decode(text []byte, known any) (Unknown, error) {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, known); err != nil {
		return "", err
	}
	if err := json.Unmarshal(text, &all); err != nil {
		return "", err
	}
	for _, field := range reflect.VisibleFields(reflect.TypeOf(known).Elem()) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		delete(all, name)
	}
	if len(all) == 0 {
		return "", nil
	}
	rest, err := json.Marshal(all)
	return Unknown(rest), err
}

// Encode returns a struct as a JSON object, with the fields from Decode. The struct must have a
// field that is never omitted.
func Encode(known any, kept Unknown) ([]byte, error) {
	text, err := json.Marshal(known)
	if err != nil || kept == "" {
		return text, err
	}
	return append(append(text[:len(text)-1], ','), kept[1:]...), nil
}
