package driverpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
)

// Limits for the content of an archive. Real ones have 1,500 entries and 1.5 GB.
const (
	maxEntries = 100_000
	maxContent = 16 << 30 // bytes
)

// extract writes the regular files of the .run file's archive into folder. It returns an error if a
// name in the archive leads out of the folder. Symbolic links are left out: the installer's manifest
// has the links of a driver.
func (r *runFile) extract(ctx context.Context, folder *os.Root) error {
	return r.archive(ctx, func(unpacked io.Reader) error {
		archive := tar.NewReader(unpacked)
		left := int64(maxContent)
		for range maxEntries {
			head, err := archive.Next()
			if errors.Is(err, io.EOF) {
				// Read the padding, so that the decompressor ends without an error.
				_, err := io.Copy(io.Discard, io.LimitReader(unpacked, 1<<20))
				return err
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return damaged(err)
			}
			if left -= head.Size; left < 0 {
				return fmt.Errorf("the archive of the .run file has more than %d GiB", maxContent>>30)
			}
			if err := extractEntry(folder, archive, head); err != nil {
				return err
			}
		}
		return fmt.Errorf("the archive of the .run file has more than %d entries", maxEntries)
	})
}

func extractEntry(folder *os.Root, archive io.Reader, head *tar.Header) error {
	name, err := inside(head.Name)
	if err != nil || name == "." {
		return err
	}
	switch head.Typeflag {
	case tar.TypeDir:
		return folder.MkdirAll(name, 0o700)
	case tar.TypeReg:
		err := write(folder, name, archive)
		if file := (*fs.PathError)(nil); err != nil && !errors.As(err, &file) { // an error of the disk has a path
			return damaged(err)
		}
		return err
	case tar.TypeLink:
		target, err := inside(head.Linkname)
		if err != nil {
			return err
		}
		if err := folder.MkdirAll(path.Dir(name), 0o700); err != nil {
			return err
		}
		return folder.Link(target, name)
	case tar.TypeSymlink, tar.TypeXGlobalHeader:
		return nil
	}
	return fmt.Errorf("the archive of the .run file has an entry of the unknown type %q: %.200q",
		head.Typeflag, head.Name)
}

// inside returns a name in an archive as a path below the archive's folder.
func inside(name string) (string, error) {
	clean := path.Clean(strings.TrimSuffix(name, "/"))
	if strings.Contains("/"+name+"/", "/../") || !fs.ValidPath(clean) {
		return "", fmt.Errorf("the archive of the .run file has a name that leads out of its folder: %.200q", name)
	}
	return clean, nil
}

// write writes a new file below folder.
func write(folder *os.Root, name string, content io.Reader) (err error) {
	if err := folder.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := folder.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, content)
	return err
}
