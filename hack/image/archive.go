package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// layer gathers one layer of an image.
type layer struct {
	content bytes.Buffer
	tar     *tar.Writer
}

func newLayer() *layer {
	l := &layer{}
	l.tar = tar.NewWriter(&l.content)
	return l
}

// addTree adds everything below folder, to be found below destination.
func (l *layer) addTree(folder, destination string) error {
	return filepath.WalkDir(folder, func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(folder, name)
		if err != nil || relative == "." {
			return err
		}
		return l.add(name, path.Join(destination, filepath.ToSlash(relative)))
	})
}

// add adds one file or folder; destination is a path in the image. Everything belongs to root.
func (l *layer) add(file, destination string) error {
	info, err := os.Lstat(file)
	if err != nil {
		return err
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(file); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	header.Name = strings.TrimPrefix(destination, "/")
	header.Uid, header.Gid, header.Uname, header.Gname = 0, 0, "", ""
	header.ModTime = time.Unix(0, 0)
	if err := l.tar.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
		return err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	_, err = l.tar.Write(content)
	return err
}

// settings is the part of an image's configuration that containers are started with.
type settings struct {
	Env        []string          `json:",omitempty"`
	Entrypoint []string          `json:",omitempty"`
	Labels     map[string]string `json:",omitempty"`
}

// The media types of the OCI image specification.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// descriptor says where content is, and what.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type config struct {
	platform
	Config settings `json:"config"`
	RootFS rootFS   `json:"rootfs"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

// layout is an OCI image layout in a tar archive. The same images give the same bytes.
type layout struct {
	tar   *tar.Writer
	names map[string]bool // that are in the archive
}

func (l *layout) file(name string, content []byte) error {
	if l.names[name] {
		return nil
	}
	l.names[name] = true
	if err := l.tar.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := l.tar.Write(content)
	return err
}

// blob adds content, and returns what describes it.
func (l *layout) blob(mediaType string, content []byte) (descriptor, error) {
	d := descriptor{MediaType: mediaType, Digest: digest(content), Size: len(content)}
	return d, l.file("blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:"), content)
}

func (l *layout) object(mediaType string, object any) (descriptor, error) {
	content, err := json.Marshal(object)
	if err != nil {
		return descriptor{}, err
	}
	return l.blob(mediaType, content)
}

// image adds an image for one platform.
func (l *layout) image(p platform, s settings, layers []*layer) (descriptor, error) {
	m := manifest{SchemaVersion: 2, MediaType: typeManifest}
	c := config{platform: p, Config: s, RootFS: rootFS{Type: "layers"}}
	for _, each := range layers {
		if err := each.tar.Close(); err != nil {
			return descriptor{}, err
		}
		var packed bytes.Buffer
		w, err := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
		if err != nil {
			return descriptor{}, err
		}
		_, err = w.Write(each.content.Bytes())
		if err := errors.Join(err, w.Close()); err != nil {
			return descriptor{}, err
		}
		d, err := l.blob(typeLayer, packed.Bytes())
		if err != nil {
			return descriptor{}, err
		}
		m.Layers, c.RootFS.DiffIDs = append(m.Layers, d), append(c.RootFS.DiffIDs, digest(each.content.Bytes()))
	}
	var err error
	if m.Config, err = l.object(typeConfig, c); err != nil {
		return descriptor{}, err
	}
	d, err := l.object(typeManifest, m)
	d.Platform = &p
	return d, err
}

// write writes an image of one or more platforms, which add adds, as an OCI archive: `ctr images
// import`, `podman load` and `skopeo copy` read it.
func write(archive, reference string, add func(*layout) ([]descriptor, error)) error {
	var content bytes.Buffer
	l := &layout{tar: tar.NewWriter(&content), names: map[string]bool{}}
	manifests, err := add(l)
	if err != nil {
		return err
	}
	image, err := l.object(typeIndex, index{2, typeIndex, manifests})
	if err != nil {
		return err
	}
	image.Annotations = map[string]string{
		"io.containerd.image.name":          reference,
		"org.opencontainers.image.ref.name": reference[strings.LastIndex(reference, ":")+1:],
	}
	top, err := json.Marshal(index{2, typeIndex, []descriptor{image}})
	if err != nil {
		return err
	}
	err = errors.Join(l.file("index.json", top), l.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		l.tar.Close())
	if err != nil {
		return err
	}
	return os.WriteFile(archive, content.Bytes(), 0o644)
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// FromDockerfile writes to archive the image that a stage of dockerfile describes, each COPY in a
// layer of its own; an empty target is the last stage. What it copies comes from /layers/ of the
// stage build: folders has, for each architecture as Go names it, the folder that layers.sh has
// filled.
func FromDockerfile(dockerfile, target string, folders map[string]string, reference, archive string) error {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return fmt.Errorf("read Dockerfile: %w", err)
	}
	s, err := readStage(string(text), target)
	if err != nil {
		return err
	}
	err = write(archive, reference, func(image *layout) ([]descriptor, error) {
		var manifests []descriptor
		for _, architecture := range slices.Sorted(maps.Keys(folders)) {
			var layers []*layer
			for _, c := range s.copies {
				folder, ok := strings.CutPrefix(c.source, "/layers/")
				if c.from != "build" || !ok {
					return nil, fmt.Errorf("%s of stage %s is not in /layers/ of the stage build", c.source, c.from)
				}
				l := newLayer()
				if err := l.addTree(filepath.Join(folders[architecture], folder), c.destination); err != nil {
					return nil, err
				}
				layers = append(layers, l)
			}
			d, err := image.image(platform{architecture, "linux"},
				settings{Env: s.env, Entrypoint: s.entrypoint, Labels: s.labels}, layers)
			if err != nil {
				return nil, err
			}
			manifests = append(manifests, d)
		}
		return manifests, nil
	})
	if err != nil {
		return fmt.Errorf("write image %s: %w", reference, err)
	}
	return nil
}

// FromBusybox writes to archive an image of a static busybox of this machine that sleeps until it
// is ended. It asks for all GPUs, as images with CUDA do.
func FromBusybox(busybox, reference, archive string) error {
	s := settings{Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"},
		Entrypoint: []string{"/bin/busybox", "sleep", "infinity"}}
	return oneLayer(s, func(l *layer) error { return l.add(busybox, "/bin/busybox") }, reference, archive)
}

// FromFolder writes to archive an image of the files below folder whose containers run entrypoint.
func FromFolder(folder string, entrypoint []string, reference, archive string) error {
	s := settings{Env: []string{"PATH=/usr/bin"}, Entrypoint: entrypoint}
	return oneLayer(s, func(l *layer) error { return l.addTree(folder, "/") }, reference, archive)
}

// oneLayer writes an image for this machine whose one layer fill fills.
func oneLayer(s settings, fill func(*layer) error, reference, archive string) error {
	err := write(archive, reference, func(image *layout) ([]descriptor, error) {
		l := newLayer()
		if err := fill(l); err != nil {
			return nil, err
		}
		d, err := image.image(platform{runtime.GOARCH, "linux"}, s, []*layer{l})
		return []descriptor{d}, err
	})
	if err != nil {
		return fmt.Errorf("write image %s: %w", reference, err)
	}
	return nil
}
