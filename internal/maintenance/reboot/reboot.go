// Package reboot requests a restart of the node through the file watched by kured and other
// programs. The package restarts no node.
//
// Other programs, such as Debian's packages, write the same file. Only a file with the text of this
// program is removed.
//
// The text ends with the boot ID. A file from an earlier boot requests no restart. Otherwise the
// node would restart again and again if the driver never comes up and nothing is known.
package reboot

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// textPrefix is the start of the text of this program's file.
	textPrefix = "gpu-device-plugin asks for a restart of this node: "
	// bootPrefix precedes the boot ID in parentheses.
	bootPrefix = " (boot "
	// maxText is the length limit of this program's text, in bytes.
	maxText = 4096
	// retry is the pause after an error.
	retry = 30 * time.Second
	// diskPatience limits the wait for the disk.
	diskPatience = 2 * time.Second
)

// A Sentinel is the wanted state of the file; the word is kured's.
type Sentinel struct {
	// Path is the file; empty for no file. A file at an earlier Path is removed.
	Path string
	// Known is true if this program knows whether the node needs a restart. Otherwise the file
	// stays unchanged.
	Known bool
	// Reason is why the node needs a restart; empty if not needed.
	Reason string
}

// An Asker writes and removes the file. Only one process of a node may run an Asker.
type Asker struct {
	// Wanted returns the wanted state, and channels that are closed when the state may change. A channel
	// may be nil.
	Wanted func() (wanted Sentinel, changed [3]<-chan struct{})
	Clock  clock.Clock
	// BootID is the boot ID of the node; empty if unknown. Then a file from before a restart stays
	// as long as nothing is known.
	BootID string
	// Disk accesses the file; nil means a Disk of the Asker's own.
	Disk *statefile.Disk

	lastPath string // path of the last file possibly written by this program
}

// Run writes and removes the file until ctx ends, and then returns nil, even while the disk does
// not answer. The file stays at the end.
func (a *Asker) Run(ctx context.Context) error {
	disk, said := cmp.Or(a.Disk, statefile.NewDisk()), ""
	for {
		wanted, changed := a.Wanted()
		err := disk.Do(ctx, diskPatience, func() error { return a.step(ctx, wanted) })
		problem := ""
		var again <-chan time.Time
		if err != nil && ctx.Err() == nil { // late work of the disk may be out of date
			problem, again = err.Error(), a.Clock.After(retry)
		}
		if problem != "" && problem != said {
			klog.FromContext(ctx).Info("Cannot write or remove the file that requests a restart of the node",
				"reason", problem)
		}
		said = problem
		select {
		case <-ctx.Done():
			return nil
		case <-changed[0]:
		case <-changed[1]:
		case <-changed[2]:
		case <-again:
		}
	}
}

// step makes the file match the wanted state. After the end of ctx it changes nothing, because
// another process may own the file.
func (a *Asker) step(ctx context.Context, w Sentinel) error {
	if a.lastPath != "" && a.lastPath != w.Path {
		if err := withdraw(ctx, a.lastPath); err != nil {
			return err
		}
		a.lastPath = ""
	}
	if w.Path == "" {
		return nil
	}
	return a.update(ctx, w)
}

// update writes or removes the file of a path.
func (a *Asker) update(ctx context.Context, w Sentinel) error {
	of, err := bootOf(w.Path)
	if err == nil && of != "" && a.BootID != "" && of != a.BootID {
		err = withdraw(ctx, w.Path)
	}
	if err != nil || !w.Known {
		return err
	}
	a.lastPath = w.Path
	if w.Reason == "" {
		return withdraw(ctx, w.Path)
	}
	return request(ctx, w.Path, a.text(w.Reason))
}

// text returns the text of the file for a reason.
func (a *Asker) text(reason string) string {
	end := "\n"
	if a.BootID != "" {
		end = bootPrefix + a.BootID + ")\n"
	}
	text := textPrefix + strings.Join(strings.Fields(reason), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxText-len(end))], "") + end
}

// A new file is written under the first of these names before the rename to the final name. A file
// is moved to the second name and checked before the removal. If a process is killed in between,
// the next step completes the work.
func newPath(path string) string   { return beside(path, "new") }
func checkPath(path string) string { return beside(path, "old") }

func beside(path, what string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".gpu-device-plugin."+what)
}

// read returns the line of a file that has exactly the text of this program; empty for another
// file.
func read(path string) (line string, err error) {
	switch info, err := os.Lstat(path); {
	case statefile.IsAbsent(err):
		return "", nil
	case err != nil:
		return "", err
	case !info.Mode().IsRegular() || info.Size() > maxText:
		return "", nil
	}
	text, err := statefile.Read(path, maxText)
	if statefile.IsAbsent(err) { // removed meanwhile
		return "", nil
	}
	line, rest, ended := strings.Cut(string(text), "\n")
	if err != nil || !strings.HasPrefix(line, textPrefix) || !ended || rest != "" {
		return "", err
	}
	return line, nil
}

func isOurs(path string) (bool, error) {
	line, err := read(path)
	return line != "", err
}

// bootOf returns the boot ID in this program's file; empty without a boot ID.
func bootOf(path string) (string, error) {
	line, err := read(path)
	line, ended := strings.CutSuffix(line, ")")
	if at := strings.LastIndex(line, bootPrefix); at >= 0 && ended {
		return line[at+len(bootPrefix):], err
	}
	return "", err
}

// request creates the file, unless a file exists: then a restart is already requested.
func request(ctx context.Context, path, text string) error {
	if err := finishInterrupted(path); err != nil {
		return err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	made := newPath(path)
	err := create(made, text)
	if err == nil {
		err = ctx.Err() // the disk may have been slow
	}
	if err == nil {
		err = os.Link(made, path) // replaces no file
	}
	if left := os.Remove(made); err == nil {
		err = left
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		klog.FromContext(ctx).Info("Requested a restart of the node", "file", path, "reason",
			strings.TrimPrefix(strings.TrimSpace(text), textPrefix))
	}
	return err
}

// create creates a file; it fails if the name exists, and follows no link.
func create(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// withdraw removes the file if it is this program's. The check uses another name: a file written
// meanwhile stays.
func withdraw(ctx context.Context, path string) error {
	if err := finishInterrupted(path); err != nil {
		return err
	}
	if ours, err := isOurs(path); err != nil || !ours {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err() // the disk was slow
	}
	if err := os.Rename(path, checkPath(path)); err != nil && !statefile.IsAbsent(err) {
		return err
	}
	klog.FromContext(ctx).Info("Withdrew the request for a restart of the node", "file", path)
	return finishInterrupted(path)
}

// finishInterrupted completes the work of a killed process. Another program's file that was being checked gets
// its name back, unless a new file exists.
func finishInterrupted(path string) error {
	if err := os.Remove(newPath(path)); err != nil && !statefile.IsAbsent(err) {
		return err
	}
	left := checkPath(path)
	ours, err := isOurs(left)
	if err != nil {
		return err
	}
	if !ours {
		if err := os.Link(left, path); err != nil && !statefile.IsAbsent(err) && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := os.Remove(left); err != nil && !statefile.IsAbsent(err) {
		return err
	}
	return nil
}
