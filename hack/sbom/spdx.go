package main

import (
	"fmt"
	"strings"
	"time"
)

// A document is an SPDX document as JSON, version 2.3; https://spdx.github.io/spdx-spec/v2.3 says
// what each field means.
type document struct {
	Version       string         `json:"spdxVersion"`
	DataLicense   string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      creation       `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Relationships []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	Name             string     `json:"name"`
	ID               string     `json:"SPDXID"`
	Version          string     `json:"versionInfo"`
	Purpose          string     `json:"primaryPackagePurpose"`
	Supplier         string     `json:"supplier"`
	Download         string     `json:"downloadLocation"`
	FilesAnalyzed    bool       `json:"filesAnalyzed"`
	Checksums        []checksum `json:"checksums,omitempty"`
	LicenseConcluded string     `json:"licenseConcluded"`
	LicenseDeclared  string     `json:"licenseDeclared"`
	Copyright        string     `json:"copyrightText"`
	Comment          string     `json:"comment,omitempty"`
	Refs             []ref      `json:"externalRefs"`
}

type checksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type ref struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	Element string `json:"spdxElementId"`
	Type    string `json:"relationshipType"`
	Related string `json:"relatedSpdxElement"`
}

const (
	project    = "github.com/gpu-device-plugin/gpu-device-plugin"
	documentID = "SPDXRef-DOCUMENT"
	unsaid     = "NOASSERTION"
)

// document returns what the binary consists of. The same file gives the same document. libc is the
// version of Debian's libc6 that is delivered with it, empty for none.
func (b *binary) document(libc string) document {
	own := newPackage(b.main, "APPLICATION")
	own.Name = b.name
	own.ID = "SPDXRef-" + idOf(b.name+"-"+b.goarch) // another one than of the other programs in an image
	d := newDocument(fmt.Sprintf("%s-%s-%s", b.name, b.main.Version, b.goarch), own, b.checksum, b.built)
	for _, m := range b.modules {
		p := newPackage(m, "LIBRARY")
		if m.sum != "" {
			p.Comment = "go.sum: " + m.sum
		}
		d.Packages = append(d.Packages, p)
		d.Relationships = append(d.Relationships, relationship{own.ID, "STATIC_LINK", p.ID})
	}
	if libc != "" {
		p := newPackage(module{Path: "libc6", Version: libc, license: "LGPL-2.1-or-later"}, "LIBRARY")
		p.ID += "-" + b.goarch
		p.Refs = []ref{packageURL("pkg:deb/debian/libc6@" + escape(libc) + "?arch=" + b.goarch)}
		d.Packages = append(d.Packages, p)
		d.Relationships = append(d.Relationships, relationship{own.ID, "DYNAMIC_LINK", p.ID})
	}
	return d
}

// newDocument returns a document about one package, a file with that SHA-256.
func newDocument(name string, own spdxPackage, sha string, built time.Time) document {
	own.Checksums = []checksum{{"SHA256", sha}}
	return document{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: documentID, Name: name,
		Namespace:     "https://" + project + "/sbom/" + sha,
		Creation:      creation{built.UTC().Format(time.RFC3339), []string{"Tool: hack-sbom"}},
		Packages:      []spdxPackage{own},
		Relationships: []relationship{{documentID, "DESCRIBES", own.ID}},
	}
}

func newPackage(m module, purpose string) spdxPackage {
	path := m.Path
	if path == "std" {
		path = "stdlib" // as scanners call it
	}
	return spdxPackage{
		Name: m.Path, ID: "SPDXRef-" + idOf(m.Path), Version: m.Version, Purpose: purpose, Supplier: unsaid,
		Download:         unsaid,
		LicenseConcluded: m.license, LicenseDeclared: m.license, Copyright: unsaid,
		Refs: []ref{packageURL("pkg:golang/" + strings.ToLower(path) + "@" + escape(m.Version))},
	}
}

func packageURL(locator string) ref { return ref{"PACKAGE-MANAGER", "purl", locator} }

// escape escapes what a version may have and a package URL may not.
func escape(version string) string {
	return strings.NewReplacer("+", "%2B", ":", "%3A").Replace(version)
}

func unescape(version string) string {
	return strings.NewReplacer("%2B", "+", "%3A", ":").Replace(version)
}

// idOf returns a path as an SPDX identifier, which has letters, digits, dots and hyphens.
func idOf(path string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' {
			return r
		}
		return '-'
	}, path)
}
