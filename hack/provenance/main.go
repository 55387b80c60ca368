// Command provenance states how the artefacts of a release were built, and verifies such statements.
//
//	provenance -version V -image REPOSITORY -commit HEX [-builder URI] [-dependency 'URI [sha256:HEX]']...
//	           [-key KEY] FILE...
//	provenance -verify -key PUBLIC-KEY FILE...
//
// The first form writes for each FILE the statement FILE.provenance.json, which nobody has signed, or
// with a key FILE.intoto.jsonl, an envelope with the statement and its signature. The second form
// reads FILE.intoto.jsonl. docs/dev/verify.md describes both files.
package main

import (
	"bytes"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

const (
	statementSuffix = ".provenance.json"
	envelopeSuffix  = ".intoto.jsonl"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "provenance:", err)
		os.Exit(1)
	}
}

func run(args []string, output io.Writer) error {
	flags := flag.NewFlagSet("provenance", flag.ContinueOnError)
	var b build
	flags.StringVar(&b.parameters.Version, "version", "", "version of the release")
	flags.StringVar(&b.parameters.Image, "image", "", "repository of the images, without a tag")
	flags.StringVar(&b.commit, "commit", "", "commit that was built")
	flags.StringVar(&b.builder, "builder", defaultBuilder, "URI of who or what has built")
	flags.Func("dependency",
		"what else the build has used: a URI, and behind a space its sha256:HEX; may be given several times",
		func(text string) error {
			uri, digest, hasDigest := strings.Cut(text, " ")
			d := resource{URI: uri}
			if hasDigest {
				algorithm, value, ok := strings.Cut(digest, ":")
				if !ok {
					return errors.New("want 'URI ALGORITHM:HEX'")
				}
				d.Digest = map[string]string{algorithm: value}
			}
			b.dependencies = append(b.dependencies, d)
			return nil
		})
	keyFile := flags.String("key", "",
		"ECDSA key on P-256 in PEM: the private key to sign with, or the public key to verify with")
	verifies := flags.Bool("verify", false, "verify FILE.intoto.jsonl")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() == 0 {
		return errors.New("name the files of a release")
	}
	if *verifies {
		key, err := readPublicKey(*keyFile)
		if err != nil {
			return err
		}
		for _, file := range flags.Args() {
			if err := verify(output, file, key); err != nil {
				return fmt.Errorf("%s: NOT VERIFIED: %w", file, err)
			}
		}
		return nil
	}
	if b.parameters.Version == "" || b.parameters.Image == "" || b.commit == "" {
		return errors.New("-version, -image and -commit are missing")
	}
	var key *ecdsa.PrivateKey
	if *keyFile != "" {
		var err error
		if key, err = readPrivateKey(*keyFile); err != nil {
			return err
		}
	}
	for _, file := range flags.Args() {
		if err := write(file, b, key); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// write writes the statement about an artefact beside it, in an envelope if there is a key. An
// earlier statement of either form is replaced.
func write(file string, b build, key *ecdsa.PrivateKey) error {
	s, err := b.statement(file)
	if err != nil {
		return err
	}
	written, replaced := file+statementSuffix, file+envelopeSuffix
	text, err := encode(s, "  ")
	if err == nil && key != nil {
		written, replaced = replaced, written
		var e *envelope
		if e, err = seal(text, key); err == nil {
			text, err = encode(e, "") // a line, as the suffix says
		}
	}
	if err != nil {
		return err
	}
	if err := os.Remove(replaced); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.WriteFile(written, text, 0o644)
}

func encode(value any, indent string) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetIndent("", indent)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return text.Bytes(), err
}

// verify prints what the statement about an artefact says, or returns why no statement beside it is
// to be believed. The SBOM is verified too if it is there. Lines of the file that are something else
// count as little as in-toto wants.
func verify(output io.Writer, file string, key *ecdsa.PublicKey) error {
	text, err := os.ReadFile(file + envelopeSuffix)
	if err != nil {
		return err
	}
	var problems []error
	for line := range bytes.Lines(text) {
		s, err := verifyLine(line, file, key)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		return report(output, file, s)
	}
	if len(problems) == 0 {
		return fmt.Errorf("%s is empty", file+envelopeSuffix)
	}
	return errors.Join(problems...)
}

func verifyLine(line []byte, file string, key *ecdsa.PublicKey) (*statement, error) {
	payload, err := open(line, key)
	if err != nil {
		return nil, err
	}
	s, err := parseStatement(payload)
	if err != nil {
		return nil, err
	}
	if err := s.describes(file); err != nil {
		return nil, err
	}
	if sbom := file + sbomSuffix; exists(sbom) {
		if err := s.describes(sbom); err != nil {
			return nil, fmt.Errorf("SBOM %s: %w", sbom, err)
		}
	}
	return s, nil
}

// report prints what a statement says that is believed.
func report(output io.Writer, file string, s *statement) error {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: verified\n", file)
	fmt.Fprintf(&text, "  built as %s from %s, commit %s\n", s.Predicate.Definition.Parameters.Version, repository,
		s.commit())
	fmt.Fprintf(&text, "  built by %s\n", s.Predicate.Run.Builder.ID)
	sbom := "is not here"
	if exists(file + sbomSuffix) {
		sbom = "verified"
	}
	fmt.Fprintf(&text, "  SBOM %s: %s\n", filepath.Base(file)+sbomSuffix, sbom)
	for _, subject := range s.Subject {
		if strings.Contains(subject.Name, "/") {
			fmt.Fprintf(&text, "  image %s@sha256:%s\n", subject.Name, subject.Digest["sha256"])
		}
	}
	_, err := io.WriteString(output, text.String())
	return err
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return !errors.Is(err, os.ErrNotExist)
}
