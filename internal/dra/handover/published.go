package handover

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// publishedState is the file that says which GPUs may be in slices.
type publishedState struct {
	Version int      `json:"version"`
	GPUs    []string `json:"gpus"`
	// Left are those that are in no slice any more, and that the device plugin has not got since: a
	// claim may have them still.
	Left []string `json:"left,omitempty"`
	// Driver is the name of the driver that publishes them; empty for dra.Driver.
	Driver string `json:"driver,omitempty"`
}

// readPublished reads which GPUs may be in slices, in one time to lead. Where the file was damaged,
// or was removed while it named GPUs, that is not known until SetPublished is called. It is work on
// the files.
func (d *Devices) readPublished(term int) error {
	if d.published.Value() != nil {
		return nil // it is known since
	}
	if d.o.StateDir == "" {
		d.during(term, func() { d.published.Publish(map[string]bool{}) })
		return nil
	}
	lose := func(why string) { d.during(term, func() { d.lose(why) }) }
	var kept publishedState
	path := filepath.Join(d.o.StateDir, publishedFile)
	found, err := statefile.ReadState(path, maxFile, fileVersion, &kept)
	if err != nil {
		err = fmt.Errorf("read which GPUs are in slices, which is kept as %s: %w", publishedFile+statefile.Damaged, err)
		lose(err.Error())
		return err
	}
	if _, err := os.Lstat(path + statefile.Damaged); !found && err == nil {
		lose("an earlier process could not read which GPUs are in slices: " + path + statefile.Damaged)
		return nil
	}
	if !found && d.onDisk {
		lose("the file that says which GPUs are in slices is gone: " + path)
		return nil
	}
	d.onDisk = len(kept.GPUs) > 0
	// an earlier lead has published since this process started
	if d.onDisk && cmp.Or(kept.Driver, dra.Driver) != d.o.Driver {
		return fmt.Errorf("%w: GPUs may be in ResourceSlices of %s", dra.ErrOtherName, cmp.Or(kept.Driver, dra.Driver))
	}
	d.during(term, func() {
		d.left, d.noted = setOf(kept.Left), setOf(kept.Left)
		d.know(setOf(kept.GPUs))
	})
	return nil
}

func setOf(uuids []string) map[string]bool {
	set := map[string]bool{}
	for _, uuid := range uuids {
		set[uuid] = true
	}
	return set
}

// hasLeft reports whether a GPU has left its slice, and the device plugin has not got it since,
// also where an earlier process saw that.
func (d *Devices) hasLeft(uuid string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.left[uuid]
}

// returned notes that the device plugin has a GPU. Run writes that.
func (d *Devices) returned(uuid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.left, uuid)
}

// retract notes that the kubelet has removed the slices of a GPU. Run writes that at once.
func (d *Devices) retract(uuid string) {
	d.mu.Lock()
	known := d.retracted[uuid]
	d.retracted[uuid] = true
	d.mu.Unlock()
	if !known {
		d.retractions.Publish(struct{}{})
	}
}

// withoutRetracted returns which GPUs may be in slices without those that were retracted; nil if
// none of them was.
func (d *Devices) withoutRetracted() map[string]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.retracted) == 0 {
		return nil
	}
	left := maps.Clone(d.published.Value())
	maps.DeleteFunc(left, func(uuid string, _ bool) bool { return d.retracted[uuid] })
	return left
}

// writeReturned writes which GPUs the device plugin has again, if that is not on disk. It is work
// on the files.
func (d *Devices) writeReturned() error {
	if gpus := d.published.Value(); gpus != nil && d.owes() {
		return d.write(gpus)
	}
	return nil
}

// owes reports whether the file does not say which GPUs have left their slices.
func (d *Devices) owes() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !maps.Equal(d.left, d.noted)
}

// Lost reports whether the record of which GPUs are in slices is lost, so that the API server has
// to be asked. Published gets a new value when that changes.
func (d *Devices) Lost() bool { return d.lost.Load() }

// lose notes that it is not known which GPUs are in slices, and why. The caller has the lock.
func (d *Devices) lose(why string) {
	if d.publication.Value().Problem == "" {
		d.publication.Publish(Publication{Problem: why})
	}
	if !d.lost.Swap(true) {
		d.published.Publish(nil)
	}
}

// know publishes which GPUs may be in slices. The caller has the lock.
func (d *Devices) know(gpus map[string]bool) {
	if now := d.publication.Value(); d.lost.Swap(false) && now == (Publication{Problem: now.Problem}) {
		d.publication.Publish(Publication{}) // the problem was that nobody knew
	}
	maps.DeleteFunc(d.retracted, func(uuid string, _ bool) bool { return !gpus[uuid] })
	d.published.Publish(gpus)
}

// SetPublished notes which GPUs may be in slices from now on, by UUID. Call it before slices are
// written, and after slices are certainly gone. The record is on disk when it returns nil. It
// returns an error when ctx ends, and when the disk does not answer for seconds; the record may
// then be written later.
func (d *Devices) SetPublished(ctx context.Context, gpus map[string]bool) error {
	d.mu.Lock()
	was, term := d.published.Value(), d.term
	d.mu.Unlock()
	if was != nil && maps.Equal(was, gpus) {
		return nil
	}
	gpus = maps.Clone(gpus)
	return d.onFiles(ctx, func() error {
		err := d.write(gpus)
		if err == nil {
			d.during(term, func() { d.know(gpus) })
		}
		return err
	})
}

// write writes which GPUs may be in slices, and which have left them. It is work on the files.
func (d *Devices) write(gpus map[string]bool) error {
	d.mu.Lock()
	maps.Copy(d.left, d.published.Value())
	maps.DeleteFunc(d.left, func(uuid string, _ bool) bool { return gpus[uuid] })
	left := maps.Clone(d.left)
	d.mu.Unlock()
	if d.o.StateDir != "" {
		state := publishedState{Version: fileVersion, GPUs: slices.Sorted(maps.Keys(gpus)),
			Left: slices.Sorted(maps.Keys(left))}
		if d.o.Driver != dra.Driver {
			state.Driver = d.o.Driver
		}
		if err := statefile.WriteStateIf(filepath.Join(d.o.StateDir, publishedFile), state, d.o.Lead); err != nil {
			return fmt.Errorf("write which GPUs are in slices: %w", err)
		}
		d.onDisk = len(gpus) > 0
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noted = left
	return nil
}
