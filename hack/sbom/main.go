// Command sbom says what a Go binary is made of, from the build information in the binary itself:
// as an SPDX document, as a table of licences, or as the texts of these licences. It finds licences
// in the module cache, so it is run where the binary was built, and from the same source, whose
// version it names.
package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(args []string, output io.Writer) error {
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	format := flags.String("format", "spdx", "what to print: spdx (JSON), licenses (a table in Markdown) or texts (of the licences)")
	libc := flags.String("libc", "", "version of Debian's package libc6, if its files are delivered with the binary")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("give the path of a binary")
	}
	b, err := read(flags.Arg(0))
	if err != nil {
		return err
	}
	switch *format {
	case "spdx":
		encoder := json.NewEncoder(output)
		encoder.SetIndent("", "  ")
		encoder.SetEscapeHTML(false)
		return encoder.Encode(b.document(*libc))
	case "licenses":
		return b.table(output)
	case "texts":
		return b.texts(output)
	}
	return fmt.Errorf("unknown format %q: give spdx, licenses or texts", *format)
}

// A module is one that is linked into the binary.
type module struct {
	Path, Version, Dir string
	sum                string // as in go.sum
	license            string // an SPDX expression
	files              []string
}

// A binary is what is known of it.
type binary struct {
	name     string
	main     module
	modules  []module // the Go standard library first
	goarch   string
	built    time.Time // of the commit, or else of the file
	checksum string    // SHA-256, in hexadecimal
}

// read reads the binary's build information and finds the licences of its modules.
func read(path string) (*binary, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read build information: %w", err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read binary: %w", err)
	}
	file, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read binary: %w", err)
	}
	b := &binary{
		name:  info.Path[strings.LastIndex(info.Path, "/")+1:],
		main:  module{Path: info.Main.Path, Version: version.Number},
		built: file.ModTime(), checksum: fmt.Sprintf("%x", sha256.Sum256(content)),
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "GOARCH":
			b.goarch = s.Value
		case "vcs.time":
			if b.built, err = time.Parse(time.RFC3339, s.Value); err != nil {
				return nil, fmt.Errorf("read time of the commit: %w", err)
			}
		}
	}
	if err := b.readModules(info); err != nil {
		return nil, err
	}
	for _, m := range append([]*module{&b.main}, pointers(b.modules)...) {
		if m.license, m.files, err = license(m.Dir); err != nil {
			return nil, fmt.Errorf("module %s: %w", m.Path, err)
		}
	}
	return b, nil
}

// readModules sets the modules of a binary, Go's standard library first, each with its folder.
func (b *binary) readModules(info *buildinfo.BuildInfo) error {
	list := []string{"list", "-m", "-json", info.Main.Path}
	sums := map[string]string{}
	for _, d := range info.Deps {
		if d.Replace != nil && strings.HasPrefix(info.Main.Path, d.Path+"/") && strings.HasPrefix(d.Replace.Path, "..") {
			continue // the repository that the main module is a part of, whose licence it has
		}
		if d.Replace != nil {
			return fmt.Errorf("module %s is replaced by %s: its licence cannot be told", d.Path, d.Replace.Path)
		}
		list, sums[d.Path] = append(list, d.Path+"@"+d.Version), d.Sum
	}
	found, err := goCommand(list...)
	if err != nil {
		return err
	}
	root, err := goCommand("env", "GOROOT")
	if err != nil {
		return err
	}
	// Its licence has been the same in all versions.
	b.modules = []module{{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go"),
		Dir: strings.TrimSpace(string(root))}}
	for modules := json.NewDecoder(bytes.NewReader(found)); modules.More(); {
		var m module
		if err := modules.Decode(&m); err != nil {
			return fmt.Errorf("read list of modules: %w", err)
		}
		if m.Path == info.Main.Path {
			b.main.Dir = m.Dir
			continue
		}
		m.sum = sums[m.Path]
		b.modules = append(b.modules, m)
	}
	slices.SortFunc(b.modules[1:], func(x, y module) int { return strings.Compare(x.Path, y.Path) })
	return nil
}

func pointers(modules []module) []*module {
	var all []*module
	for i := range modules {
		all = append(all, &modules[i])
	}
	return all
}

func goCommand(args ...string) ([]byte, error) {
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	output, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w", args[0], err)
	}
	return output, nil
}

// table prints the licences.
func (b *binary) table(w io.Writer) error {
	var text strings.Builder
	text.WriteString("| module | version | licence |\n|---|---|---|\n")
	for _, m := range b.modules {
		fmt.Fprintf(&text, "| %s | %s | %s |\n", m.Path, m.Version, m.license)
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// texts prints the texts that the licences want to be delivered with the binary.
func (b *binary) texts(w io.Writer) error {
	for _, m := range append([]module{b.main}, b.modules...) {
		for _, name := range m.files {
			text, err := os.ReadFile(filepath.Join(m.Dir, name))
			if err != nil {
				return fmt.Errorf("read licence: %w", err)
			}
			if _, err := fmt.Fprintf(w, "==== %s %s: %s\n\n%s\n", m.Path, m.Version, name,
				strings.TrimSpace(string(text))+"\n"); err != nil {
				return err
			}
		}
	}
	return nil
}
