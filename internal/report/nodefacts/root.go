package nodefacts

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

const (
	maxFile    = 1 << 20 // limit for reading a file, in bytes
	maxEntries = 1 << 16 // limit for listing a folder, such as /proc
)

// A root is the root folder of a file system. Symbolic links resolve as on the node.
type root struct{ fs.FS }

// resolve returns the path of a file without symbolic links, and its FileInfo.
func (r root) resolve(name string) (string, fs.FileInfo, error) {
	resolved, _, err := driverroot.Resolve(r.FS, strings.TrimPrefix(name, "/"))
	if err != nil {
		return "", nil, err
	}
	resolved = cmp.Or(resolved, ".")
	info, err := fs.Lstat(r.FS, resolved)
	return resolved, info, err
}

// link returns the target of a symbolic link of /proc. The target may be outside of the root.
func (r root) link(name string) (string, error) { return fs.ReadLink(r.FS, name) }

// exists reports whether a file exists.
func (r root) exists(name string) bool {
	_, _, err := r.resolve(name)
	return err == nil
}

// open opens a regular file. It returns an error for any other file, because opening could block or
// wake a device.
func (r root) open(name string) (fs.File, error) {
	resolved, info, err := r.resolve(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: "/" + strings.TrimPrefix(name, "/"),
			Err: errors.New("is not a regular file")}
	}
	return r.Open(resolved)
}

// read returns the content of a regular file. It returns an error for files beyond the limit.
func (r root) read(name string) ([]byte, error) {
	f, err := r.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = &fs.PathError{Op: "read", Path: "/" + strings.TrimPrefix(name, "/"),
			Err: fmt.Errorf("is larger than %d bytes", maxFile)}
	}
	return data, err
}

// line returns the trimmed content of a file; empty if it cannot be read.
func (r root) line(name string) string {
	data, err := r.read(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// list returns the names of the entries of a folder in order, up to the limit.
func (r root) list(name string) ([]string, error) {
	resolved, info, err := r.resolve(name)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, &fs.PathError{Op: "list", Path: "/" + strings.TrimPrefix(name, "/"), Err: errors.New("is not a folder")}
	}
	f, err := r.Open(resolved)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	folder, ok := f.(fs.ReadDirFile)
	if !ok {
		return nil, fmt.Errorf("list %s: not possible", name)
	}
	entries, err := folder.ReadDir(maxEntries)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names, nil
}

// match returns the paths that match a pattern in the last element of a path, in order. It returns
// a path without a pattern unchanged.
func (r root) match(pattern string) []string {
	if !strings.Contains(pattern, "*") {
		return []string{pattern}
	}
	names, err := r.list(path.Dir(pattern))
	if err != nil {
		return nil
	}
	var matching []string
	for _, name := range names {
		if ok, err := path.Match(path.Base(pattern), name); err == nil && ok {
			matching = append(matching, path.Join(path.Dir(pattern), name))
		}
	}
	return matching
}
