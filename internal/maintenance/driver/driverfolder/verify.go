package driverfolder

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
	"slices"
	"strings"
)

// maxProblems limits the problems that Verify lists.
const maxProblems = 20

// Verify compares a driver folder with its manifest: the type, mode, size and digest of every file,
// and the target of every link. Additional files and folders are problems as well. Verify follows no
// link out of the folder. The results are the manifest and the digest of the manifest. The error lists
// the first problems, one on each line.
func Verify(ctx context.Context, folder string) (Manifest, string, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return Manifest{}, "", err
	}
	defer func() { _ = root.Close() }() // only read
	m, digest, err := Read(root.FS())
	if err != nil {
		return Manifest{}, "", err
	}
	listed := map[string]File{}
	folders := map[string]bool{".": true}
	for _, f := range m.Files {
		listed[f.Path] = f
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			folders[dir] = true
		}
	}
	var problems []error
	found := map[string]bool{}
	report := func(name, problem string) error {
		if problem != "" {
			problems = append(problems, fmt.Errorf("%s: %s", name, problem))
		}
		if len(problems) >= maxProblems {
			return fs.SkipAll
		}
		return nil
	}
	err = fs.WalkDir(root.FS(), ".", func(name string, entry fs.DirEntry, err error) error {
		f, isListed := listed[name]
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return report(name, withoutPath(err).Error())
		case name == ManifestName:
			return nil
		case isListed:
			found[name] = true
			return report(name, compare(ctx, root, f, entry))
		case folders[name] && !entry.IsDir():
			return report(name, "is "+kindOf(entry.Type())+" where a folder should be")
		case folders[name]:
			return nil
		}
		if problem := report(name, "is not in the manifest"); problem != nil || !entry.IsDir() {
			return problem
		}
		return fs.SkipDir // one line for a whole folder
	})
	if err != nil {
		return Manifest{}, "", err
	}
	for _, f := range m.Files {
		if len(problems) < maxProblems && !found[f.Path] {
			_ = report(f.Path, "is missing")
		}
	}
	if len(problems) > 0 {
		return Manifest{}, "", fmt.Errorf("the folder differs from its manifest:\n%w", errors.Join(problems...))
	}
	return m, digest, nil
}

// compare returns how an entry of the folder differs from the manifest; empty if it does not.
func compare(ctx context.Context, root *os.Root, f File, entry fs.DirEntry) string {
	if f.Link != "" {
		target, err := root.Readlink(f.Path)
		switch {
		case entry.Type() != fs.ModeSymlink:
			return "is " + kindOf(entry.Type()) + ", and should be a link"
		case err != nil:
			return withoutPath(err).Error()
		case target != f.Link:
			return fmt.Sprintf("is a link to %q, and should be a link to %q", target, f.Link)
		}
		return ""
	}
	if !entry.Type().IsRegular() {
		return "is " + kindOf(entry.Type()) + ", and should be a regular file"
	}
	file, err := root.Open(f.Path)
	if err != nil {
		return withoutPath(err).Error()
	}
	defer func() { _ = file.Close() }() // only read
	info, err := file.Stat()
	switch {
	case err != nil:
		return withoutPath(err).Error()
	case info.Size() != f.Size:
		return fmt.Sprintf("has %d bytes, and should have %d", info.Size(), f.Size)
	case info.Mode() != f.Permissions():
		return fmt.Sprintf("has the mode %v, and should have %v", info.Mode(), f.Permissions())
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, Reader(ctx, file)); err != nil {
		return "cannot be read: " + withoutPath(err).Error()
	}
	if digest := hex.EncodeToString(hash.Sum(nil)); digest != f.SHA256 {
		return "has the digest " + digest + ", and should have " + f.SHA256
	}
	return ""
}

// Kinds of entries, as Verify names them.
var kinds = []struct {
	bit  fs.FileMode
	name string
}{
	{fs.ModeDir, "a folder"}, {fs.ModeSymlink, "a link"}, {fs.ModeNamedPipe, "a named pipe"},
	{fs.ModeSocket, "a socket"}, {fs.ModeDevice, "a device"},
}

func kindOf(mode fs.FileMode) string {
	for _, k := range kinds {
		if mode&k.bit != 0 {
			return k.name
		}
	}
	return "a regular file"
}

// Reader returns a reader that ends with the error of ctx.
func Reader(ctx context.Context, r io.Reader) io.Reader { return &interruptible{ctx, r} }

type interruptible struct {
	ctx context.Context //nolint:containedctx // of one call
	r   io.Reader
}

func (i *interruptible) Read(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.r.Read(p)
}

// Releases returns the releases of the manifest's kernels, in order.
func (m Manifest) Releases() []string {
	all := make([]string, 0, len(m.Kernels))
	for _, k := range m.Kernels {
		all = append(all, k.Release)
	}
	return all
}

// HasKernel reports whether the folder has modules for the release of a kernel.
func (m Manifest) HasKernel(release string) bool { return slices.Contains(m.Releases(), release) }

// ModuleFiles returns the files of a kernel's modules.
func (m Manifest) ModuleFiles(release string) []File {
	var all []File
	for _, f := range m.Files {
		if strings.HasPrefix(f.Path, ModuleFolder(release)+"/") {
			all = append(all, f)
		}
	}
	return all
}
