package statefile

import (
	"encoding/json"
	"reflect"
	"strings"
)

// Unknown are the fields of a JSON object that this program does not know, as a JSON object; empty
// if there are none. They are kept: a newer version may have written them.
type Unknown string

// Decode reads a JSON object into a struct, by its pointer, and returns the fields that the struct
// does not have.
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

// Encode returns a struct as a JSON object, with the fields that Decode kept. The struct has a
// field that is never left out.
func Encode(known any, kept Unknown) ([]byte, error) {
	text, err := json.Marshal(known)
	if err != nil || kept == "" {
		return text, err
	}
	return append(append(text[:len(text)-1], ','), kept[1:]...), nil
}
