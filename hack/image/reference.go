package image

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
)

// Reference returns the reference of the image in an OCI archive, which has a tag, and the digest by
// which a registry knows the image.
func Reference(archive string) (reference, digest string, err error) {
	file, err := os.Open(archive)
	if err != nil {
		return "", "", fmt.Errorf("open image: %w", err)
	}
	defer func() { _ = file.Close() }()
	for files := tar.NewReader(file); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return "", "", fmt.Errorf("%s has no index.json: it is no OCI archive", archive)
		}
		if err != nil {
			return "", "", fmt.Errorf("read image: %w", err)
		}
		if header.Name != "index.json" {
			continue
		}
		var top index
		if err := json.NewDecoder(files).Decode(&top); err != nil {
			return "", "", fmt.Errorf("read index of image: %w", err)
		}
		if len(top.Manifests) != 1 {
			return "", "", fmt.Errorf("%s has %d images, want 1", archive, len(top.Manifests))
		}
		reference = top.Manifests[0].Annotations["io.containerd.image.name"]
		if !strings.Contains(path.Base(reference), ":") {
			return "", "", fmt.Errorf("%s names no image with a tag: %q", archive, reference)
		}
		return reference, top.Manifests[0].Digest, nil
	}
}
