// Package featurefile writes the labels of a node into a feature file of
// node-feature-discovery (NFD), whose worker sets them on the Node. The package needs no
// access to the API server.
//
// No other package knows the format of feature files.
package featurefile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// Times of the file. NFD drops the labels of an expired file, so the labels of a removed
// daemon disappear without help.
const (
	// Lifetime is the time from a write of the daemon's file to its expiry.
	Lifetime = time.Hour
	// retry is the pause after an error.
	retry = 30 * time.Second
)

// maxFile is the largest file that NFD reads, in bytes.
const maxFile = 64 << 10

// marker is in every file with labels of GPUs, from any program.
const marker = "nvidia.com/gpu.count"

// ownPrefix is the prefix of labels that only this program sets.
const ownPrefix = "gpu-device-plugin.github.io/"

// expiryComment begins the line with the expiry of the labels in the following lines.
const expiryComment = "# +expiry-time="

// A Target is a file and its wanted content.
type Target struct {
	// Path is the file; empty for none. A file written before then stays until it expires.
	Path string
	// Labels are nil while they are unknown: the file then keeps its labels.
	Labels map[string]string
	// Renewal is the interval of writes without a change; 0 for never.
	Renewal time.Duration
	// Lifetime is the time from a write to the expiry of the file; 0 for never.
	Lifetime time.Duration
}

// DaemonTarget returns the target of the device plugin.
func DaemonTarget(path string, labels map[string]string) Target {
	return Target{Path: path, Labels: labels, Renewal: Lifetime / 4, Lifetime: Lifetime}
}

// DiscoveryTarget returns the target of gpu-feature-discovery, which writes at each interval, or only
// once if the interval is 0.
func DiscoveryTarget(path string, labels map[string]string, interval time.Duration) Target {
	if interval == 0 {
		return Target{Path: path, Labels: labels}
	}
	return Target{Path: path, Labels: labels, Renewal: interval, Lifetime: max(4*interval, Lifetime)}
}

// A Printer prints labels for which no file is wanted.
type Printer struct {
	Output io.Writer
	// Wanted returns the target, and channels that are closed when the path or the labels change. A
	// target with labels and without a path is printed at once, and again after each Renewal.
	Wanted func() (wanted Target, path, labels <-chan struct{})
}

// Run prints labels until ctx ends, and then returns nil. It returns an error of Output.
func (p *Printer) Run(ctx context.Context) error {
	for {
		wanted, path, labels := p.Wanted()
		var next time.Duration
		if wanted.Path == "" && wanted.Labels != nil {
			if err := Print(p.Output, wanted.Labels); err != nil {
				return err
			}
			next = wanted.Renewal
		}
		if !await(ctx, next, path, labels) {
			return nil
		}
	}
}

// await waits until one of the channels is closed or, if next is not 0, for that long. It returns false
// if ctx ends first.
func await(ctx context.Context, next time.Duration, path, labels <-chan struct{}) bool {
	var due <-chan time.Time
	if next > 0 {
		due = time.After(next)
	}
	select {
	case <-ctx.Done():
		return false
	case <-path:
	case <-labels:
	case <-due:
	}
	return true
}

// A Writer keeps a feature file up to date. It removes a file only after writing the
// labels under another name in the same folder: otherwise labels would vanish with each
// restart.
type Writer struct {
	// Wanted returns the target, and channels that are closed when the path or the labels
	// change.
	Wanted func() (wanted Target, path, labels <-chan struct{})
	// Problem receives the reason why the file is not as wanted, and nil after the repair.
	// Other tasks may also publish to it.
	Problem *feed.Feed[error]

	reported error
	written  string // last written path; empty for none
}

// Run writes the file when Wanted changes, and before the file expires, until ctx ends.
// Then it returns nil.
func (w *Writer) Run(ctx context.Context) error {
	for {
		wanted, path, labels := w.Wanted()
		next := wanted.Renewal
		err := w.write(wanted)
		if err != nil {
			next = retry
		}
		w.report(ctx, err)
		if !await(ctx, next, path, labels) {
			return nil
		}
	}
}

// write writes the file, unless another program's file has labels of GPUs.
func (w *Writer) write(wanted Target) error {
	now := time.Now()
	switch {
	case wanted.Path == "":
		return nil
	case wanted.Labels == nil:
		return renew(wanted, now)
	}
	earlier, err := prepare(wanted.Path, w.written, now)
	if err != nil {
		return err
	}
	var expires time.Time
	if wanted.Lifetime > 0 {
		expires = now.Add(wanted.Lifetime)
	}
	if err := Write(wanted.Path, wanted.Labels, expires); err != nil {
		return err
	}
	for _, path := range earlier {
		if err := statefile.Remove(path); err != nil {
			return fmt.Errorf("remove the feature file of the earlier name: %w", err)
		}
	}
	w.written = filepath.Clean(wanted.Path)
	return nil
}

