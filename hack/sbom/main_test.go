package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
)

// The paths of the programs, from TestMain on.
var daemon, nodeAgent string

func TestMain(m *testing.M) {
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "sbom")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	daemon, nodeAgent = filepath.Join(dir, "gpu-device-plugin"), filepath.Join(dir, "gpu-node-agent")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir, "../../cmd/...")
	if output, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the programs: %v\n%s", err, output)
		return 1
	}
	return m.Run()
}

func printed(t *testing.T, args ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := run(args, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestSBOM holds the document to what SPDX 2.3 asks for, and to the binary: each of its modules
// with version, purl and licence.
func TestSBOM(t *testing.T) {
	for _, program := range []string{daemon, nodeAgent} {
		t.Run(filepath.Base(program), func(t *testing.T) { isDocumented(t, program) })
	}
}

func isDocumented(t *testing.T, daemon string) {
	t.Helper()
	info, err := buildinfo.ReadFile(daemon)
	if err != nil {
		t.Fatal(err)
	}
	text := printed(t, "-libc", "2.36-9+deb12u14", daemon)
	if again := printed(t, "-libc", "2.36-9+deb12u14", daemon); !bytes.Equal(text, again) {
		t.Error("the same binary gives another document")
	}
	var d document
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&d); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(d.Name, filepath.Base(daemon)+"-"+version.Number+"-") {
		t.Errorf("its name is %s", d.Name)
	}
	if d.Version != "SPDX-2.3" || d.DataLicense != "CC0-1.0" || d.ID != "SPDXRef-DOCUMENT" ||
		!strings.HasPrefix(d.Namespace, "https://") ||
		strings.Contains(d.Namespace, "#") || len(d.Creation.Creators) == 0 {
		t.Errorf("document: %+v", d)
	}
	if !regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$`).MatchString(d.Creation.Created) {
		t.Errorf("created %q", d.Creation.Created)
	}
	known := map[string]string{} // purl by SPDX ID
	for _, p := range d.Packages {
		if !regexp.MustCompile(`^SPDXRef-[a-zA-Z0-9.-]+$`).MatchString(p.ID) || known[p.ID] != "" {
			t.Errorf("%s has the ID %q", p.Name, p.ID)
		}
		if p.Version == "" || p.Download == "" || p.Copyright == "" || p.Supplier == "" || p.Purpose == "" ||
			p.FilesAnalyzed {
			t.Errorf("a field is missing: %+v", p)
		}
		for _, l := range []string{p.LicenseConcluded, p.LicenseDeclared} {
			for id := range strings.SplitSeq(l, " AND ") {
				if id != "LGPL-2.1-or-later" && !slices.ContainsFunc(phrases,
					func(known struct{ id, has, lacks string }) bool { return known.id == id }) {
					t.Errorf("%s has the licence %q", p.Name, l)
				}
			}
		}
		if len(p.Refs) != 1 || p.Refs[0].Category != "PACKAGE-MANAGER" || p.Refs[0].Type != "purl" {
			t.Fatalf("%s has the references %+v", p.Name, p.Refs)
		}
		known[p.ID] = p.Refs[0].Locator
		if !regexp.MustCompile(`^pkg:(golang/[a-z0-9._/~-]+|deb/debian/libc6)@[A-Za-z0-9.%-]+(\?arch=[a-z0-9]+)?$`).MatchString(known[p.ID]) {
			t.Errorf("%s has the purl %q", p.Name, known[p.ID])
		}
	}
	want := []string{"pkg:golang/" + info.Main.Path + "@" + version.Number,
		"pkg:golang/stdlib@" + strings.TrimPrefix(info.GoVersion, "go"),
		"pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch="}
	for _, m := range info.Deps {
		want = append(want, "pkg:golang/"+strings.ToLower(m.Path)+"@"+strings.ReplaceAll(m.Version, "+", "%2B"))
	}
	for _, purl := range want {
		if !slices.ContainsFunc(d.Packages, func(p spdxPackage) bool { return strings.HasPrefix(p.Refs[0].Locator, purl) }) {
			t.Errorf("there is no %s", purl)
		}
	}
	if len(d.Packages) != len(want) {
		t.Errorf("%d packages, want %d", len(d.Packages), len(want))
	}
	related := map[string]bool{}
	for _, r := range d.Relationships {
		related[r.Related] = true
		if known[r.Related] == "" || known[r.Element] == "" && r.Element != documentID {
			t.Errorf("relationship %+v is about what is not there", r)
		}
	}
	if len(related) != len(d.Packages) {
		t.Errorf("%d of %d packages have a relationship", len(related), len(d.Packages))
	}
}

// TestLicenses holds docs/dev/licenses.md to the programs: all that the smaller one links, the
// other one links, too.
func TestLicenses(t *testing.T) {
	table := string(printed(t, "-format", "licenses", nodeAgent))
	for line := range strings.Lines(string(printed(t, "-format", "licenses", daemon))) {
		if !strings.Contains(table, line) {
			t.Errorf("gpu-node-agent does not link %s", line)
		}
	}
	// The version of Go is that of the machine, and no dependency of the project's.
	table = regexp.MustCompile(`(?m)^\| std \| [^|]* \|`).ReplaceAllString(table, "| std | |")
	docs, err := os.ReadFile("../../docs/dev/licenses.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(regexp.MustCompile(`(?m)^\| std \| [^|]* \|`).ReplaceAllString(string(docs), "| std | |"),
		table) {
		t.Errorf("docs/dev/licenses.md is not that of the binary; run: make licenses\nwant:\n%s", table)
	}
	texts := string(printed(t, "-format", "texts", nodeAgent))
	for _, want := range []string{
		"==== std ", "==== github.com/prometheus/client_golang ", ": NOTICE\n", "TERMS AND CONDITIONS FOR USE", "Neither the name of",
	} {
		if !strings.Contains(texts, want) {
			t.Errorf("the texts of the licences have no %q", want)
		}
	}
}

func TestIdentify(t *testing.T) {
	t.Parallel()
	const bsd = "Redistribution and use in source and\n binary forms, with or without modification"
	for text, want := range map[string]string{
		"Apache License\n   Version 2.0, January 2004": "Apache-2.0",
		bsd:                             "BSD-2-Clause",
		bsd + ". Neither the name of X": "BSD-3-Clause",
		"Permission is hereby granted, free of charge, to any person obtaining a copy. Licensed under the Apache License, Version 2.0": "Apache-2.0 MIT",
		"All rights reserved": "",
	} {
		if got := strings.Join(identify(text), " "); got != want {
			t.Errorf("identify(%q) = %q, want %q", text, got, want)
		}
	}
	for name, dir := range map[string]string{"no folder": "", "a folder without": t.TempDir()} {
		if _, _, err := license(dir); err == nil {
			t.Errorf("%s has a licence", name)
		}
	}
	unknown := t.TempDir()
	if err := os.WriteFile(filepath.Join(unknown, "LICENSE"), []byte("All rights reserved"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := license(unknown); err == nil || !strings.Contains(err.Error(), "not known") {
		t.Errorf("a licence that is not known: %v", err)
	}
}
