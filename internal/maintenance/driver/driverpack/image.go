package driverpack

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"os"
	"path"
	"path/filepath"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// Types of the OCI image specification 1.1.
const (
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeIndex    = "application/vnd.oci.image.index.v1+json"
)

// A descriptor names a blob of an image.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// writeImage writes an OCI image layout with one image to a new folder, and returns the digest of the
// image. The image has one layer: the driver folder, owned by root and without times. The same
// driver folder gives the same image.
func writeImage(ctx context.Context, folder *os.Root, m driverfolder.Manifest, to string) (string, error) {
	blobs := filepath.Join(to, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return "", err
	}
	layer, unpacked, err := writeLayer(ctx, folder, m, blobs)
	if err != nil {
		return "", err
	}
	const created = "1970-01-01T00:00:00Z" // an image of the same folder is the same image
	config, err := writeJSON(blobs, typeConfig, map[string]any{
		"created": created, "architecture": m.Architecture, "os": "linux", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{unpacked}},
	})
	if err != nil {
		return "", err
	}
	image, err := writeJSON(blobs, typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": config, "layers": []descriptor{layer},
		"annotations": map[string]string{
			"org.opencontainers.image.title":   "NVIDIA driver " + m.Version,
			"org.opencontainers.image.version": m.Version,
		},
	})
	if err != nil {
		return "", err
	}
	digest := image.Digest
	image.Platform = &platform{m.Architecture, "linux"}
	image.Annotations = map[string]string{"org.opencontainers.image.ref.name": m.Version}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{image},
	})
	if err != nil {
		return "", err
	}
	return digest, errors.Join(
		writeFile(filepath.Join(to, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		writeFile(filepath.Join(to, "index.json"), index))
}

// writeJSON writes a value as a blob.
func writeJSON(blobs, mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value) // with the keys of maps in order
	if err != nil {
		return descriptor{}, err
	}
	sum := sha256.Sum256(text)
	name := hex.EncodeToString(sum[:])
	return descriptor{MediaType: mediaType, Digest: "sha256:" + name, Size: int64(len(text))},
		writeFile(filepath.Join(blobs, name), text)
}

func writeFile(name string, content []byte) error {
	atStep()
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Sync(), f.Close())
}

// writeLayer writes the driver folder as a layer, and returns the digest of its tar archive as well.
func writeLayer(ctx context.Context, folder *os.Root, m driverfolder.Manifest, blobs string) (
	_ descriptor, unpacked string, err error,
) {
	file := filepath.Join(blobs, "layer")
	compressed, content, err := writeCompressed(ctx, folder, m, file)
	if err != nil {
		return descriptor{}, "", err
	}
	digest := compressed.digest()
	return descriptor{MediaType: typeLayer, Digest: "sha256:" + digest, Size: compressed.size},
		"sha256:" + content.digest(), os.Rename(file, filepath.Join(blobs, digest))
}

// writeArchive writes the driver folder as a tar archive with gzip, and returns its digest in
// hexadecimal. It has the same bytes as the layer of an image.
func writeArchive(ctx context.Context, folder *os.Root, m driverfolder.Manifest, file string) (string, error) {
	compressed, _, err := writeCompressed(ctx, folder, m, file)
	if err != nil {
		return "", err
	}
	return compressed.digest(), nil
}

// writeCompressed writes the driver folder as a tar archive with gzip to a new file. It returns the
// counters of the file and of the tar archive.
func writeCompressed(ctx context.Context, folder *os.Root, m driverfolder.Manifest, file string) (
	compressed, content *counter, err error,
) {
	atStep()
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, nil, err
	}
	compressed = &counter{hash: sha256.New(), to: f}
	packer := gzip.NewWriter(compressed)
	content = &counter{hash: sha256.New(), to: packer}
	err = writeTar(ctx, folder, m, content)
	err = errors.Join(err, packer.Close(), f.Chmod(0o644), f.Sync(), f.Close())
	atStep()
	return compressed, content, err
}

// writeTar writes the driver folder as a tar archive. Each folder comes before its files.
func writeTar(ctx context.Context, folder *os.Root, m driverfolder.Manifest, to io.Writer) error {
	archive := tar.NewWriter(to)
	written := map[string]bool{".": true}
	var addFolder func(name string) error
	addFolder = func(name string) error {
		if written[name] {
			return nil
		}
		written[name] = true
		if err := addFolder(path.Dir(name)); err != nil {
			return err
		}
		return archive.WriteHeader(&tar.Header{
			Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, Format: tar.FormatPAX,
		})
	}
	text, err := m.Encode()
	if err != nil {
		return err
	}
	head := &tar.Header{Typeflag: tar.TypeReg, Name: driverfolder.ManifestName, Mode: 0o644, Size: int64(len(text))}
	if err := archive.WriteHeader(head); err != nil {
		return err
	}
	if _, err := archive.Write(text); err != nil {
		return err
	}
	for _, file := range m.Files {
		if err := addFolder(path.Dir(file.Path)); err != nil {
			return err
		}
		if err := addFile(ctx, folder, file, archive); err != nil {
			return err
		}
	}
	return archive.Close()
}

func addFile(ctx context.Context, folder *os.Root, file driverfolder.File, archive *tar.Writer) error {
	if file.Link != "" {
		return archive.WriteHeader(&tar.Header{
			Typeflag: tar.TypeSymlink, Name: file.Path, Linkname: file.Link, Mode: 0o777, Format: tar.FormatPAX,
		})
	}
	f, err := folder.Open(file.Path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	err = archive.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: file.Path, Mode: int64(file.Permissions()), Size: file.Size, Format: tar.FormatPAX,
	})
	if err == nil {
		_, err = io.Copy(archive, driverfolder.Reader(ctx, f))
	}
	return err
}

// A counter passes content on, and counts and digests it.
type counter struct {
	hash hash.Hash
	to   io.Writer
	size int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.to.Write(p)
	c.hash.Write(p[:n])
	c.size += int64(n)
	return n, err
}

func (c *counter) digest() string { return hex.EncodeToString(c.hash.Sum(nil)) }
