package standinkernel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// An Entry is one of a tar archive. The size is that of the content unless Head has one.
type Entry struct {
	Head    tar.Header
	Content []byte
}

// Entries returns the entries that gpu-driver pack writes for a driver folder.
func Entries(t testing.TB, folder string) []Entry {
	t.Helper()
	read := func(name string) []byte {
		content, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	m, _, err := driverfolder.Read(os.DirFS(folder))
	if err != nil {
		t.Fatal(err)
	}
	all := []Entry{{
		tar.Header{Typeflag: tar.TypeReg, Name: driverfolder.ManifestName, Mode: 0o644},
		read(driverfolder.ManifestName),
	}}
	folders := map[string]bool{".": true}
	var add func(name string)
	add = func(name string) {
		if !folders[name] {
			folders[name] = true
			add(path.Dir(name))
			all = append(all, Entry{Head: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}})
		}
	}
	for _, f := range m.Files {
		add(path.Dir(f.Path))
		if f.Link != "" {
			all = append(all, Entry{Head: tar.Header{Typeflag: tar.TypeSymlink, Name: f.Path, Linkname: f.Link, Mode: 0o777}})
			continue
		}
		all = append(all, Entry{tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: int64(f.Permissions())}, read(f.Path)})
	}
	return all
}

// Tar returns a tar archive.
func Tar(t testing.TB, entries ...Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.Head.Size == 0 {
			e.Head.Size = int64(len(e.Content))
		}
		if err := w.WriteHeader(&e.Head); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(e.Content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Gzip compresses content.
func Gzip(t testing.TB, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Archive returns the archive of a driver folder and its SHA-256 digest.
func Archive(t testing.TB, folder string) (content []byte, digest string) {
	t.Helper()
	content = Gzip(t, Tar(t, Entries(t, folder)...))
	return content, Digest(content)
}

// Digest returns the SHA-256 digest of content in hexadecimal.
func Digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}
