// Package driverfolder is the format of a driver folder: the user space of one NVIDIA driver as
// NVIDIA's installer would lay it out, kernel modules for any number of kernels, and a manifest with
// the digest of every file. Package driverpack writes such folders.
package driverfolder

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	// ManifestName is the path of the manifest in a driver folder.
	ManifestName = "manifest.json"
	// Schema is the version of the format that this package reads and writes.
	Schema = 1

	// MaxManifest limits the manifest's file, in bytes.
	MaxManifest = 16 << 20
)

// A Manifest describes a driver folder. The digest of the manifest identifies the whole folder,
// because the manifest has the digest of every other file.
type Manifest struct {
	Schema       int    `json:"schemaVersion"`
	Version      string `json:"driverVersion"` // such as 580.95.05
	Architecture string `json:"architecture"`  // amd64 or arm64
	// Source is the SHA-256 digest of NVIDIA's .run file, in hexadecimal.
	Source  string   `json:"runSHA256"`
	Kernels []Kernel `json:"kernels,omitempty"` // in the order of their releases
	Files   []File   `json:"files"`             // in the order of their paths
}

// A Kernel is a kernel for which the folder has the driver's modules, in ModuleFolder.
type Kernel struct {
	Release  string `json:"release"`          // as uname -r prints it
	Open     bool   `json:"open"`             // open kernel modules; false for proprietary ones
	Vermagic string `json:"vermagic"`         // of the module nvidia
	Signed   bool   `json:"signed"`           // all modules are signed, or none
	Signer   string `json:"signer,omitempty"` // of the module nvidia; empty if its signature does not tell it
}

// A File is a regular file or a symbolic link.
type File struct {
	// Path is relative to the folder, with slashes.
	Path string `json:"path"`
	// Mode has the permissions of a regular file in octal, such as 0755; empty for a link.
	Mode string `json:"mode,omitempty"`
	Size int64  `json:"size,omitempty"` // of a regular file, in bytes
	// SHA256 is the digest of a regular file in hexadecimal; empty for a link.
	SHA256 string `json:"sha256,omitempty"`
	// Link is the relative target of a symbolic link; empty for a regular file.
	Link string `json:"link,omitempty"`
}

// ModuleFolder returns the path of a kernel's modules in a driver folder.
func ModuleFolder(release string) string { return "lib/modules/" + release }

// Permissions returns the mode of a regular file.
func (f File) Permissions() fs.FileMode {
	mode, _ := strconv.ParseUint(f.Mode, 8, 9) // check has found no error
	return fs.FileMode(mode)
}

// Encode returns the content of the manifest's file. The same manifest has the same content.
func (m Manifest) Encode() ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", ManifestName, err)
	}
	text, err := json.MarshalIndent(m, "", " ")
	return append(text, '\n'), err
}

// Read returns the manifest of a driver folder, and the SHA-256 digest of the manifest in
// hexadecimal. The error is fs.ErrNotExist if the folder has none. Read does not look at the other
// files.
func Read(folder fs.FS) (m Manifest, digest string, err error) {
	if info, err := fs.Lstat(folder, ManifestName); err != nil {
		return Manifest{}, "", fmt.Errorf("%s: %w", ManifestName, withoutPath(err))
	} else if !info.Mode().IsRegular() {
		return Manifest{}, "", errors.New(ManifestName + ": not a regular file")
	}
	f, err := folder.Open(ManifestName)
	if err != nil {
		return Manifest{}, "", fmt.Errorf("%s: %w", ManifestName, withoutPath(err))
	}
	defer func() { _ = f.Close() }() // only read
	text, err := io.ReadAll(io.LimitReader(f, MaxManifest+1))
	if err != nil {
		return Manifest{}, "", fmt.Errorf("%s: %w", ManifestName, withoutPath(err))
	}
	return Decode(text)
}

