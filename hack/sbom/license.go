package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// phrases tell licences by words that no other of them has, in lower case and with single spaces.
var phrases = []struct {
	id, has, lacks string
}{
	{"Apache-2.0", "apache license version 2.0", ""},
	{"Apache-2.0", "licensed under the apache license, version 2.0", ""},
	{"MIT", "permission is hereby granted, free of charge, to any person obtaining a copy", ""},
	{"ISC", "permission to use, copy, modify, and/or distribute this software for any purpose", ""},
	{"ISC", "permission to use, copy, modify, and distribute this software for any purpose", ""},
	{"BSD-3-Clause", "neither the name of", ""},
	{"BSD-2-Clause", "redistribution and use in source and binary forms", "neither the name of"},
	{"MPL-2.0", "mozilla public license version 2.0", ""},
}

// license returns the SPDX expression of the licences at the root of a module, and the files to be
// delivered with a binary.
func license(dir string) (expression string, files []string, err error) {
	if dir == "" {
		return "", nil, errors.New("not in the module cache: build the binary here first")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", nil, fmt.Errorf("find licence: %w", err)
	}
	var ids []string
	for _, e := range entries {
		switch name, _, _ := strings.Cut(strings.ToUpper(e.Name()), "."); {
		case e.IsDir():
		case name == "LICENSE" || name == "LICENCE" || name == "COPYING":
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return "", nil, fmt.Errorf("read licence: %w", err)
			}
			found := identify(string(text))
			if found == nil {
				return "", nil, fmt.Errorf("the licence in %s is not known: teach it to phrases", e.Name())
			}
			ids, files = append(ids, found...), append(files, e.Name())
		case name == "NOTICE" || name == "PATENTS" || name == "THIRD_PARTY_NOTICES":
			files = append(files, e.Name())
		}
	}
	if ids == nil {
		return "", nil, fmt.Errorf("no licence in %s", dir)
	}
	slices.Sort(ids)
	return strings.Join(slices.Compact(ids), " AND "), files, nil
}

// identify returns the SPDX identifiers of the licences in a text.
func identify(text string) []string {
	text = strings.Join(strings.Fields(strings.ToLower(text)), " ")
	var ids []string
	for _, p := range phrases {
		if strings.Contains(text, p.has) && (p.lacks == "" || !strings.Contains(text, p.lacks)) &&
			!slices.Contains(ids, p.id) {
			ids = append(ids, p.id)
		}
	}
	return ids
}
