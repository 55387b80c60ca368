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

// A Release says that the driver was released by quiesce, until resume.
type Release struct {
	Version int `json:"version"`
	// Since is when that was asked for.
	Since time.Time `json:"since"`
	// Allocate says that GPUs may be given to new pods meanwhile.
	Allocate bool `json:"allocate"`
	// Boot is the boot ID of the node then; empty if it is not known.
	Boot string `json:"boot,omitempty"`
}

// ReadRelease returns the Release in a folder; nil if the driver was not released, or if the node
// was restarted since: then the reason for the release is gone. A file that cannot be read is set
// aside, and the error says so.
func ReadRelease(dir, boot string) (*Release, error) {
	r := &Release{}
	found, err := statefile.ReadState(filepath.Join(dir, releaseFile), maxLedger, releaseVersion, r)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read what quiesce has left, which is kept as %s: %w", releaseFile+statefile.Damaged, err)
	case !found:
		return nil, nil
	}
	if boot != "" && r.Boot != "" && r.Boot != boot {
		return nil, RemoveRelease(dir)
	}
	return r, nil
}

// WriteRelease writes a Release into a folder.
func WriteRelease(dir string, r Release) error {
	r.Version = releaseVersion
	if err := statefile.WriteState(filepath.Join(dir, releaseFile), r); err != nil {
		return fmt.Errorf("save that the driver was released: %w", err)
	}
	return nil
}

// RemoveRelease takes the Release out of a folder.
func RemoveRelease(dir string) error {
	err := os.Remove(filepath.Join(dir, releaseFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("save that the driver is in use again: %w", err)
	}
	return nil
}