// Decode returns the manifest that Encode has written, and its SHA-256 digest in hexadecimal.
func Decode(text []byte) (m Manifest, digest string, err error) {
	if len(text) > MaxManifest {
		return Manifest{}, "", fmt.Errorf("%s: larger than %d bytes", ManifestName, MaxManifest)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&m); err != nil {
		return Manifest{}, "", fmt.Errorf("%s: not JSON of a driver folder: %w", ManifestName, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Manifest{}, "", errors.New(ManifestName + ": text after the end of the JSON object")
	}
	if err := m.check(); err != nil {
		return Manifest{}, "", fmt.Errorf("%s: %w", ManifestName, err)
	}
	sum := sha256.Sum256(text)
	return m, hex.EncodeToString(sum[:]), nil
}

var (
	version = regexp.MustCompile(`^\d{3,4}\.\d{1,4}(\.\d{1,4})?$`)
	release = regexp.MustCompile(`^\d[0-9A-Za-z._+~-]{0,127}$`)
	digests = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// IsVersion reports whether text is the version of a driver, such as 580.95.05.
func IsVersion(text string) bool { return version.MatchString(text) }

// IsRelease reports whether text is the release of a kernel, such as 6.8.0-90-generic. A release is
// also a valid name of a folder.
func IsRelease(text string) bool { return release.MatchString(text) }

// IsDigest reports whether text is a SHA-256 digest in lower-case hexadecimal.
func IsDigest(text string) bool { return digests.MatchString(text) }

// check returns what is wrong with the manifest. After check has returned nil, every path is inside
// the folder, no path is used twice or as a folder, and every link stays inside the folder.
func (m Manifest) check() error {
	switch {
	case m.Schema != Schema:
		return fmt.Errorf("schemaVersion %d is unknown: this program knows version %d", m.Schema, Schema)
	case !IsVersion(m.Version):
		return fmt.Errorf("driverVersion %.40q is not the version of a driver", m.Version)
	case m.Architecture != "amd64" && m.Architecture != "arm64":
		return fmt.Errorf("architecture %.40q is neither amd64 nor arm64", m.Architecture)
	case !IsDigest(m.Source):
		return fmt.Errorf("runSHA256 %.80q is not a digest", m.Source)
	}
	files := map[string]bool{} // path → it is a file; false for a folder
	for i, f := range m.Files {
		if err := f.check(); err != nil {
			return err
		}
		if i > 0 && m.Files[i-1].Path >= f.Path {
			return fmt.Errorf("%s is named twice or not in order", f.Path)
		}
		files[f.Path] = true
	}
	for _, f := range m.Files {
		for folder := path.Dir(f.Path); folder != "."; folder = path.Dir(folder) {
			if files[folder] {
				return fmt.Errorf("%s is a file, and the folder of %s", folder, f.Path)
			}
		}
	}
	for i, k := range m.Kernels {
		if !IsRelease(k.Release) {
			return fmt.Errorf("%.80q is not the release of a kernel", k.Release)
		}
		if i > 0 && m.Kernels[i-1].Release >= k.Release {
			return fmt.Errorf("kernel %s is named twice or not in order", k.Release)
		}
		folder := ModuleFolder(k.Release) + "/"
		if !slices.ContainsFunc(m.Files, func(f File) bool { return strings.HasPrefix(f.Path, folder) }) {
			return fmt.Errorf("kernel %s has no files in %s", k.Release, folder)
		}
	}
	return nil
}

func (f File) check() error {
	switch {
	case !fs.ValidPath(f.Path) || f.Path == "." || f.Path == ManifestName || len(f.Path) > 1024 ||
		strings.ContainsFunc(f.Path, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\\' }):
		return fmt.Errorf("%.80q is not a path inside the folder", f.Path)
	case f.Link != "":
		if f.Mode != "" || f.Size != 0 || f.SHA256 != "" {
			return fmt.Errorf("%s is a link, and has a mode, a size or a digest", f.Path)
		}
		if !staysInside(f.Path, f.Link) {
			return fmt.Errorf("the link %s leads out of the folder: %.80q", f.Path, f.Link)
		}
		return nil
	case !IsDigest(f.SHA256):
		return fmt.Errorf("the digest of %s is not a SHA-256 digest: %.80q", f.Path, f.SHA256)
	case f.Size < 0:
		return fmt.Errorf("the size of %s is %d", f.Path, f.Size)
	}
	mode, err := strconv.ParseUint(f.Mode, 8, 32)
	if err != nil || mode > 0o777 || f.Mode != fmt.Sprintf("%04o", mode) {
		return fmt.Errorf("the mode of %s is not like 0755: %.20q", f.Path, f.Mode)
	}
	return nil
}

// staysInside reports whether a relative link never leaves the folder, step by step.
func staysInside(at, target string) bool {
	if path.IsAbs(target) || strings.ContainsRune(target, 0) {
		return false
	}
	depth := strings.Count(at, "/")
	for step := range strings.SplitSeq(target, "/") {
		switch step {
		case "", ".":
		case "..":
			if depth--; depth < 0 {
				return false
			}
		default:
			depth++
		}
	}
	return true
}

// withoutPath returns an error without the path, which the caller names.
func withoutPath(err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	return err
}
