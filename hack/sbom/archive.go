package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"reflect"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
)

// imageDocument returns what the image in an OCI archive consists of: the programs that the documents
// describe, for each of its architectures, with all that these link, and other packages, each a
// package URL and a licence.
func imageDocument(archive string, programs, packages []string) (document, error) {
	reference, digest, err := image.Reference(archive)
	if err != nil {
		return document{}, err
	}
	if len(programs) == 0 {
		return document{}, errors.New("name the SPDX documents of the programs in the image")
	}
	own := imagePackage(reference, digest)
	sha, built, err := measure(archive, "")
	if err != nil {
		return document{}, err
	}
	d := newDocument(path.Base(archive), own, sha, built)
	for _, file := range programs {
		if err := d.include(file, own.ID); err != nil {
			return document{}, err
		}
	}
	for _, text := range packages {
		purl, license, ok := strings.Cut(text, " ")
		name, versionAndArch, hasVersion := strings.Cut(path.Base(purl), "@")
		if !ok || !hasVersion {
			return document{}, fmt.Errorf("%q: want a package URL with a version, a space, and a licence", text)
		}
		number, arch, _ := strings.Cut(versionAndArch, "?arch=")
		p := newPackage(module{Path: name, Version: unescape(number), license: license}, "APPLICATION")
		p.ID += "-" + idOf(arch)
		p.Refs = []ref{packageURL(purl)}
		d.Packages = append(d.Packages, p)
		d.Relationships = append(d.Relationships, relationship{own.ID, "CONTAINS", p.ID})
	}
	return d, nil
}

// include adds the packages and relationships of another document, whose own packages whole contains.
// Modules that several documents have are added once.
func (d *document) include(file, whole string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read SBOM: %w", err)
	}
	var part document
	if err := json.Unmarshal(text, &part); err != nil {
		return fmt.Errorf("read SBOM %s: %w", file, err)
	}
	known := map[string]spdxPackage{}
	for _, p := range d.Packages {
		known[p.ID] = p
	}
	for _, p := range part.Packages {
		other, isKnown := known[p.ID]
		if isKnown && !reflect.DeepEqual(p, other) {
			return fmt.Errorf("%s has another %s %s than the SBOMs before it", file, p.Name, p.Version)
		}
		if !isKnown {
			d.Packages = append(d.Packages, p)
		}
	}
	for _, r := range part.Relationships {
		if r.Element == documentID {
			r = relationship{whole, "CONTAINS", r.Related}
		}
		d.Relationships = append(d.Relationships, r)
	}
	return nil
}

// chartDocument returns what the package of the chart consists of: itself, and the image that it
// starts.
func chartDocument(file, archive string) (document, error) {
	reference, digest, err := image.Reference(archive)
	if err != nil {
		return document{}, fmt.Errorf("image of the chart: %w", err)
	}
	sha, built, err := measure(file, "")
	if err != nil {
		return document{}, err
	}
	number := strings.TrimPrefix(version.Number, "v")
	own := newPackage(module{Path: "gpu-device-plugin", Version: number, license: "Apache-2.0"}, "INSTALL")
	own.ID = "SPDXRef-chart"
	own.Refs = []ref{packageURL("pkg:generic/gpu-device-plugin@" + number)}
	d := newDocument(path.Base(file), own, sha, built)
	started := imagePackage(reference, digest)
	d.Packages = append(d.Packages, started)
	d.Relationships = append(d.Relationships, relationship{own.ID, "DEPENDS_ON", started.ID})
	return d, nil
}

// imagePackage returns the package of an image. Its version is its tag.
func imagePackage(reference, digest string) spdxPackage {
	repository, tag := reference[:strings.LastIndex(reference, ":")], reference[strings.LastIndex(reference, ":")+1:]
	name := path.Base(repository)
	p := newPackage(module{Path: name, Version: tag, license: "Apache-2.0"}, "CONTAINER")
	p.ID = "SPDXRef-image"
	p.Refs = []ref{packageURL(fmt.Sprintf("pkg:oci/%s@%s?repository_url=%s&tag=%s", name, escape(digest), repository,
		tag))}
	return p
}
