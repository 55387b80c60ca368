package driverfolder

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Sync writes the entries of a folder to the disk: names that were added, changed or removed.
func Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// SyncAll writes the entries of a folder and of all folders below to the disk. The files have been
// synced before.
func SyncAll(top string) error {
	return filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		return Sync(path)
	})
}
