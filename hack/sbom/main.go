// Command sbom says what an artefact of a release is made of: a Go binary, an image (FILE.oci.tar) or
// the package of the chart (FILE.tgz). Of a binary it prints an SPDX document, a table of licences,
// or the texts of these licences, from the build information in the binary itself. It finds licences
// in the module cache, so it is run where the binary was built, and from the same source, whose
// version it names. The SPDX document of an image has what the documents of its programs have.
//
// A document is as old as SOURCE_DATE_EPOCH says, or else as the commit in the binary, or the file.
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
	"strconv"
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
	format := flags.String("format", "spdx",
		"what to print: spdx (JSON), licenses (a table in Markdown) or texts (of the licences)")
	libc := flags.String("libc", "", "version of Debian's package libc6, if its files are delivered with the binary")
	var programs, packages []string
	flags.Func("contains", "SPDX document of a program in the image; may be given several times",
		func(file string) error {
			programs = append(programs, file)
			return nil
		})
	flags.Func("package",
		"package URL of something else in the image, and behind a space its licence; may be given several times",
		func(text string) error {
			packages = append(packages, text)
			return nil
		})
	chartImage := flags.String("image", "", "OCI archive of the image that the chart starts")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("give the path of a binary, an image or the package of a chart")
	}
	switch file := flags.Arg(0); {
	case strings.HasSuffix(file, ".oci.tar"):
		d, err := imageDocument(file, programs, packages)
		return encode(output, d, err)
	case strings.HasSuffix(file, ".tgz"):
		d, err := chartDocument(file, *chartImage)
		return encode(output, d, err)
	}
	b, err := read(flags.Arg(0))
	if err != nil {
		return err
	}
	switch *format {
	case "spdx":
		return encode(output, b.document(*libc), nil)
	case "licenses":
		return b.table(output)
	case "texts":
		return b.texts(output)
	}
	return fmt.Errorf("unknown format %q: give spdx, licenses or texts", *format)
}

// encode prints a document, unless there was an error.
func encode(output io.Writer, d document, err error) error {
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(output)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(d)
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
	built    time.Time
	checksum string // SHA-256, in hexadecimal
}

// read reads the binary's build information and finds the licences of its modules.
func read(path string) (*binary, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read build information: %w", err)
	}
	commitTime := ""
	b := &binary{
		name: info.Path[strings.LastIndex(info.Path, "/")+1:],
		main: module{Path: info.Main.Path, Version: version.Number},
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "GOARCH":
			b.goarch = s.Value
		case "vcs.time":
			commitTime = s.Value
		}
	}
	if b.checksum, b.built, err = measure(path, commitTime); err != nil {
		return nil, err
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

// measure returns the SHA-256 of a file and the time at which it was built: SOURCE_DATE_EPOCH, or
// else the time of the commit if that is known, or of the file.
func measure(path, commitTime string) (sha string, built time.Time, err error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return "", time.Time{}, fmt.Errorf("read artefact: %w", err)
	}
	sha = fmt.Sprintf("%x", sha256.Sum256(content))
	if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return "", time.Time{}, fmt.Errorf("read SOURCE_DATE_EPOCH: %w", err)
		}
		return sha, time.Unix(seconds, 0), nil
	}
	if commitTime != "" {
		if built, err = time.Parse(time.RFC3339, commitTime); err != nil {
			return "", time.Time{}, fmt.Errorf("read time of the commit: %w", err)
		}
		return sha, built, nil
	}
	file, err := os.Stat(path)
	if err != nil {
		return "", time.Time{}, fmt.Errorf("read artefact: %w", err)
	}
	return sha, file.ModTime(), nil
}

// readModules sets the modules of a binary, Go's standard library first, each with its folder.
func (b *binary) readModules(info *buildinfo.BuildInfo) error {
	list := []string{"list", "-m", "-json", info.Main.Path}
	sums := map[string]string{}
	for _, d := range info.Deps {
		if d.Replace != nil && strings.HasPrefix(info.Main.Path, d.Path+"/") &&
			strings.HasPrefix(d.Replace.Path, "..") {
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
