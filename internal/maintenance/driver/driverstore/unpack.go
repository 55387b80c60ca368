package driverstore

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

const (
	// archiveSuffix is the end of the name of a link that says from which archive a folder is: the link
	// SHA256.archive names the folder.
	archiveSuffix = ".archive"
	// maxUnpacked limits the files of an archive, in bytes. A driver has about 1 GB.
	maxUnpacked = 16 << 30
)

// errNoArchive is the error for a file that gpu-driver pack has not written, such as a .run file.
var errNoArchive = errors.New("it is not an archive of a driver folder: pack it first, with gpu-driver pack " +
	"--archive, and give the URL and the digest of that archive")

// Unpack places the driver folder of an archive: a tar archive, also with gzip, that has the manifest as
// its first file. The caller has compared the archive with sha256, its digest in hexadecimal, which
// Archives then names. Unpack writes nothing that the manifest does not have. progress is called with
// the percentage of unpacked bytes. If the folder is there already, only Archives changes. A failed
// Unpack leaves nothing.
func (s *Store) Unpack(ctx context.Context, archive io.Reader, sha256 string, progress func(percent int)) (
	Folder, error,
) {
	if !driverfolder.IsDigest(sha256) {
		return Folder{}, fmt.Errorf("%.80q is not a SHA-256 digest in hexadecimal", sha256)
	}
	content, err := tarOf(archive)
	if err != nil {
		return Folder{}, err
	}
	m, digest, text, err := readManifest(content)
	if err != nil {
		return Folder{}, err
	}
	f, err := s.install(ctx, m, digest, func(to *os.Root) error {
		c := copying{ctx: ctx, to: to, all: size(m), progress: progress}
		if err := c.unpack(content, m); err != nil {
			return fmt.Errorf("unpack the archive: %w", err)
		}
		return c.write(manifestFile(int64(len(text)), digest), bytes.NewReader(text))
	})
	if err != nil {
		return Folder{}, err
	}
	return f, s.link(sha256+archiveSuffix, digest)
}

// tarOf returns the tar archive of a file, which may be compressed with gzip.
func tarOf(file io.Reader) (*tar.Reader, error) {
	const (
		magicAt = 257
		magic   = "ustar"
		buffer  = 1 << 20
	)
	content := bufio.NewReaderSize(file, buffer)
	if head, _ := content.Peek(2); string(head) == "\x1f\x8b" { // a shorter file is no archive
		unpacked, err := gzip.NewReader(content)
		if err != nil {
			return nil, errNoArchive
		}
		content = bufio.NewReaderSize(unpacked, buffer)
	}
	if head, _ := content.Peek(magicAt + len(magic)); !bytes.HasSuffix(head, []byte(magic)) {
		return nil, errNoArchive
	}
	return tar.NewReader(content), nil
}

// readManifest reads the first file of an archive.
func readManifest(archive *tar.Reader) (m driverfolder.Manifest, digest string, text []byte, err error) {
	head, err := archive.Next()
	switch {
	case err != nil:
		return m, "", nil, fmt.Errorf("read the archive: %w", err)
	case head.Typeflag != tar.TypeReg || head.Name != driverfolder.ManifestName:
		return m, "", nil, fmt.Errorf("the first entry is %.80q, and not %s: %w", head.Name, driverfolder.ManifestName,
			errNoArchive)
	}
	if text, err = io.ReadAll(io.LimitReader(archive, driverfolder.MaxManifest+1)); err != nil {
		return m, "", nil, fmt.Errorf("read the archive: %w", err)
	}
	if m, digest, err = driverfolder.Decode(text); err != nil {
		return m, "", nil, err
	}
	left := int64(maxUnpacked)
	for _, f := range m.Files {
		if f.Size > left { // without a sum, which may overflow
			return m, "", nil, fmt.Errorf("the files of the archive have more than %d GB", int64(maxUnpacked)>>30)
		}
		left -= f.Size
	}
	return m, digest, text, nil
}

// unpack writes the entries of an archive after the manifest. It refuses those which the manifest does
// not have as they are, so that no entry leads out of the folder.
func (c *copying) unpack(archive *tar.Reader, m driverfolder.Manifest) error {
	missing := map[string]driverfolder.File{}
	folders := map[string]bool{}
	for _, f := range m.Files {
		missing[f.Path] = f
		for folder := path.Dir(f.Path); folder != "."; folder = path.Dir(folder) {
			folders[folder] = true
		}
	}
	for {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil // driverfolder.Verify names what is missing
		}
		if err != nil {
			return err
		}
		f, isMissing := missing[head.Name]
		switch folder := strings.TrimSuffix(head.Name, "/"); {
		case head.Typeflag == tar.TypeDir && folders[folder]:
			delete(folders, folder) // it may be there once
			continue
		case !isMissing:
			return fmt.Errorf("the entry %.80q is there twice, or is not in the manifest", head.Name)
		case f.Link != "" && head.Typeflag == tar.TypeSymlink && head.Linkname == f.Link:
			err = c.link(f)
		case f.Link == "" && head.Typeflag == tar.TypeReg && head.Size == f.Size:
			err = c.write(f, archive)
		default:
			return fmt.Errorf("the entry %.80q has another type, size or target than in the manifest", head.Name)
		}
		if err != nil {
			return err
		}
		delete(missing, head.Name)
	}
}

// Archives returns the digests of the archives from which the folders of the directory are, by the
// digest of the folder.
func (s *Store) Archives() map[string][]string {
	all := map[string][]string{}
	entries, _ := os.ReadDir(s.path) // an unreadable directory has none
	for _, e := range entries {
		archive, isLink := strings.CutSuffix(e.Name(), archiveSuffix)
		if !isLink || !driverfolder.IsDigest(archive) {
			continue
		}
		if digest, err := os.Readlink(s.Path(e.Name())); err == nil && driverfolder.IsDigest(digest) {
			all[digest] = append(all[digest], archive)
		}
	}
	return all
}

// sweepArchives removes the links of Archives whose folders are gone.
func (s *Store) sweepArchives() error {
	for digest, archives := range s.Archives() {
		if _, err := os.Lstat(s.Path(digest)); !statefile.IsAbsent(err) {
			continue
		}
		for _, archive := range archives {
			if err := statefile.Remove(s.Path(archive + archiveSuffix)); err != nil {
				return err
			}
		}
	}
	return nil
}
