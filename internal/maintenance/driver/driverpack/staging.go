package driverpack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// stagingSuffix is the end of the name of a folder that is being written.
const stagingSuffix = ".gpu-driver.tmp"

// A staging is a folder beside the place of a result, on the same file system. The result is written
// there, and moved to its place when the result is whole. The folder is locked until close.
type staging struct {
	path string
	lock *os.File
}

// stage creates a staging for a result at place. It removes the stagings of killed processes. If
// something exists at place, stage returns an error.
func stage(place string) (_ *staging, err error) {
	if _, err := os.Lstat(place); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = fmt.Errorf("%s exists already: remove it, or give another name", place)
		}
		return nil, err
	}
	parent, prefix := filepath.Dir(place), "."+filepath.Base(place)+"."
	if err := sweep(parent, prefix); err != nil {
		return nil, err
	}
	for range maxTries {
		path, err := os.MkdirTemp(parent, prefix+"*"+stagingSuffix)
		if err != nil {
			return nil, err
		}
		if lock, err := locked(path); err == nil {
			if _, err := os.Lstat(path); err == nil {
				return &staging{path, lock}, nil
			}
			_ = lock.Close() // nothing is written to it
		}
		_ = os.RemoveAll(path) // between the creation and the lock, another process may have swept it
	}
	return nil, fmt.Errorf("%s: the file system does not lock folders, or other processes write to the same place",
		parent)
}

// maxTries is the number of attempts to create a staging.
const maxTries = 10

// close removes the staging.
func (s *staging) close() error {
	return errors.Join(os.RemoveAll(s.path), s.lock.Close())
}

// publish moves the folder or file with a name in the staging to place.
func (s *staging) publish(name, place string) error {
	if _, err := os.Lstat(place); err == nil {
		return fmt.Errorf("%s exists already: another program has created it", place)
	}
	if err := driverfolder.SyncAll(filepath.Join(s.path, name)); err != nil {
		return err
	}
	atStep()
	if err := os.Rename(filepath.Join(s.path, name), place); err != nil {
		return err
	}
	atStep()
	return driverfolder.Sync(filepath.Dir(place))
}

// sweep removes the stagings of killed processes. The stagings of running processes are locked.
func sweep(parent, prefix string) error {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) || !strings.HasSuffix(e.Name(), stagingSuffix) {
			continue
		}
		path := filepath.Join(parent, e.Name())
		lock, err := locked(path)
		if err != nil {
			continue // being written, or of another user
		}
		err = os.RemoveAll(path)
		if err = errors.Join(err, lock.Close()); err != nil {
			return err
		}
	}
	return nil
}

// locked opens and locks a folder. The lock ends with the process.
func locked(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// atStep is called between the steps of writing; a test ends the process there.
var atStep = func() {}
