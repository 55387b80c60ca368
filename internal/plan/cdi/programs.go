package cdi

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

// programs are the results of searches in programs. A program, of up to 20 MB, is read again only
// after a change.
type programs map[string]program

// A program is the state of a file at the time of the search, and the words found in the file.
type program struct {
	size     int64
	modified time.Time
	words    []string
}

// maxProgram is the largest program to search, in bytes.
const maxProgram = 256 << 20

// contain returns the words that occur in a program. It searches for the program below several
// roots, also under the name with ".real", because the program may be behind a script. If neither
// can be read, nothing is known.
func (p *programs) contain(roots []fs.FS, name string, words []string) []string {
	for _, root := range roots {
		var found []string
		seen := false
		for _, file := range []string{name, name + ".real"} {
			in, err := p.searchFile(root, file, words)
			seen = seen || err == nil
			found = append(found, in...)
		}
		if seen {
			return found
		}
	}
	return nil
}

// searchFile returns the words that occur in a file.
func (p *programs) searchFile(root fs.FS, name string, words []string) ([]string, error) {
	at, _, err := driverroot.Resolve(root, name)
	if err != nil {
		return nil, err
	}
	info, err := fs.Stat(root, at)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() > maxProgram:
		return nil, errors.New("no program")
	}
	if before, read := (*p)[at]; read && before.size == info.Size() && before.modified.Equal(info.ModTime()) {
		return before.words, nil
	}
	file, err := root.Open(at)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	found, err := search(file, words)
	if err != nil {
		return nil, err
	}
	if *p == nil {
		*p = programs{}
	}
	(*p)[at] = program{info.Size(), info.ModTime(), found}
	return found, nil
}

// search returns the words that occur in a text.
func search(text io.Reader, words []string) ([]string, error) {
	const block = 1 << 20
	longest := 0
	for _, w := range words {
		longest = max(longest, len(w))
	}
	var found []string
	buffer := make([]byte, 0, block+longest)
	for {
		n, err := text.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+n]
		for _, w := range words {
			if !slices.Contains(found, w) && bytes.Contains(buffer, []byte(w)) {
				found = append(found, w)
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, err
		}
		// A word may begin in this block and end in the next.
		keep := min(len(buffer), longest)
		buffer = buffer[:copy(buffer, buffer[len(buffer)-keep:])]
	}
}
