// Package statefile reads and writes files in folders shared with other programs.
package statefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Write replaces the file at path by a file with the given content and mode. A reader finds the old
// or the new file, never a part. When Write returns nil, the content is on the disk.
//
// Before the replacement, check is called with the path of the temporary file; after an error of
// check, the old file stays. check may be nil. A failed Write leaves no temporary file.
func Write(path string, content []byte, mode fs.FileMode, check func(temporary string) error) error {
	return write(path, content, mode, (*os.File).Sync, check)
}

// Replace is Write without a check and without a sync of the disk: after a power failure the file
// may be missing, empty or old. It is for content that can be created again.
func Replace(path string, content []byte, mode fs.FileMode) error {
	return write(path, content, mode, func(*os.File) error { return nil }, nil)
}

// Remove removes the file or the empty folder at path. A missing file is no error.
func Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func write(path string, content []byte, mode fs.FileMode, sync func(*os.File) error,
	check func(temporary string) error) (err error) {
	f, err := createTemporary(path)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, withoutPath(err))
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, errors.Join(err, withoutPath(os.Remove(f.Name()))))
		}
		_ = f.Close() // the content is synced; until here the lock marks the file as being written
	}()
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode) // CreateTemp ignores the umask and creates files for the owner only
	}
	if err == nil {
		err = sync(f)
	}
	if err != nil {
		return withoutPath(err)
	}
	if check != nil {
		if err := check(f.Name()); err != nil {
			return err
		}
	}
	return withoutPath(os.Rename(f.Name(), path))
}

// withoutPath returns an error without the path of the temporary file. The path differs in each
// attempt, and a lasting error is logged only once if the text stays the same.
func withoutPath(err error) error {
	var file *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &file):
		return fmt.Errorf("%s: %w", file.Op, file.Err)
	case errors.As(err, &link):
		return fmt.Errorf("%s: %w", link.Op, link.Err)
	}
	return err
}
