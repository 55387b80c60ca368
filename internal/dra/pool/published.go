package pool

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

// publishedState is the file with the GPUs that may be in slices.
type publishedState struct {
	Version int      `json:"version"`
	GPUs    []string `json:"gpus"`
	// Left are GPUs that left their slices, but are not back at the device plugin: a claim
	// may still have them.
	Left []string `json:"left,omitempty"`
	// Driver is the name of the driver that publishes them; empty for dra.Driver.
	Driver string `json:"driver,omitempty"`
}

// readPublished reads which GPUs may be in slices, for one term. If the file is damaged,
// or was removed although there were GPUs in the file, the published GPUs are unknown
// until SetPublished is called. Call readPublished as work on the files.
func (d *Devices) readPublished(term int) error {
	if d.published.Value() != nil {
		return nil // already known
	}
	if d.o.StateDir == "" {
		d.inTerm(term, func() { d.published.Publish(map[string]bool{}) })
		return nil
	}
	setUnknown := func(why string) { d.inTerm(term, func() { d.setUnknown(why) }) }
	var state publishedState
	path := filepath.Join(d.o.StateDir, publishedFile)
	found, err := statefile.ReadState(path, maxFile, fileVersion, &state)
	if err != nil {
		err = fmt.Errorf("read which GPUs are in slices, which is kept as %s: %w", publishedFile+statefile.Damaged, err)
		setUnknown(err.Error())
		return err
	}
	if _, err := os.Lstat(path + statefile.Damaged); !found && err == nil {
		setUnknown("an earlier process could not read which GPUs are in slices: " + path + statefile.Damaged)
		return nil
	}
	if !found && d.onDisk {
		setUnknown("the file that says which GPUs are in slices is gone: " + path)
		return nil
	}
	d.onDisk = len(state.GPUs) > 0
	// an earlier leader published after this process started
	if d.onDisk && cmp.Or(state.Driver, dra.Driver) != d.o.Driver {
		return fmt.Errorf("%w: GPUs may be in ResourceSlices of %s", dra.ErrOtherName, cmp.Or(state.Driver, dra.Driver))
	}
	d.inTerm(term, func() {
		d.leftSlice, d.leftOnDisk = setOf(state.Left), setOf(state.Left)
		d.setKnown(setOf(state.GPUs))
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

// HasLeft reports whether a GPU has left its slice, but is not back at the device plugin,
// even if an earlier process saw the GPU leave.
func (d *Devices) HasLeft(uuid string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leftSlice[uuid]
}

// NoteReturned records that the device plugin has a GPU again. Run writes the change.
func (d *Devices) NoteReturned(uuid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.leftSlice, uuid)
}

// Retract records that the kubelet has removed the slices of a GPU. Run writes the change
// at once.
func (d *Devices) Retract(uuid string) {
	d.mu.Lock()
	known := d.retracted[uuid]
	d.retracted[uuid] = true
	d.mu.Unlock()
	if !known {
		d.retractions.Publish(struct{}{})
	}
}

// withoutRetracted returns the GPUs that may be in slices without the retracted GPUs; nil
// if no GPU is retracted.
func (d *Devices) withoutRetracted() map[string]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.retracted) == 0 {
		return nil
	}
	remaining := maps.Clone(d.published.Value())
	maps.DeleteFunc(remaining, func(uuid string, _ bool) bool { return d.retracted[uuid] })
	return remaining
}

// writeLeftSlice writes the GPUs that have left their slices, if the file is outdated.
// Call it as work on the files.
func (d *Devices) writeLeftSlice() error {
	if gpus := d.published.Value(); gpus != nil && d.isOutdated() {
		return d.write(gpus)
	}
	return nil
}

// isOutdated reports whether the file differs from leftSlice.
func (d *Devices) isOutdated() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !maps.Equal(d.leftSlice, d.leftOnDisk)
}

// Lost reports whether the GPUs in slices are unknown, so that the API server must be
// asked. Published gets a new value after each change of Lost.
func (d *Devices) Lost() bool { return d.publishedUnknown.Load() }

// setUnknown marks the published GPUs as unknown, with the reason. The caller has the
// lock.
func (d *Devices) setUnknown(why string) {
	if d.publication.Value().Problem == "" {
		d.publication.Publish(Publication{Problem: why})
	}
	if !d.publishedUnknown.Swap(true) {
		d.published.Publish(nil)
	}
}

// setKnown publishes which GPUs may be in slices. The caller has the lock.
func (d *Devices) setKnown(gpus map[string]bool) {
	if now := d.publication.Value(); d.publishedUnknown.Swap(false) && now == (Publication{Problem: now.Problem}) {
		d.publication.Publish(Publication{}) // the problem was the missing knowledge
	}
	maps.DeleteFunc(d.retracted, func(uuid string, _ bool) bool { return !gpus[uuid] })
	d.published.Publish(gpus)
}

// SetPublished records which GPUs may be in slices from now on, by UUID. Call SetPublished
// before writing slices, and after slices are certainly gone. A nil error means that the
// record is on disk. There is an error when ctx ends or the disk does not respond for
// seconds; the record may then be written later.
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
			d.inTerm(term, func() { d.setKnown(gpus) })
		}
		return err
	})
}

// write writes the GPUs that may be in slices, and the GPUs that have left. Call it as
// work on the files.
func (d *Devices) write(gpus map[string]bool) error {
	d.mu.Lock()
	maps.Copy(d.leftSlice, d.published.Value())
	maps.DeleteFunc(d.leftSlice, func(uuid string, _ bool) bool { return gpus[uuid] })
	left := maps.Clone(d.leftSlice)
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
	d.leftOnDisk = left
	return nil
}
