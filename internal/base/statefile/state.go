package statefile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Damaged is what the name of a state file that could not be read ends with; the last one is kept.
const Damaged = ".damaged"

// ReadState reads a state file into v, and reports whether there is one. It is JSON of at most a
// number of bytes, and its "version" is the given one. A file that cannot be read is set aside as
// path+Damaged, and the error says why it could not be read.
func ReadState(path string, most int64, version int, v any) (found bool, err error) {
	text, err := Read(path, most)
	if IsAbsent(err) {
		return false, nil
	}
	var has struct {
		Version int `json:"version"`
	}
	if err == nil {
		err = cmp.Or(json.Unmarshal(text, v), json.Unmarshal(text, &has))
	}
	if err == nil && has.Version != version {
		err = fmt.Errorf("it has version %d, and this program writes %d", has.Version, version)
	}
	if err != nil {
		return false, errors.Join(err, os.Rename(path, path+Damaged))
	}
	return true, nil
}

// WriteState writes v as a state file, which only its owner may read, and the folder that it is in.
func WriteState(path string, v any) error { return WriteStateIf(path, v, func() error { return nil }) }

// WriteStateIf is WriteState if may returns nil, before the work and when the file takes its place:
// a slow disk may be in between.
func WriteStateIf(path string, v any, may func() error) error {
	if err := may(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return Write(path, append(text, '\n'), 0o600, func(string) error { return may() })
}
