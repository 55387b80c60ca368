package driverstore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// Place copies a driver folder into the directory and returns it. It copies what the manifest names,
// and ignores other files, so that the source may be the root of a container. progress is called with
// the percentage of copied bytes. If the folder is there already, nothing changes. A failed Place
// leaves nothing.
func (s *Store) Place(ctx context.Context, source string, progress func(percent int)) (Folder, error) {
	from, err := os.OpenRoot(source)
	if err != nil {
		return Folder{}, err
	}
	defer func() { _ = from.Close() }() // only read
	m, digest, err := driverfolder.Read(from.FS())
	if err != nil {
		return Folder{}, fmt.Errorf("%s: %w", source, err)
	}
	return s.install(ctx, m, digest, func(to *os.Root) error {
		c := copying{ctx: ctx, to: to, all: size(m), progress: progress}
		if err := c.copy(from, m, digest); err != nil {
			return fmt.Errorf("copy %s: %w", source, err)
		}
		return nil
	})
}

// install lets fill write the files of a driver folder, verifies them, and makes the folder one of the
// directory. If the folder is there already, nothing changes. A failed install leaves nothing.
func (s *Store) install(ctx context.Context, m driverfolder.Manifest, digest string, fill func(to *os.Root) error) (
	_ Folder, err error,
) {
	if f, err := s.Folder(digest); err == nil {
		return f, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return Folder{}, fmt.Errorf("something else is in the place of the folder: remove it: %w", err)
	}
	if err := s.space(m); err != nil {
		return Folder{}, err
	}
	temporary := s.temporary(digest)
	s.step("before a folder is copied")
	if err := os.Mkdir(temporary, 0o755); err != nil {
		return Folder{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temporary))
		}
	}()
	to, err := os.OpenRoot(temporary)
	if err != nil {
		return Folder{}, err
	}
	defer func() { _ = to.Close() }() // everything is synced
	if err := fill(to); err != nil {
		return Folder{}, err
	}
	s.step("after a folder is copied")
	switch _, found, err := driverfolder.Verify(ctx, temporary); {
	case err != nil:
		return Folder{}, fmt.Errorf("verify the copy of driver %s: %w", m.Version, err)
	case found != digest:
		return Folder{}, fmt.Errorf("verify the copy of driver %s: it has the digest %s, not %s", m.Version, found,
			digest)
	}
	if err := driverfolder.SyncAll(temporary); err != nil {
		return Folder{}, err
	}
	s.step("before a folder is renamed")
	if err := os.Rename(temporary, s.Path(digest)); err != nil {
		return Folder{}, err
	}
	s.step("after a folder is renamed")
	return Folder{s.Path(digest), digest, m}, driverfolder.Sync(s.path)
}

// space returns an error if the file system has no space for a folder.
func (s *Store) space(m driverfolder.Manifest) error {
	var free unix.Statfs_t
	if err := unix.Statfs(s.path, &free); err != nil {
		return err
	}
	if has, needs := free.Bavail*uint64(free.Bsize), uint64(size(m)); has < needs {
		return fmt.Errorf("%s has %d MB free, and driver %s needs %d MB: free some space",
			s.path, has/1_000_000, m.Version, needs/1_000_000+1)
	}
	return nil
}

// size returns the bytes of all files.
func size(m driverfolder.Manifest) (all int64) {
	for _, f := range m.Files {
		all += f.Size
	}
	return all
}

// A copying writes the files of a driver folder.
type copying struct {
	ctx       context.Context //nolint:containedctx // of one call
	to        *os.Root
	done, all int64 // bytes
	progress  func(percent int)
}

// copy copies the driver folder from.
func (c *copying) copy(from *os.Root, m driverfolder.Manifest, digest string) error {
	for _, f := range m.Files {
		var err error
		if f.Link != "" {
			err = c.link(f)
		} else {
			err = c.file(from, f)
		}
		if err != nil {
			return err
		}
	}
	info, err := from.Lstat(driverfolder.ManifestName)
	if err != nil {
		return err
	}
	return c.file(from, manifestFile(info.Size(), digest))
}

// manifestFile describes the manifest, which does not describe itself.
func manifestFile(size int64, digest string) driverfolder.File {
	return driverfolder.File{Path: driverfolder.ManifestName, Mode: "0644", Size: size, SHA256: digest}
}

// link creates a symbolic link.
func (c *copying) link(f driverfolder.File) error {
	if err := c.makeFolder(path.Dir(f.Path)); err != nil {
		return err
	}
	return c.to.Symlink(f.Link, f.Path)
}

// makeFolder creates a folder and those above it, for everybody to read, whatever the umask.
func (c *copying) makeFolder(name string) error {
	if name == "." {
		return c.to.Chmod(name, 0o755)
	}
	switch err := c.to.Mkdir(name, 0o755); {
	case err == nil:
		return c.to.Chmod(name, 0o755)
	case errors.Is(err, fs.ErrExist):
		return nil
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := c.makeFolder(path.Dir(name)); err != nil {
		return err
	}
	return c.makeFolder(name)
}

// file copies a regular file. The source may change at any time: only the digest counts.
func (c *copying) file(from *os.Root, f driverfolder.File) error {
	if info, err := from.Lstat(f.Path); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", f.Path)
	}
	in, err := from.OpenFile(f.Path, os.O_RDONLY|unix.O_NONBLOCK, 0) // it may be a FIFO by now
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }() // only read
	return c.write(f, in)
}

// write writes a regular file. It reads at most one byte more than the file has.
func (c *copying) write(f driverfolder.File, in io.Reader) error {
	if err := c.makeFolder(path.Dir(f.Path)); err != nil {
		return err
	}
	out, err := c.to.OpenFile(f.Path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }() // synced below
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(out, hash), io.LimitReader(&counted{c, in}, f.Size+1))
	if err != nil {
		return err
	}
	if found := hex.EncodeToString(hash.Sum(nil)); n != f.Size || found != f.SHA256 {
		return fmt.Errorf("%s is not the file that was packed: it has at least %d bytes and the digest %s",
			f.Path, n, found)
	}
	return errors.Join(out.Chmod(f.Permissions()), out.Sync())
}

// counted reads a file of a copying.
type counted struct {
	*copying
	r io.Reader
}

func (c *counted) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	before := percent(c.done, c.all)
	c.done += int64(n)
	if now := percent(c.done, c.all); now != before {
		c.progress(now)
	}
	return n, err
}

// percent returns the progress. 100 is reached when the copy is verified.
func percent(done, all int64) int {
	if all == 0 {
		return 0
	}
	return int(min(99, done*100/all))
}
