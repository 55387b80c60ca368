package driverpack

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// Limits for the shell script at the begin of a .run file.
const (
	maxScript = 1 << 20   // bytes in which the variables stand
	maxHead   = 128 << 20 // bytes of the script and of the decompressor behind it
)

// A runFile is a .run file of NVIDIA: a shell script of makeself, usually a decompressor, and a
// compressed tar archive. Nothing of the file is executed.
type runFile struct {
	file         *os.File
	version      string // of the driver
	architecture string // amd64 or arm64
	payload      int64  // where the archive begins
}

// architectures maps the names of architectures in .run files to the names of Go.
var architectures = map[string]string{"x86_64": "amd64", "aarch64": "arm64"}

// openRun opens a .run file whose SHA-256 digest must be digest. The caller closes the file.
func openRun(ctx context.Context, name, digest string) (_ *runFile, err error) {
	if !driverfolder.IsDigest(digest) {
		return nil, fmt.Errorf("%.80q is not a SHA-256 digest: it has 64 digits from 0 to 9 and a to f", digest)
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = file.Close() // only read
		}
	}()
	if info, err := file.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, driverfolder.Reader(ctx, file)); err != nil {
		return nil, err
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != digest {
		return nil, fmt.Errorf("%s has the SHA-256 digest %s, and not %s: download the file again, or correct --sha256",
			name, got, digest)
	}
	r := &runFile{file: file}
	if err := r.readHead(); err != nil {
		return nil, fmt.Errorf("%s is not a .run file of NVIDIA: %w", name, err)
	}
	return r, nil
}

// readHead reads the variables of the shell script, and finds the archive.
func (r *runFile) readHead() error {
	script := make([]byte, maxScript)
	n, err := r.file.ReadAt(script, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	script = script[:n]
	if !bytes.HasPrefix(script, []byte("#!")) {
		return errors.New("it does not begin with a shell script")
	}
	values := map[string]string{}
	for line := range strings.SplitSeq(string(script), "\n") {
		name, value, ok := strings.Cut(line, "=")
		if _, again := values[name]; ok && !again {
			values[name] = strings.Trim(strings.TrimSpace(value), `"'`)
		}
	}
	if !strings.HasPrefix(values["label"], "NVIDIA ") {
		return errors.New("its script has no label that begins with NVIDIA")
	}
	if system := values["TARGET_OS"]; system != "Linux" {
		return fmt.Errorf("it is for the system %.40q, and not for Linux", system)
	}
	if r.architecture = architectures[values["TARGET_ARCH"]]; r.architecture == "" {
		return fmt.Errorf("it is for %.40q, and not for x86_64 or aarch64", values["TARGET_ARCH"])
	}
	r.version = values["version_string"]
	if !driverfolder.IsVersion(r.version) {
		return fmt.Errorf("its script has no version_string of a driver, but %.40q", r.version)
	}
	line, err := strconv.Atoi(values["skip"])
	if err != nil || line < 2 {
		return fmt.Errorf("its script does not tell the line of the archive (skip=%.20q)", values["skip"])
	}
	if r.payload, err = startOfLine(io.NewSectionReader(r.file, 0, maxHead), line); err != nil {
		return fmt.Errorf("its archive should begin in line %d: %w", line, err)
	}
	return nil
}

// startOfLine returns where a line begins; the first line is line 1.
func startOfLine(r io.Reader, line int) (at int64, err error) {
	lines := bufio.NewReaderSize(r, 1<<16)
	for n := 1; n < line; {
		piece, err := lines.ReadSlice('\n')
		at += int64(len(piece))
		switch {
		case err == nil:
			n++
		case !errors.Is(err, bufio.ErrBufferFull):
			return 0, errors.New("the file has fewer lines")
		}
	}
	return at, nil
}

// archive calls read with the decompressed tar archive of the .run file. The formats of xz and zstd
// need the programs of the same names.
func (r *runFile) archive(ctx context.Context, read func(io.Reader) error) error {
	compressed := bufio.NewReaderSize(driverfolder.Reader(ctx, io.NewSectionReader(r.file, r.payload, 1<<62)), 1<<16)
	begin, err := compressed.Peek(6)
	if err != nil {
		return errors.New("the .run file is truncated: it has no archive")
	}
	switch {
	case bytes.HasPrefix(begin, []byte("\x1f\x8b")):
		unpacked, err := gzip.NewReader(compressed)
		if err != nil {
			return damaged(err)
		}
		unpacked.Multistream(false) // the script may pad the archive
		return read(unpacked)
	case bytes.HasPrefix(begin, []byte("BZh")):
		return read(bzip2.NewReader(compressed))
	case bytes.HasPrefix(begin, []byte("\xfd7zXZ\x00")):
		return decompress(ctx, compressed, read, theArchive, "xz")
	case bytes.HasPrefix(begin, []byte("\x28\xb5\x2f\xfd")):
		return decompress(ctx, compressed, read, theArchive, "zstd")
	}
	return fmt.Errorf("the archive of the .run file has an unknown compression: it begins with %x", begin)
}

// theArchive is what the archive of the .run file is called in errors.
const theArchive = "the archive of the .run file"

// decompress runs a program such as xz. Busybox knows the options as well. Errors call the compressed
// content by its name.
func decompress(
	ctx context.Context, compressed io.Reader, read func(io.Reader) error, name, program string,
) error {
	file, err := exec.LookPath(program)
	if err != nil {
		return fmt.Errorf("%s needs the program %s, which is not installed", name, program)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, file, "-d", "-c")
	cmd.Stdin, cmd.Stderr = compressed, &complaint
	unpacked, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	failed := read(unpacked)
	if failed != nil {
		cancel() // the program may wait for a reader
	}
	if err := cmd.Wait(); failed == nil && err != nil {
		return fmt.Errorf("%s is damaged: %s: %w: %.200s", name, program, err, strings.TrimSpace(complaint.String()))
	}
	return failed
}

func damaged(err error) error { return fmt.Errorf("%s is damaged: %w", theArchive, err) }
