package draslices

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// publishedState is the file that says which GPUs may be in slices.
type publishedState struct {
	Version int      `json:"version"`
	GPUs    []string `json:"gpus"`
}

// Reread reads which GPUs may be in slices: another process of this program may publish them. An error means that nobody knows.
func (d *Devices) Reread() error {
	if d.o.StateDir == "" {
		return nil
	}
	d.publishing.Lock()
	defer d.publishing.Unlock()
	var kept publishedState
	path := filepath.Join(d.o.StateDir, publishedFile)
	found, err := files.ReadState(path, maxFile, fileVersion, &kept)
	if err != nil {
		err = fmt.Errorf("read which GPUs are in slices, which is kept as %s: %w", publishedFile+files.Damaged, err)
		d.unknown(err.Error())
		return err
	}
	if _, err := os.Lstat(path + files.Damaged); !found && err == nil {
		d.unknown("an earlier process could not read which GPUs are in slices: " + path + files.Damaged)
		return nil
	}
	gpus := map[string]bool{}
	for _, uuid := range kept.GPUs {
		gpus[uuid] = true
	}
	was := d.published.Value()
	if was == nil && d.publication.Value().Problem != "" {
		d.publication.Publish(Publication{})
	}
	if was == nil || !maps.Equal(gpus, was) {
		d.published.Publish(gpus)
	}
	return nil
}

// NotPublished returns an error if one of the GPUs may be in a slice by what is on disk now, which another process may have written.
func (d *Devices) NotPublished(gpus []string) error {
	_ = d.Reread() // what is not known is that a GPU is published
	published := d.published.Value()
	for _, uuid := range gpus {
		if published[uuid] {
			return fmt.Errorf("GPU %s may be in a ResourceSlice, from which another pod gets it", uuid)
		}
	}
	return nil
}

// unknown notes that all GPUs may be in slices, and why.
func (d *Devices) unknown(why string) {
	if d.publication.Value().Problem == "" {
		d.publication.Publish(Publication{Problem: why})
	}
	if d.published.Value() != nil {
		d.published.Publish(nil)
	}
}

// SetPublished notes which GPUs may be in slices from now on, by UUID. It is called before they are written, and after it is certain that
// others are not there any more. What it notes is on disk when it returns nil.
func (d *Devices) SetPublished(gpus map[string]bool) error {
	d.publishing.Lock()
	defer d.publishing.Unlock()
	if was := d.published.Value(); was != nil && maps.Equal(was, gpus) {
		return nil
	}
	if d.o.StateDir != "" {
		state := publishedState{Version: fileVersion, GPUs: slices.Sorted(maps.Keys(gpus))}
		if err := files.WriteState(filepath.Join(d.o.StateDir, publishedFile), state); err != nil {
			return fmt.Errorf("write which GPUs are in slices: %w", err)
		}
	}
	d.published.Publish(maps.Clone(gpus))
	return nil
}
