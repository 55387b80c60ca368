package ledger

import (
	"encoding/json"
	"maps"
)

// unknown are the fields of a JSON object that this program does not know, as a JSON object; empty if there are none. They are kept: a
// newer version that shares the file may have written them.
type unknown string

// decode reads a JSON object into known, and returns the fields that known does not have.
func decode(text []byte, known any) (unknown, error) {
	if err := json.Unmarshal(text, known); err != nil {
		return "", err
	}
	has, err := json.Marshal(known)
	if err != nil {
		return "", err
	}
	var all, taken map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return "", err
	}
	if err := json.Unmarshal(has, &taken); err != nil {
		return "", err
	}
	maps.DeleteFunc(all, func(name string, _ json.RawMessage) bool { _, is := taken[name]; return is })
	if len(all) == 0 {
		return "", nil
	}
	rest, err := json.Marshal(all)
	return unknown(rest), err
}

// encode returns a JSON object with the fields of known and those that decode kept.
func encode(known any, rest unknown) ([]byte, error) {
	text, err := json.Marshal(known)
	if err != nil || rest == "" {
		return text, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(rest), &all); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &all); err != nil { // into the map that is there
		return nil, err
	}
	return json.Marshal(all)
}
