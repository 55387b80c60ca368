package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
)

const dockerfile = `FROM golang AS build
RUN something
FROM scratch AS programs
LABEL a.b=c
COPY --from=build /layers/plugin/ /
COPY --from=build /layers/agent/ /opt/
ENV PATH=/usr/bin
ENTRYPOINT ["gpu-device-plugin"]
`

// write writes files, by their names, and returns their folder.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range files {
		path := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// readTar returns the files of an archive.
func readTar(t *testing.T, content io.Reader) map[string]string {
	t.Helper()
	files := map[string]string{}
	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, readErr := io.ReadAll(r)
		if err = errors.Join(err, readErr); err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeReg {
			files[header.Name] = string(text)
		}
	}
}

type descriptor struct {
	MediaType, Digest string
	Size              int
	Platform          struct{ Architecture, OS string }
	Annotations       map[string]string
}

// archive is an image layout that was read.
type archive struct {
	t     *testing.T
	files map[string]string
}

// blob returns what a descriptor describes, which has its digest and size, and reads it as JSON
// into an object, if there is one.
func (a archive) blob(d descriptor, object any) string {
	a.t.Helper()
	text, ok := a.files["blobs/sha256/"+d.Digest[len("sha256:"):]]
	if sum := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text))); !ok || sum != d.Digest || len(text) != d.Size {
		a.t.Fatalf("%s of %d bytes has the digest %s and %d bytes", d.Digest, d.Size, sum, len(text))
	}
	if object != nil {
		if err := json.Unmarshal([]byte(text), object); err != nil {
			a.t.Fatal(err)
		}
	}
	return text
}

// TestArchive: an image of two architectures has for each its files, in layers whose digests are
// right, and what its stage says.
func TestArchive(t *testing.T) {
	t.Parallel()
	folders := map[string]string{}
	for _, architecture := range []string{"amd64", "arm64"} {
		folders[architecture] = write(t, map[string]string{
			"plugin/usr/bin/gpu-device-plugin": "plugin of " + architecture, "agent/gpu-node-agent": "agent of " + architecture,
		})
	}
	file := filepath.Join(write(t, map[string]string{"Dockerfile": dockerfile}), "Dockerfile")
	var contents [2][]byte
	for i := range contents {
		path := filepath.Join(t.TempDir(), "image.tar")
		err := image.FromDockerfile(file, "", folders, "example.com/a/b:v1", path)
		content, readErr := os.ReadFile(path)
		if err = errors.Join(err, readErr); err != nil {
			t.Fatal(err)
		}
		contents[i] = content
	}
	if !bytes.Equal(contents[0], contents[1]) {
		t.Error("the same image gives another archive")
	}
	a := archive{t, readTar(t, bytes.NewReader(contents[0]))}
	var top, platforms struct{ Manifests []descriptor }
	if err := json.Unmarshal([]byte(a.files["index.json"]), &top); err != nil || len(top.Manifests) != 1 {
		t.Fatalf("index.json: %v: %s", err, a.files["index.json"])
	}
	if got := top.Manifests[0].Annotations; got["io.containerd.image.name"] != "example.com/a/b:v1" ||
		got["org.opencontainers.image.ref.name"] != "v1" {
		t.Errorf("its name is %v", got)
	}
	if a.files["oci-layout"] != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout is %s", a.files["oci-layout"])
	}
	a.blob(top.Manifests[0], &platforms)
	var found []string
	for _, d := range platforms.Manifests {
		found = append(found, d.Platform.OS+"/"+d.Platform.Architecture)
		a.hasImage(d)
	}
	if want := []string{"linux/amd64", "linux/arm64"}; !slices.Equal(found, want) {
		t.Errorf("it is for %v, want %v", found, want)
	}
}

// hasImage holds the image of one architecture to what went into it.
func (a archive) hasImage(d descriptor) {
	a.t.Helper()
	var m struct {
		Config descriptor
		Layers []descriptor
	}
	var c struct {
		Architecture, OS string
		Config           struct {
			Env, Entrypoint []string
			Labels          map[string]string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	a.blob(d, &m)
	a.blob(m.Config, &c)
	if c.Architecture != d.Platform.Architecture || c.OS != "linux" ||
		!slices.Equal(c.Config.Env, []string{"PATH=/usr/bin"}) ||
		!slices.Equal(c.Config.Entrypoint, []string{"gpu-device-plugin"}) || c.Config.Labels["a.b"] != "c" {
		a.t.Errorf("the configuration for %s is %+v", d.Platform.Architecture, c)
	}
	want := []string{"usr/bin/gpu-device-plugin: plugin of " + c.Architecture,
		"opt/gpu-node-agent: agent of " + c.Architecture}
	var got []string
	for i, each := range m.Layers {
		packed, err := gzip.NewReader(bytes.NewReader([]byte(a.blob(each, nil))))
		if err != nil {
			a.t.Fatal(err)
		}
		layer, err := io.ReadAll(packed)
		if err != nil {
			a.t.Fatal(err)
		}
		if sum := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); len(c.RootFS.DiffIDs) != len(m.Layers) ||
			sum != c.RootFS.DiffIDs[i] {
			a.t.Errorf("the layer has the digest %s, and the configuration names %v", sum, c.RootFS.DiffIDs)
		}
		for name, text := range readTar(a.t, bytes.NewReader(layer)) {
			got = append(got, name+": "+text)
		}
	}
	if !slices.Equal(got, want) {
		a.t.Errorf("%s has the files %q, want %q", c.Architecture, got, want)
	}
}

// TestNoLayer: what does not come from the layers is refused, and so is a folder that is not there.
func TestNoLayer(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"FROM scratch\nCOPY --from=other /layers/plugin/ /\n",
		"FROM scratch\nCOPY --from=build /layers/none/ /\n"} {
		folder := write(t, map[string]string{"Dockerfile": text})
		err := image.FromDockerfile(filepath.Join(folder, "Dockerfile"), "", map[string]string{"amd64": folder}, "a:b",
			filepath.Join(folder, "image.tar"))
		if err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}
