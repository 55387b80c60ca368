package statefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// temporarySuffix is what the name of a file ends with that this program writes and that has not
// its place yet. The name also has random digits: two processes have different ones, also where
// both are process 1 of their containers.
const temporarySuffix = ".gpu-device-plugin.tmp"

// swept has the folders in which this process has looked for what killed processes left.
var swept sync.Map

// createTemporary makes a file that is to take its place at path. This process has its lock. The
// first file in a folder has the folder swept.
func createTemporary(path string) (*os.File, error) {
	folder := filepath.Dir(path)
	if _, again := swept.LoadOrStore(folder, true); !again {
		_ = Sweep(folder) // the next process tries again
	}
	for {
		f, err := os.CreateTemp(folder, "."+filepath.Base(path)+".*"+temporarySuffix)
		if err != nil {
			return nil, err
		}
		// Between the two a process that sweeps may take the file for one that was left.
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if _, gone := os.Lstat(f.Name()); !errors.Is(err, unix.EAGAIN) && gone == nil {
			return f, nil // a file system without locks is not swept
		}
		_ = f.Close()
	}
}

// Sweep removes the temporary files of Write and Replace in a folder whose processes were killed. A
// file that a process writes is locked, and stays. No folder is no error.
func Sweep(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil && !IsAbsent(err) {
		return fmt.Errorf("look for temporary files: %w", err)
	}
	var failed []error
	for _, e := range entries {
		if IsTemporary(e.Name()) && e.Type().IsRegular() {
			failed = append(failed, sweep(filepath.Join(folder, e.Name())))
		}
	}
	return errors.Join(failed...)
}

// IsTemporary reports whether the name of a file is one that this program gives to files that have
// not their places yet.
func IsTemporary(name string) bool {
	return strings.HasPrefix(name, ".") && strings.HasSuffix(name, temporarySuffix)
}

// TemporaryName returns the path of a half-made file that is to take its place at path and that
// Write does not make, such as a device node. Each try and each process needs another token.
func TemporaryName(path, token string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+token+temporarySuffix)
}

// sweep removes a temporary file if nobody has its lock.
func sweep(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // its process has just renamed it
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}) != nil {
		return nil // it is being written, or nobody can tell
	}
	if opened, err := f.Stat(); err != nil || !isAt(opened, path) {
		return err
	}
	return Remove(path)
}

// isAt reports whether a file is still at path.
func isAt(file fs.FileInfo, path string) bool {
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(file, there)
}
