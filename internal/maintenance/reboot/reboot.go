// Package reboot asks for a restart of the node by a file, as kured and other programs look for it.
// Nothing here restarts a node.
//
// Others write the same file, such as Debian's packages. Only a file whose text is this program's
// is removed.
//
// The text ends with the boot ID. Where the file outlives a restart of the node, it asks for no
// other one: the driver may not come, so that nothing is known, and the node would be restarted
// again and again.
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
	// begins is how the text of this program's file begins.
	begins = "gpu-device-plugin asks for a restart of this node: "
	// ofBoot is before the boot ID, which a parenthesis ends.
	ofBoot = " (boot "
	// maxText is the longest text that may be this program's, in bytes.
	maxText = 4096
	// retry is how long after an error it is tried again.
	retry = 30 * time.Second
	// diskPatience is how long it is waited for the disk.
	diskPatience = 2 * time.Second
)

// A Sentinel is what the file is to be: kured's word for it.
type Sentinel struct {
	// Path is the file; empty for none. One that was written before is removed.
	Path string
	// Known is whether it is known that the node needs a restart, or needs none. Otherwise the file
	// stays as it is.
	Known bool
	// Reason is why the node needs a restart; empty where it needs none.
	Reason string
}

// An Asker keeps the file. One process of a node does so at a time.
type Asker struct {
	// Wanted returns what is wanted, and channels that are closed when that may change.
	Wanted func() (wanted Sentinel, configured, looked <-chan struct{})
	Clock  clock.Clock
	// BootID is that of the node; empty if it is not known. Then a file from before a restart stays as
	// long as nothing is known.
	BootID string
	// Disk does the work on the file; nil is one of its own.
	Disk *statefile.Disk

	asked string // the path of the last file that may be this program's
}

// Run writes and removes the file until ctx ends, and then returns nil, also when the disk does not
// answer. The file stays then.
func (a *Asker) Run(ctx context.Context) error {
	disk, said := cmp.Or(a.Disk, statefile.NewDisk()), ""
	for {
		wanted, configured, looked := a.Wanted()
		err := disk.Do(ctx, diskPatience, func() error { return a.step(ctx, wanted) })
		problem := ""
		var again <-chan time.Time
		if err != nil && ctx.Err() == nil { // what a disk does late may not be wanted any more
			problem, again = err.Error(), a.Clock.After(retry)
		}
		if problem != "" && problem != said {
			klog.FromContext(ctx).Info("Cannot keep the file that asks for a restart of the node", "reason", problem)
		}
		said = problem
		select {
		case <-ctx.Done():
			return nil
		case <-configured:
		case <-looked:
		case <-again:
		}
	}
}

// step does what is wanted. When ctx ends it does no more: another process may keep the file then.
func (a *Asker) step(ctx context.Context, w Sentinel) error {
	if a.asked != "" && a.asked != w.Path {
		if err := withdraw(ctx, a.asked); err != nil {
			return err
		}
		a.asked = ""
	}
	if w.Path == "" {
		return nil
	}
	return a.keep(ctx, w)
}

// keep writes or removes the file of a path.
func (a *Asker) keep(ctx context.Context, w Sentinel) error {
	of, err := bootOf(w.Path)
	if err == nil && of != "" && a.BootID != "" && of != a.BootID {
		err = withdraw(ctx, w.Path)
	}
	if err != nil || !w.Known {
		return err
	}
	a.asked = w.Path
	if w.Reason == "" {
		return withdraw(ctx, w.Path)
	}
	return ask(ctx, w.Path, a.text(w.Reason))
}

// text is what the file has for a reason.
func (a *Asker) text(reason string) string {
	end := "\n"
	if a.BootID != "" {
		end = ofBoot + a.BootID + ")\n"
	}
	text := begins + strings.Join(strings.Fields(reason), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxText-len(end))], "") + end
}

// A file is written under the first of these names before it has its own, and judged under the
// second one before it is removed. A process that is killed there leaves it, and the next step ends
// what was begun.
func unfinished(path string) string { return beside(path, "new") }
func removed(path string) string    { return beside(path, "old") }

func beside(path, what string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".gpu-device-plugin."+what)
}

// read returns the line of a file that has this program's text, and no more than that; empty for
// another file.
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
	if err != nil || !strings.HasPrefix(line, begins) || !ended || rest != "" {
		return "", err
	}
	return line, nil
}

func isOurs(path string) (bool, error) {
	line, err := read(path)
	return line != "", err
}

// bootOf returns the boot ID in this program's file; empty where there is none.
func bootOf(path string) (string, error) {
	line, err := read(path)
	line, ended := strings.CutSuffix(line, ")")
	if at := strings.LastIndex(line, ofBoot); at >= 0 && ended {
		return line[at+len(ofBoot):], err
	}
	return "", err
}

// ask makes the file, unless there is one: then a restart is asked for already.
func ask(ctx context.Context, path, text string) error {
	if err := settle(path); err != nil {
		return err
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	made := unfinished(path)
	err := create(made, text)
	if err == nil {
		err = ctx.Err() // the disk may have taken its time
	}
	if err == nil {
		err = os.Link(made, path) // it replaces nothing
	}
	if left := os.Remove(made); err == nil {
		err = left
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		klog.FromContext(ctx).Info("Asked for a restart of the node", "file", path, "reason",
			strings.TrimPrefix(strings.TrimSpace(text), begins))
	}
	return err
}

// create makes a file that is not there; it follows no link.
func create(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// withdraw removes the file if it is this program's. It is judged under another name, so that what
// somebody writes meanwhile stays.
func withdraw(ctx context.Context, path string) error {
	if err := settle(path); err != nil {
		return err
	}
	if ours, err := isOurs(path); err != nil || !ours {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err() // the disk has taken its time
	}
	if err := os.Rename(path, removed(path)); err != nil && !statefile.IsAbsent(err) {
		return err
	}
	klog.FromContext(ctx).Info("Asking for no restart of the node any more", "file", path)
	return settle(path)
}

// settle ends what a process that was killed has begun. A file of somebody else that was to be
// removed gets its name again, unless there is one.
func settle(path string) error {
	if err := os.Remove(unfinished(path)); err != nil && !statefile.IsAbsent(err) {
		return err
	}
	left := removed(path)
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
