package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
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

// write writes the image as a docker archive, which `ctr images import` reads.
func write(archive, reference string, s settings, layers ...*layer) error {
	type rootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}
	type file struct {
		name    string
		content []byte
	}
	var files []file
	var names, digests []string
	for i, l := range layers {
		if err := l.tar.Close(); err != nil {
			return err
		}
		name := fmt.Sprintf("layer%d.tar", i)
		files = append(files, file{name, l.content.Bytes()})
		names, digests = append(names, name), append(digests, digest(l.content.Bytes()))
	}
	config, err := json.Marshal(struct {
		Architecture string   `json:"architecture"`
		OS           string   `json:"os"`
		Config       settings `json:"config"`
		RootFS       rootFS   `json:"rootfs"`
	}{runtime.GOARCH, "linux", s, rootFS{"layers", digests}})
	if err != nil {
		return err
	}
	configName := strings.TrimPrefix(digest(config), "sha256:") + ".json"
	manifest, err := json.Marshal([]struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{configName, []string{reference}, names}})
	if err != nil {
		return err
	}
	var content bytes.Buffer
	w := tar.NewWriter(&content)
	for _, f := range append(files, file{configName, config}, file{"manifest.json", manifest}) {
		header := &tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.content))}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(f.content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(archive, content.Bytes(), 0o644)
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// FromDockerfile writes to archive the image that a stage of dockerfile describes, each COPY in a layer of its own; an empty target is the
// last stage. folders names, for each "STAGE:SOURCE" that the stage copies, the folder that stands for it here.
func FromDockerfile(dockerfile, target string, folders map[string]string, reference, archive string) error {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return fmt.Errorf("read Dockerfile: %w", err)
	}
	s, err := readStage(string(text), target)
	if err != nil {
		return err
	}
	var layers []*layer
	for _, c := range s.copies {
		folder, ok := folders[c.from+":"+c.source]
		if !ok {
			return fmt.Errorf("assemble image %s: nothing stands for %s of stage %s", reference, c.source, c.from)
		}
		l := newLayer()
		if err := l.addTree(folder, c.destination); err != nil {
			return fmt.Errorf("assemble image %s: %w", reference, err)
		}
		layers = append(layers, l)
	}
	if err := write(archive, reference, settings{Env: s.env, Entrypoint: s.entrypoint, Labels: s.labels}, layers...); err != nil {
		return fmt.Errorf("write image %s: %w", reference, err)
	}
	return nil
}

// FromBusybox writes to archive an image of a static busybox that sleeps until it is ended. It asks for all GPUs, as
// images with CUDA do.
func FromBusybox(busybox, reference, archive string) error {
	l := newLayer()
	if err := l.add(busybox, "/bin/busybox"); err != nil {
		return fmt.Errorf("assemble image %s: %w", reference, err)
	}
	s := settings{Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"}, Entrypoint: []string{"/bin/busybox", "sleep", "infinity"}}
	if err := write(archive, reference, s, l); err != nil {
		return fmt.Errorf("write image %s: %w", reference, err)
	}
	return nil
}
