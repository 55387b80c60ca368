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

// temporarySuffix is the suffix of a file before the rename to the final path. The name also has
// random digits, because two processes may have the same process ID, 1.
const temporarySuffix = ".gpu-device-plugin.tmp"

// sweptFolders holds the folders already swept by this process.
var sweptFolders sync.Map

// createTemporary creates a locked file for a later rename to path. It sweeps each folder once.
func createTemporary(path string) (*os.File, error) {
	folder := filepath.Dir(path)
	if _, again := sweptFolders.LoadOrStore(folder, true); !again {
		_ = Sweep(folder) // the next process tries again
	}
	for {
		f, err := os.CreateTemp(folder, "."+filepath.Base(path)+".*"+temporarySuffix)
		if err != nil {
			return nil, err
		}
		// In between, another process may sweep the file.
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if _, gone := os.Lstat(f.Name()); !errors.Is(err, unix.EAGAIN) && gone == nil {
			return f, nil // a file system without locks is not swept
		}
		_ = f.Close()
	}
}

// Sweep removes the temporary files of killed processes from a folder. A file that is being written
// is locked, and stays. A missing folder is no error.
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

// IsTemporary reports whether a file name is a temporary name of this program.
func IsTemporary(name string) bool {
	return strings.HasPrefix(name, ".") && strings.HasSuffix(name, temporarySuffix)
}

// TemporaryName returns a temporary path for other files than those of Write, such as device nodes.
// Each attempt and each process needs a different token.
func TemporaryName(path, token string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+token+temporarySuffix)
}

// sweep removes a temporary file if no process has its lock.
func sweep(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the writing process has just renamed the file
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}) != nil {
		return nil // still being written, or unknown
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
