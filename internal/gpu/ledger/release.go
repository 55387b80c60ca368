package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// The file of a Release in the state directory.
const (
	releaseFile    = "quiesce.json"
	releaseVersion = 1
)

// A Release is a release of the driver by quiesce, until resume.
type Release struct {
	Version int `json:"version"`
	// Since is the time of the request.
	Since time.Time `json:"since"`
	// Allocate is true if GPUs may still get new pods meanwhile.
	Allocate bool `json:"allocate"`
	// ForChange is true if the daemon itself released the driver, to change it.
	ForChange bool `json:"forChange,omitempty"`
	// Boot is the node's boot ID at the time of the release; empty if unknown.
	Boot string `json:"boot,omitempty"`
}

// ReadRelease returns the Release in a directory; nil without a Release, and nil after a restart of
// the node, which ends the reason for the release. An unreadable file is set aside, with an error.
func ReadRelease(dir, boot string) (*Release, error) {
	r := &Release{}
	found, err := statefile.ReadState(filepath.Join(dir, releaseFile), maxLedger, releaseVersion, r)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the file of quiesce, kept as %s: %w", releaseFile+statefile.Damaged,
			err)
	case !found:
		return nil, nil
	}
	if boot != "" && r.Boot != "" && r.Boot != boot {
		return nil, RemoveRelease(dir)
	}
	return r, nil
}

// WriteRelease writes a Release into a directory.
func WriteRelease(dir string, r Release) error {
	r.Version = releaseVersion
	if err := statefile.WriteState(filepath.Join(dir, releaseFile), r); err != nil {
		return fmt.Errorf("save that the driver was released: %w", err)
	}
	return nil
}

// RemoveRelease removes the Release from a directory.
func RemoveRelease(dir string) error {
	err := os.Remove(filepath.Join(dir, releaseFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("save that the driver is in use again: %w", err)
	}
	return nil
}