// renew extends the expiry of labels from an earlier process whose correctness is unknown.
func renew(wanted Target, now time.Time) error {
	// an unreadable file is treated like a file without expiry
	content, _ := statefile.Read(wanted.Path, maxFile)
	expiry, body, _ := cutExpiry(string(content))
	remaining := expiry.Sub(now)
	if remaining <= 0 || remaining > wanted.Lifetime-wanted.Renewal {
		return nil
	}
	later := []byte(expiryLine(now.Add(wanted.Lifetime)) + body)
	if err := statefile.Write(wanted.Path, later, 0o644, nil); err != nil {
		return fmt.Errorf("write feature file: %w", err)
	}
	return nil
}

// report publishes and logs a problem if it differs from the last one.
func (w *Writer) report(ctx context.Context, err error) {
	switch log := klog.FromContext(ctx); {
	case fmt.Sprint(w.reported) == fmt.Sprint(err):
		return
	case err != nil:
		log.Error(err, "Labels are not written")
	default:
		log.Info("Labels are written again")
	}
	w.reported = err
	w.Problem.Publish(err)
}

// Write replaces the file at path by a file with the labels. NFD never sees a partial
// file: it ignores the temporary file, whose name begins with a dot. The labels expire at
// the time expires, or never if it is zero.
func Write(path string, labels map[string]string, expires time.Time) error {
	content := Content(labels, expires)
	if len(content) > maxFile {
		return fmt.Errorf("the feature file has %d bytes, and node-feature-discovery reads at most %d", len(content),
			maxFile)
	}
	if err := statefile.Write(path, content, 0o644, nil); err != nil {
		return fmt.Errorf("write feature file: %w", err)
	}
	return nil
}

// Print prints labels in the format of a feature file.
func Print(w io.Writer, labels map[string]string) error {
	if _, err := w.Write(Content(labels, time.Time{})); err != nil {
		return fmt.Errorf("print labels: %w", err)
	}
	return nil
}

// Content returns a feature file: one label a line, in the order of the keys.
func Content(labels map[string]string, expires time.Time) []byte {
	var b bytes.Buffer
	if !expires.IsZero() {
		b.WriteString(expiryLine(expires))
	}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&b, "%s=%s\n", key, labels[key])
	}
	return b.Bytes()
}

func expiryLine(expires time.Time) string {
	return expiryComment + expires.UTC().Format(time.RFC3339) + "\n"
}

// cutExpiry returns the expiry of the labels of a feature file and the content after the
// expiry line. It returns false if the labels never expire.
func cutExpiry(content string) (expiry time.Time, body string, expires bool) {
	first, body, _ := strings.Cut(content, "\n")
	expiry, err := time.Parse(time.RFC3339, strings.TrimPrefix(first, expiryComment))
	return expiry, body, err == nil
}

// prepare creates the folder of a file if the parent folder exists, and removes temporary
// files of killed processes. It returns an error if another program has labels of GPUs in
// the folder, because NFD would mix the labels. It returns the files of earlier names: the
// last written file, and files of earlier processes of this program.
func prepare(path, written string, now time.Time) (earlier []string, err error) {
	folder, own := filepath.Split(path)
	if err := os.Mkdir(filepath.Clean(folder), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create the folder of the feature file: %w; mount the folder of "+
			"node-feature-discovery there", err)
	}
	_ = statefile.Sweep(folder) // retried at the next write
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("read the folder of feature files: %w", err)
	}
	for _, e := range entries {
		name, path := e.Name(), filepath.Join(folder, e.Name())
		if name == own || strings.HasPrefix(name, ".") {
			continue
		}
		// NFD follows links, and cannot read an unreadable file either
		content, err := statefile.Read(path, maxFile)
		switch {
		case path == written, err == nil && bytes.Contains(content, []byte("\n"+ownPrefix)):
			if e.Type().IsRegular() {
				earlier = append(earlier, path)
			}
		case err == nil && hasGPULabels(content, now):
			return nil, fmt.Errorf("%s already has labels of GPUs: remove the file and the program that writes it, "+
				"such as gpu-feature-discovery",
				path)
		}
	}
	return earlier, nil
}

// hasGPULabels reports whether a feature file has unexpired labels of GPUs.
func hasGPULabels(content []byte, now time.Time) bool {
	expiry, _, expires := cutExpiry(string(content))
	return bytes.Contains(content, []byte(marker)) && (!expires || now.Before(expiry))
}
