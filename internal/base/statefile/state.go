package statefile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Damaged is the suffix of an unreadable state file. Only the last such file is kept.
const Damaged = ".damaged"

// ReadState reads a JSON state file into v, and reports whether the file exists. It returns an
// error if the file has more than `most` bytes or another "version". An unreadable file is renamed
// to path+Damaged, and the error contains the reason.
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

// WriteState writes v as a state file with access for the owner only, and creates the folder.
func WriteState(path string, v any) error { return WriteStateIf(path, v, func() error { return nil }) }

// WriteStateIf is WriteState on the condition that `may` returns nil, both before the work and
// before the rename: a slow disk may delay the rename.
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
