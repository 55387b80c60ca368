package statefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// Open opens the regular file at path, or the null device, for reading. Anything else is an error,
// and is not waited for: opening or reading a FIFO, a socket or a device can block for ever.
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

// IsAbsent reports whether an error says that there is no file of a path, and that there never was
// one since that path is what it is: the file is not there, or a file is where its folder is to be.
func IsAbsent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// ErrTooLarge is wrapped by the error of a Read of a file that is larger than its limit.
var ErrTooLarge = errors.New("is larger than")

// Read returns the content of the file at path as Open opens it, of at most limit bytes; a larger
// file is an error.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	tooLarge := &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w %d bytes", ErrTooLarge, limit)}
	if n, _ := f.ReadAt(make([]byte, 1), limit); n > 0 { // its size says less: the kernel's own files have any
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

// kind names what is not a regular file.
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
