// Package featurefile writes the labels of a node into a feature file of node-feature-discovery
// (NFD), whose worker gives them to the node. It needs no access to the API server.
//
// It is the only home of the format of these files.
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

// Times of the file. NFD drops the labels of a file that has expired, so that those of a daemon
// that was removed go by themselves.
const (
	// Lifetime is how long after it was written the file of a daemon expires.
	Lifetime = time.Hour
	// retry is how long after an error it is tried again.
	retry = 30 * time.Second
)

// maxFile is the largest file that NFD reads, in bytes.
const maxFile = 64 << 10

// marker is in every file with the labels of GPUs, whichever program wrote it.
const marker = "nvidia.com/gpu.count"

// ownPrefix is that of labels that this program alone gives.
const ownPrefix = "gpu-device-plugin.github.io/"

// expiryComment says when the labels in the lines after it expire.
const expiryComment = "# +expiry-time="

// A Target is a file and what is to be in it.
type Target struct {
	// Path is the file; empty for none. Then a file that was written stays where it is until it
	// expires.
	Path string
	// Labels are nil as long as they are not known: then the file keeps the labels that it has.
	Labels map[string]string
	// Renewal is how often the file is written although nothing changed; 0 for never.
	Renewal time.Duration
	// Lifetime is how long after it was written the file expires; 0 for never.
	Lifetime time.Duration
}

// A Writer keeps a feature file up to date. It removes a file only when it has written the labels
// under another name in the same folder: otherwise labels would vanish with each restart.
type Writer struct {
	// Wanted returns what is to be written, and channels that are closed when the path or the labels
	// change.
	Wanted func() (wanted Target, path, labels <-chan struct{})
	// Problem gets the reason why the file differs from what is wanted, and nil when it does not any
	// more. Other tasks may publish there, too.
	Problem *feed.Feed[error]

	reported error
	written  string // the path that was written last; empty for none
}

// Run writes the file when Wanted changes, and anew before it expires, until ctx ends. Then it
// returns nil.
func (w *Writer) Run(ctx context.Context) error {
	for {
		wanted, path, labels := w.Wanted()
		next := wanted.Renewal
		err := w.write(wanted)
		if err != nil {
			next = retry
		}
		w.report(ctx, err)
		var due <-chan time.Time
		if next > 0 {
			due = time.After(next)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-path:
		case <-labels:
		case <-due:
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

// renew has labels that an earlier process wrote expire later: whether they still hold is not
// known.
func renew(wanted Target, now time.Time) error {
	// what cannot be read has no time at which it expires, like what has none
	content, _ := statefile.Read(wanted.Path, maxFile)
	expiry, rest, _ := cutExpiry(string(content))
	left := expiry.Sub(now)
	if left <= 0 || left > wanted.Lifetime-wanted.Renewal {
		return nil
	}
	later := []byte(expiryLine(now.Add(wanted.Lifetime)) + rest)
	if err := statefile.Write(wanted.Path, later, 0o644, nil); err != nil {
		return fmt.Errorf("write feature file: %w", err)
	}
	return nil
}

// report publishes and logs a problem when it is another one than before.
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

// Write puts a file with the labels in the place of the file at path. NFD never sees a part of one:
// it ignores the temporary file, whose name begins with a dot. Labels expire at a time, or never if
// that is zero.
func Write(path string, labels map[string]string, expires time.Time) error {
	content := Content(labels, expires)
	if len(content) > maxFile {
		return fmt.Errorf("the feature file has %d bytes, and node-feature-discovery reads %d", len(content), maxFile)
	}
	if err := statefile.Write(path, content, 0o644, nil); err != nil {
		return fmt.Errorf("write feature file: %w", err)
	}
	return nil
}

// Print prints labels as a feature file has them.
func Print(w io.Writer, labels map[string]string) error {
	if _, err := w.Write(Content(labels, time.Time{})); err != nil {
		return fmt.Errorf("print labels: %w", err)
	}
	return nil
}

// Content returns a feature file: one label in a line, in the order of their keys.
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

// cutExpiry returns when the labels of a feature file expire, and what comes after that line. It
// returns false if they never do.
func cutExpiry(content string) (expiry time.Time, rest string, expires bool) {
	first, rest, _ := strings.Cut(content, "\n")
	expiry, err := time.Parse(time.RFC3339, strings.TrimPrefix(first, expiryComment))
	return expiry, rest, err == nil
}

// prepare makes the folder of a file if the folder above is there, removes what a process left that
// was killed while it wrote, and returns an error if another program has labels of GPUs there: then
// NFD would mix the two. It returns the files of earlier names: the one that was written last, and
// those of an earlier process of this program.
func prepare(path, written string, now time.Time) (earlier []string, err error) {
	folder, own := filepath.Split(path)
	if err := os.Mkdir(filepath.Clean(folder), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the folder of the feature file: %w; mount the folder of node-feature-discovery there",
			err)
	}
	_ = statefile.Sweep(folder) // tried again next time
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("read the folder of feature files: %w", err)
	}
	for _, e := range entries {
		name, path := e.Name(), filepath.Join(folder, e.Name())
		if name == own || strings.HasPrefix(name, ".") {
			continue
		}
		// one that cannot be read has no labels for NFD either, which follows links
		content, err := statefile.Read(path, maxFile)
		switch {
		case path == written, err == nil && bytes.Contains(content, []byte("\n"+ownPrefix)):
			if e.Type().IsRegular() {
				earlier = append(earlier, path)
			}
		case err == nil && hasGPULabels(content, now):
			return nil, fmt.Errorf("%s has labels of GPUs already: remove the program that writes it, such as gpu-feature-discovery, and the file",
				path)
		}
	}
	return earlier, nil
}

// hasGPULabels reports whether a feature file has labels of GPUs that have not expired.
func hasGPULabels(content []byte, now time.Time) bool {
	expiry, _, expires := cutExpiry(string(content))
	return bytes.Contains(content, []byte(marker)) && (!expires || now.Before(expiry))
}
