// Package driverpack writes driver folders and images out of NVIDIA's .run files, and builds kernel
// modules. The program gpu-driver uses the package, on a machine of the user and not on a node.
//
// A .run file is a shell script followed by a compressed archive. The package reads the archive and
// executes nothing of the file, except in BuildModules. Packing is therefore safe for a file of
// unknown content, and works for drivers of another architecture.
package driverpack

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// Options are the parameters of Pack.
type Options struct {
	Run    string // path of the .run file
	SHA256 string // digest of the .run file, in lower-case hexadecimal
	// Modules are the kernel modules for the folder, in any order; may be empty.
	Modules []Modules
	// Folder is the path of the new driver folder, Image the path of the new OCI image layout, and Archive
	// the path of the new tar archive, which is compressed with gzip. Empty paths are not written, and at
	// least one is not empty. Nothing may exist at the paths.
	Folder, Image, Archive string
}

// A Result describes what a call of Pack has written.
type Result struct {
	Manifest driverfolder.Manifest
	Digest   string // SHA-256 of the manifest, in hexadecimal
	Image    string // digest of the image, such as sha256:…; empty if there is none
	Archive  string // SHA-256 of the archive, in hexadecimal; empty if there is none
	// Compat32 is the number of files of the .run file for 32-bit programs. They are left out.
	Compat32 int
}

// LeftOut returns a sentence about the files that a user may miss; empty if there are none.
func (r Result) LeftOut() string {
	if r.Compat32 == 0 {
		return ""
	}
	return fmt.Sprintf("left out are the files for 32-bit programs such as Steam: %d. 64-bit programs need none of "+
		"them", r.Compat32)
}

// Pack writes a driver folder, an image and an archive of the folder, as Options says. Each is at its
// place as a whole or not at all, even if the process is killed.
func Pack(ctx context.Context, o Options) (result Result, err error) {
	if o.Folder == "" && o.Image == "" && o.Archive == "" {
		return Result{}, errors.New("neither a folder nor an image nor an archive is wanted")
	}
	run, err := openRun(ctx, o.Run, o.SHA256)
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = run.file.Close() }() // only read
	work, err := stage(filepath.Clean(cmp.Or(o.Folder, o.Image, o.Archive)))
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, work.close()) }()
	var images *staging // for the image; nil without an image
	if o.Image != "" {
		if images, err = stage(filepath.Clean(o.Image)); err != nil {
			return Result{}, err
		}
		defer func() { err = errors.Join(err, images.close()) }()
	}
	var archives *staging // for the archive; nil without an archive
	if o.Archive != "" {
		if archives, err = stage(filepath.Clean(o.Archive)); err != nil {
			return Result{}, err
		}
		defer func() { err = errors.Join(err, archives.close()) }()
	}
	b, err := newBuilder(ctx, work.path, run, o.SHA256)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.build(run, o.Modules); err != nil {
		return Result{}, err
	}
	result.Manifest, result.Digest, result.Compat32 = b.manifest, b.digest, b.compat32
	if images != nil {
		if result.Image, err = writeImage(ctx, b.folder, b.manifest, filepath.Join(images.path, "image")); err != nil {
			return Result{}, err
		}
		if err := images.publish("image", filepath.Clean(o.Image)); err != nil {
			return Result{}, err
		}
	}
	if archives != nil {
		file := filepath.Join(archives.path, "archive")
		if result.Archive, err = writeArchive(ctx, b.folder, b.manifest, file); err != nil {
			return Result{}, err
		}
		if err := archives.publish("archive", filepath.Clean(o.Archive)); err != nil {
			return Result{}, err
		}
	}
	if o.Folder != "" {
		if err := work.publish("folder", filepath.Clean(o.Folder)); err != nil {
			return Result{}, err
		}
	}
	return result, nil
}

// A builder builds a driver folder in a staging.
type builder struct {
	ctx      context.Context //nolint:containedctx // of one call of Pack
	work     *os.Root        // the staging, with the folders archive and folder
	folder   *os.Root
	manifest driverfolder.Manifest
	digest   string // of the manifest
	compat32 int    // number of 32-bit files that are left out
}

