// Package driverstore keeps the driver folders of a node: a directory with a folder DIGEST for each
// driver, and the link driverapi.Current. A folder in the directory is whole, also after a power cut.
// Only gpu-driver links the package.
package driverstore

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// temporarySuffix is the end of the names of folders and links that are being written or removed.
const temporarySuffix = ".gpu-driver.tmp"

// A Store is the directory of a node. It has one user at a time.
type Store struct {
	path   string
	unlock func()
	step   func(name string)
}

// A Folder is a driver folder.
type Folder struct {
	Path     string
	Digest   string // of the manifest, in hexadecimal
	Manifest driverfolder.Manifest
}

// Open creates the directory if necessary, takes its lock, and removes what killed processes have
// left. The error wraps statefile.ErrLocked if another process has the lock. step is called before
// and after each change of the disk; tests end the process there.
func Open(path string, step func(name string)) (*Store, error) {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, fmt.Errorf("create the directory of the drivers: %w", err)
	}
	unlock, err := statefile.LockFolder(path)
	if err != nil {
		return nil, err
	}
	s := &Store{path, unlock, step}
	if err := errors.Join(s.check(), s.sweep(), s.sweepArchives()); err != nil {
		unlock()
		return nil, err
	}
	return s, nil
}

// Close releases the lock.
func (s *Store) Close() { s.unlock() }

// Path returns the path of a driver's folder, which need not exist.
func (s *Store) Path(digest string) string { return filepath.Join(s.path, digest) }

// check returns an error if another user could change the drivers: the kernel loads them.
func (s *Store) check() error {
	info, err := os.Stat(s.path)
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(owner.Uid) != os.Geteuid() || info.Mode()&0o022 != 0 {
		return fmt.Errorf("%s must belong to the user of gpu-driver, and nobody else may write to it: it has the "+
			"mode %v; chown root %s && chmod 755 %s", s.path, info.Mode(), s.path, s.path)
	}
	return nil
}

// sweep removes what killed processes have left.
func (s *Store) sweep() error {
	entries, err := os.ReadDir(s.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), temporarySuffix) {
			if err := os.RemoveAll(filepath.Join(s.path, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Folders returns the driver folders of the directory in the order of their digests. A link, and a
// folder whose name is not its digest, are no driver folders.
func (s *Store) Folders() ([]Folder, error) {
	entries, err := os.ReadDir(s.path)
	if err != nil {
		return nil, err
	}
	var all []Folder
	for _, e := range entries {
		if f, err := s.Folder(e.Name()); err == nil {
			all = append(all, f)
		}
	}
	return all, nil
}

// Folder returns a driver folder of the directory. The error wraps fs.ErrNotExist if there is none.
func (s *Store) Folder(digest string) (Folder, error) {
	if !driverfolder.IsDigest(digest) {
		return Folder{}, fmt.Errorf("%.80q is not a SHA-256 digest in hexadecimal", digest)
	}
	f, err := read(s.Path(digest))
	if err == nil && f.Digest != digest {
		err = fmt.Errorf("%s has the manifest of another folder", f.Path)
	}
	return f, err
}

// read returns the driver folder at a path. It does not follow a link.
func read(path string) (Folder, error) {
	if info, err := os.Lstat(path); err != nil {
		return Folder{}, err
	} else if !info.IsDir() {
		return Folder{}, fmt.Errorf("%s is not a folder", path)
	}
	m, digest, err := driverfolder.Read(os.DirFS(path))
	if err != nil {
		return Folder{}, fmt.Errorf("%s: %w", path, err)
	}
	return Folder{path, digest, m}, nil
}

// Find returns the driver folders among the folders of a path, such as image volumes, in the order of
// their names. The errors name folders that have a manifest and cannot be used.
func Find(sources string) ([]Folder, error) {
	entries, err := os.ReadDir(sources)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var all []Folder
	for _, e := range entries {
		f, problem := read(filepath.Join(sources, e.Name()))
		switch {
		case problem == nil:
			all = append(all, f)
		case e.IsDir() && !errors.Is(problem, fs.ErrNotExist):
			err = errors.Join(err, problem)
		}
	}
	return all, err
}

// Current returns the digest that the link names; empty without a link.
func (s *Store) Current() (string, error) {
	target, err := os.Readlink(s.Path(driverapi.Current))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("%s is not a link: remove it: %w", s.Path(driverapi.Current), err)
	case !driverfolder.IsDigest(target):
		return "", fmt.Errorf("%s is a link to %.80q, which is no driver folder: remove it",
			s.Path(driverapi.Current), target)
	}
	return target, nil
}

// SetCurrent lets the link name a folder, or removes it if digest is empty. After a power cut it
// names the former folder or this one.
func (s *Store) SetCurrent(digest string) error {
	if now, err := s.Current(); err == nil && now == digest {
		return nil
	}
	if digest != "" {
		return s.link(driverapi.Current, digest)
	}
	s.step("before the link " + driverapi.Current)
	if err := statefile.Remove(s.Path(driverapi.Current)); err != nil {
		return err
	}
	s.step("after the link " + driverapi.Current)
	return driverfolder.Sync(s.path)
}

// link lets a link of the directory name a folder. After a power cut it names the former folder or
// this one.
func (s *Store) link(name, digest string) error {
	s.step("before the link " + name)
	temporary := s.temporary(name)
	if err := os.Symlink(digest, temporary); err != nil {
		return err
	}
	s.step("before the rename of the link " + name)
	if err := os.Rename(temporary, s.Path(name)); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	s.step("after the link " + name)
	return driverfolder.Sync(s.path)
}

// Prune removes the folders that were placed first until two are left. It removes none of the given ones,
// and none whose files a process has mapped, according to the processes below /proc in the node's root.
func (s *Store) Prune(root fs.FS, digests ...string) error {
	const most = 2
	folders, err := s.Folders()
	if err != nil || len(folders) <= most {
		return err
	}
	number := len(folders)
	others := slices.DeleteFunc(folders, func(f Folder) bool { return slices.Contains(digests, f.Digest) })
	slices.SortStableFunc(others, func(a, b Folder) int { return placed(a).Compare(placed(b)) })
	for _, f := range others {
		if number <= most {
			return nil
		}
		if isUsed(root, f) {
			continue
		}
		if err := s.remove(f); err != nil {
			return err
		}
		number--
	}
	return nil
}

// remove removes a folder. A folder that is partly removed has no digest as its name.
func (s *Store) remove(f Folder) error {
	temporary := s.temporary(f.Digest)
	s.step("before the removal of a folder")
	if err := os.Rename(f.Path, temporary); err != nil {
		return err
	}
	s.step("after the removal of a folder")
	return errors.Join(s.sweepArchives(), driverfolder.Sync(s.path), os.RemoveAll(temporary))
}

func (s *Store) temporary(name string) string {
	return filepath.Join(s.path, "."+name+"."+rand.Text()+temporarySuffix)
}
