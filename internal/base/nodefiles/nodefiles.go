// Package nodefiles reads files below the root folder of a node, which may be mounted elsewhere in a
// container: symbolic links resolve as on the node, only regular files and folders are opened, and
// the size of reads is limited.
package nodefiles

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

// A Root is the root folder of a file system. Symbolic links resolve as on the node.
type Root struct{ fs.FS }

// Resolve returns the path of a file without symbolic links, and its FileInfo.
func (r Root) Resolve(name string) (string, fs.FileInfo, error) {
	resolved, _, err := driverroot.Resolve(r.FS, strings.TrimPrefix(name, "/"))
	if err != nil {
		return "", nil, err
	}
	resolved = cmp.Or(resolved, ".")
	info, err := fs.Lstat(r.FS, resolved)
	return resolved, info, err
}

// Link returns the target of a symbolic link of /proc. The target may be outside of the root.
func (r Root) Link(name string) (string, error) { return fs.ReadLink(r.FS, name) }

// Exists reports whether a file exists.
func (r Root) Exists(name string) bool {
	_, _, err := r.Resolve(name)
	return err == nil
}

// OpenFile opens a regular file. It returns an error for any other file, because opening could block or
// wake a device.
func (r Root) OpenFile(name string) (fs.File, error) {
	resolved, info, err := r.Resolve(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: "/" + strings.TrimPrefix(name, "/"),
			Err: errors.New("is not a regular file")}
	}
	return r.Open(resolved)
}

// Read returns the content of a regular file. It returns an error for files beyond the limit.
func (r Root) Read(name string) ([]byte, error) {
	f, err := r.OpenFile(name)
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

// Line returns the trimmed content of a file; empty if it cannot be read.
func (r Root) Line(name string) string {
	data, err := r.Read(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// List returns the names of the entries of a folder in order, up to the limit.
func (r Root) List(name string) ([]string, error) {
	resolved, info, err := r.Resolve(name)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, &fs.PathError{Op: "list", Path: "/" + strings.TrimPrefix(name, "/"),
			Err: errors.New("is not a folder")}
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

// Match returns the paths that match a pattern in the last element of a path, in order. It returns
// a path without a pattern unchanged.
func (r Root) Match(pattern string) []string {
	if !strings.Contains(pattern, "*") {
		return []string{pattern}
	}
	names, err := r.List(path.Dir(pattern))
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