func newBuilder(ctx context.Context, staging string, run *runFile, digest string) (*builder, error) {
	work, err := os.OpenRoot(staging)
	if err != nil {
		return nil, err
	}
	b := &builder{ctx: ctx, work: work, manifest: driverfolder.Manifest{
		Schema: driverfolder.Schema, Version: run.version, Architecture: run.architecture, Source: digest,
	}}
	if err = work.Mkdir("folder", 0o755); err == nil {
		b.folder, err = work.OpenRoot("folder")
	}
	if err != nil {
		return nil, errors.Join(err, work.Close())
	}
	return b, nil
}

func (b *builder) close() error { return errors.Join(b.folder.Close(), b.work.Close()) }

// build fills the folder, and writes the manifest last.
func (b *builder) build(run *runFile, modules []Modules) error {
	if err := b.work.Mkdir("archive", 0o700); err != nil {
		return err
	}
	archive, err := b.work.OpenRoot("archive")
	if err != nil {
		return err
	}
	defer func() { _ = archive.Close() }() // a folder
	if err := run.extract(b.ctx, archive); err != nil {
		return err
	}
	text, err := archive.ReadFile(".manifest")
	if err != nil {
		return errors.New("the archive of the .run file has no .manifest: it is not a driver of NVIDIA")
	}
	entries, compat32, err := layOut(text, b.manifest.Version, b.manifest.Architecture)
	if err != nil {
		return err
	}
	b.compat32 = compat32
	if err := b.placeAll(entries); err != nil {
		return err
	}
	if err := b.checkLibraries(); err != nil {
		return err
	}
	if err := b.work.RemoveAll("archive"); err != nil {
		return err
	}
	for _, set := range modules {
		if err := b.addModules(set); err != nil {
			return err
		}
	}
	slices.SortFunc(b.manifest.Kernels, func(x, y driverfolder.Kernel) int { return cmp.Compare(x.Release, y.Release) })
	return b.writeManifest()
}

// placeAll links the files of the archive to their places in the folder.
func (b *builder) placeAll(entries []entry) error {
	placed := map[string]entry{}
	for _, e := range entries {
		if other, again := placed[e.to]; again {
			if other != e {
				return fmt.Errorf(".manifest has two files for %s", e.to)
			}
			continue
		}
		placed[e.to] = e
		if err := b.folder.MkdirAll(path.Dir(e.to), 0o755); err != nil {
			return fmt.Errorf("%s: %w", e.to, err)
		}
		atStep()
		if e.link != "" {
			if err := b.folder.Symlink(e.link, e.to); err != nil {
				return err
			}
			continue
		}
		err := b.work.Link("archive/"+e.from, "folder/"+e.to)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf(".manifest has the file %s, which the archive of the .run file does not have", e.from)
		}
		if err == nil {
			err = b.folder.Chmod(e.to, e.mode)
		}
		if err != nil {
			return err
		}
	}
	for _, e := range entries {
		if _, err := b.folder.Stat(e.to); e.link != "" && err != nil {
			return fmt.Errorf("the link %s of .manifest leads to %s, which the folder does not have", e.to, e.link)
		}
	}
	return nil
}

// writeManifest reads the digests of all files, and writes the manifest. The files are on the disk
// before.
func (b *builder) writeManifest() error {
	err := fs.WalkDir(b.folder.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			return b.folder.Chmod(name, 0o755) // whatever the umask
		}
		f, err := b.describe(name, e)
		b.manifest.Files = append(b.manifest.Files, f)
		return err
	})
	if err != nil {
		return err
	}
	slices.SortFunc(b.manifest.Files, func(x, y driverfolder.File) int { return cmp.Compare(x.Path, y.Path) })
	text, err := b.manifest.Encode()
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	b.digest = hex.EncodeToString(sum[:])
	atStep()
	f, err := b.folder.OpenFile(driverfolder.ManifestName, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
}

// describe returns an entry of the folder as the manifest has it, and writes a file to the disk.
func (b *builder) describe(name string, e fs.DirEntry) (driverfolder.File, error) {
	if e.Type() == fs.ModeSymlink {
		target, err := b.folder.Readlink(name)
		return driverfolder.File{Path: name, Link: target}, err
	}
	f, err := b.folder.Open(name)
	if err != nil {
		return driverfolder.File{}, err
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return driverfolder.File{}, err
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, driverfolder.Reader(b.ctx, f)); err != nil {
		return driverfolder.File{}, err
	}
	return driverfolder.File{
		Path: name, Mode: fmt.Sprintf("%04o", info.Mode().Perm()), Size: info.Size(),
		SHA256: hex.EncodeToString(hash.Sum(nil)),
	}, f.Sync()
}
