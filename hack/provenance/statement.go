package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
)

const (
	repository     = "https://github.com/gpu-device-plugin/gpu-device-plugin"
	statementType  = "https://in-toto.io/Statement/v1"
	provenanceType = "https://slsa.dev/provenance/v1"
	// The document says what the parameters and dependencies of a build are.
	buildType      = repository + "/blob/main/docs/dev/verify.md#build-type-v1"
	defaultBuilder = repository + "/blob/main/docs/dev/verify.md#builder"

	sbomSuffix    = ".spdx.json"
	archiveSuffix = ".oci.tar"
)

// A statement is an in-toto statement with a SLSA provenance predicate:
// https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md and
// https://slsa.dev/spec/v1.0/provenance. It has no times, so that the same build gives the same
// statement.
type statement struct {
	Type          string     `json:"_type"`
	Subject       []resource `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     provenance `json:"predicate"`
}

type resource struct {
	Name   string            `json:"name,omitempty"`
	URI    string            `json:"uri,omitempty"`
	Digest map[string]string `json:"digest,omitempty"`
}

type provenance struct {
	Definition struct {
		Type         string     `json:"buildType"`
		Parameters   parameters `json:"externalParameters"`
		Dependencies []resource `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	Run struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
	} `json:"runDetails"`
}

// parameters are those of make release.
type parameters struct {
	Version string `json:"version"`
	Image   string `json:"image"` // the repository in a registry, without a tag
}

// UnmarshalJSON refuses parameters that it does not know: SLSA asks verifiers for that, because an
// unknown parameter may have changed the artefact.
func (p *parameters) UnmarshalJSON(text []byte) error {
	type plain parameters
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	return decoder.Decode((*plain)(p))
}

// A build is what the statements of one release have in common.
type build struct {
	parameters   parameters
	commit       string // of the repository, in hexadecimal
	builder      string
	dependencies []resource
}

// statement returns the statement about an artefact. Its subjects are the file, the SBOM beside it,
// and for an OCI archive also the image, by the digest that a registry shows.
func (b build) statement(file string) (*statement, error) {
	s := &statement{Type: statementType, PredicateType: provenanceType}
	for _, name := range []string{file, file + sbomSuffix} {
		digest, err := fileDigest(name)
		if err != nil {
			return nil, err
		}
		s.Subject = append(s.Subject, resource{Name: filepath.Base(name), Digest: map[string]string{"sha256": digest}})
	}
	if strings.HasSuffix(file, archiveSuffix) {
		reference, digest, err := image.Reference(file)
		if err != nil {
			return nil, err
		}
		s.Subject = append(s.Subject, resource{Name: reference,
			Digest: map[string]string{"sha256": strings.TrimPrefix(digest, "sha256:")}})
	}
	definition := &s.Predicate.Definition
	definition.Type, definition.Parameters = buildType, b.parameters
	definition.Dependencies = append([]resource{{URI: "git+" + repository,
		Digest: map[string]string{"gitCommit": b.commit}}},
		b.dependencies...)
	s.Predicate.Run.Builder.ID = b.builder
	return s, nil
}

// parseStatement returns the statement in the payload of an envelope. A statement of another type
// or about another build is an error.
func parseStatement(payload []byte) (*statement, error) {
	var s statement
	if err := json.Unmarshal(payload, &s); err != nil {
		return nil, fmt.Errorf("read statement: %w", err)
	}
	definition := s.Predicate.Definition
	switch {
	case s.Type != statementType:
		return nil, fmt.Errorf("a statement of the type %q, want %q", s.Type, statementType)
	case s.PredicateType != provenanceType:
		return nil, fmt.Errorf("a predicate of the type %q, want %q", s.PredicateType, provenanceType)
	case definition.Type != buildType:
		return nil, fmt.Errorf("a build of the type %q, want %q", definition.Type, buildType)
	case s.commit() == "":
		return nil, fmt.Errorf("the statement names no commit of %s", repository)
	}
	return &s, nil
}

// commit returns the commit of the repository that was built, empty for none.
func (s *statement) commit() string {
	for _, d := range s.Predicate.Definition.Dependencies {
		if d.URI == "git+"+repository {
			return d.Digest["gitCommit"]
		}
	}
	return ""
}

// describes returns an error unless a file is one of the subjects, by name and digest. The name
// counts too: it has the version and the platform, so an older release does not pass for a newer one.
func (s *statement) describes(file string) error {
	digest, err := fileDigest(file)
	if err != nil {
		return err
	}
	var names []string
	for _, subject := range s.Subject {
		if names = append(names, subject.Name); subject.Name != filepath.Base(file) {
			continue
		}
		if subject.Digest["sha256"] != digest {
			return fmt.Errorf("the file has the SHA-256 %s, and the statement says %s", digest,
				subject.Digest["sha256"])
		}
		return nil
	}
	return fmt.Errorf("the statement is about %s", strings.Join(names, ", "))
}

// fileDigest returns the SHA-256 of a file in hexadecimal.
func fileDigest(name string) (string, error) {
	file, err := os.Open(name)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	if err := errors.Join(err, file.Close()); err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return fmt.Sprintf("%x", hash.Sum(nil)), nil
}
