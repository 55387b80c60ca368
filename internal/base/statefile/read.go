package statefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// Open opens the regular file at path, or the null device, for reading. Other files are an error:
// opening or reading a FIFO, a socket or a device can block forever.
func Open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() && !isNull(info) {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("is %s, not a regular file", kind(info.Mode()))}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func isNull(info fs.FileInfo) bool {
	null, _ := os.Stat(os.DevNull) // nil is the same as no file
	return os.SameFile(info, null)
}

// IsAbsent reports whether an error means a missing file: no such file, or its folder is a file.
func IsAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// ErrTooLarge is wrapped by the error of Read for a file larger than the limit.
var ErrTooLarge = errors.New("is larger than")

// Read returns the content of the file at path, opened as by Open. A file larger than limit bytes
// is an error.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	tooLarge := &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w %d bytes", ErrTooLarge, limit)}
	if n, _ := f.ReadAt(make([]byte, 1), limit); n > 0 { // the reported size is too small for some files of the kernel
		return nil, tooLarge
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, tooLarge
	}
	return data, nil
}

// kind returns the kind of a non-regular file.
func kind(mode fs.FileMode) string {
	switch mode.Type() {
	case fs.ModeDir:
		return "a folder"
	case fs.ModeNamedPipe:
		return "a FIFO"
	case fs.ModeSocket:
		return "a socket"
	default:
		return "a device"
	}
}
