package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// DefaultDir is where runtimes look for specs that are made while the node is up.
const DefaultDir = "/var/run/cdi"

// maxRetired is how many names of devices that are not there any more stay in a spec.
const maxRetired = 128 // two layouts of 8 GPUs with 7 MIG devices each

// A Writer writes the spec files of one directory. It is for one goroutine.
type Writer struct {
	dir   string
	root  fs.FS
	found found
}

// NewWriter returns a Writer of files in dir. Root is the file system of this process, in which the
// driver's files are looked for.
func NewWriter(dir string, root fs.FS) *Writer {
	return &Writer{dir: dir, root: root}
}

// Written says which names the spec files have. It is immutable; the zero value has none.
type Written struct {
	devices    map[string]bool // of the class containeredits.CDIGPU
	companions map[containeredits.CDIClass]bool
	unlimited  string // why containers cannot be held to limits by the driver; empty if they can
	err        error
}

// Apply writes the spec files that differ from what is wanted, and returns the names that the files
// have then. The error says which file could not be written; its earlier content is still there.
func (w *Writer) Apply(wanted Wanted) (Written, error) {
	made, err := wanted.specs(w.root, &w.found)
	if err != nil {
		err = fmt.Errorf("make CDI specs: %w", err)
	}
	written := Written{devices: map[string]bool{}, companions: map[containeredits.CDIClass]bool{},
		unlimited: w.found.hook.unlimited(w.root)}
	for class, spec := range made {
		needed := spec.Devices // the file may keep others, too
		names, problem := w.write(class, spec, wanted.Edits.IDs)
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("write the CDI spec of %s: %w", spec.Kind, problem))
		}
		if class == containeredits.CDIGPU {
			written.devices = names
		} else {
			written.companions[class] = !slices.ContainsFunc(needed, func(d specs.Device) bool { return !names[d.Name] })
		}
	}
	written.err = err
	return written, err
}

// write replaces a spec file if its content differs, and returns the names of the devices that are
// in the file as they should be. By says how containers are given devices. If the file cannot be
// written, these are the devices that were in it before and did not change.
func (w *Writer) write(class containeredits.CDIClass, spec *specs.Spec, by containeredits.IDStrategy) (map[string]bool,
	error) {
	name := cdilib.GenerateSpecName(containeredits.CDIVendor, string(class)) + ".json"
	file := w.read(name)
	if file != nil {
		retire(spec, file, by)
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, err
	}
	spec.Version = version
	path := filepath.Join(w.dir, name)
	if there, lost := os.Lstat(path); !same(file, spec) || lost != nil || !there.Mode().IsRegular() {
		err = w.replace(name, spec) // also in the place of a link: what it points to belongs to somebody else
	} else if there.Mode().Perm() != readableByAll {
		err = os.Chmod(path, readableByAll)
	}
	if err != nil {
		return alike(spec, file), err
	}
	return alike(spec, spec), nil
}

// DeviceFiles returns the paths of the spec files of devices in a folder of specs. NVIDIA's device
// plugin uses the same names. A folder that is not there has none.
func DeviceFiles(dir string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !statefile.IsAbsent(err) {
		return nil, fmt.Errorf("list the CDI specs of devices: %w", err)
	}
	for _, e := range entries {
		class, ours := strings.CutPrefix(e.Name(), cdilib.GenerateSpecName(containeredits.CDIVendor, ""))
		if class, isSpec := strings.CutSuffix(class, ".json"); ours && isSpec && class != "" {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}

// readableByAll is the mode of spec files: runtimes of other users read them, too.
const readableByAll = 0o644

// replace writes a spec file. A file that a runtime would refuse does not take the old one's place.
func (w *Writer) replace(name string, spec *specs.Spec) error {
	content, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(w.dir, 0o755); err != nil {
		return err
	}
	return statefile.Write(filepath.Join(w.dir, name), content, readableByAll, func(temporary string) error {
		_, err := cdilib.ReadSpec(temporary, 0)
		return err
	})
}

// alike returns the names of the devices that both specs give containers in the same way.
func alike(spec, file *specs.Spec) map[string]bool {
	names := map[string]bool{}
	if file == nil || !same(spec.ContainerEdits, file.ContainerEdits) {
		return names
	}
	devices := map[string]specs.Device{}
	for _, d := range file.Devices {
		devices[d.Name] = d
	}
	for _, d := range spec.Devices {
		if f, has := devices[d.Name]; has && same(d, f) {
			names[d.Name] = true
		}
	}
	return names
}

// same reports whether two specs, or parts of specs, are the same in a file.
func same[T any](a, b T) bool {
	textA, errA := json.Marshal(a)
	textB, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(textA, textB)
}

// maxSpec is the largest spec file that is read, in bytes. One device takes some hundred.
const maxSpec = 16 << 20

// read returns a spec file as it is; nil if it is not there, or is of no use: a new file must not
// have what runtimes refuse.
func (w *Writer) read(name string) *specs.Spec {
	path := filepath.Join(w.dir, name)
	if _, err := statefile.Read(path, maxSpec); err != nil {
		return nil
	}
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		return nil
	}
	return spec.Spec
}

// retire adds to a spec the devices of the file before it that it does not have: containers may
// have been given them. An index that nothing has any more is kept where containers are given
// devices by index.
func retire(spec, before *specs.Spec, by containeredits.IDStrategy) {
	if before.Kind != spec.Kind {
		return
	}
	have := map[string]bool{}
	for _, d := range spec.Devices {
		have[d.Name] = true
	}
	retired := 0
	for _, d := range before.Devices {
		index := strings.Trim(d.Name, "0123456789:") == ""
		if !have[d.Name] && retired < maxRetired && d.Name != everyDevice && (!index || by == containeredits.ByIndex) {
			have[d.Name] = true
			retired++
			spec.Devices = append(spec.Devices, d)
		}
	}
}

// Lacks returns the devices of a plan, by UUID, that containers cannot be given by CDI, each with
// the reason.
func (w Written) Lacks(wanted Wanted) map[string]string {
	lacks := map[string]string{}
	why := "its CDI spec is not written yet"
	if w.err != nil {
		why = w.err.Error()
	}
	companions := true
	for class := range containeredits.CDICompanions(wanted.Snapshot.Control, wanted.Edits) {
		companions = companions && w.companions[class]
	}
	for _, r := range wanted.Plan.Resources {
		for _, d := range r.Members() {
			switch {
			case !companions || !w.limits(d.Sharing) || !isToken(d) && !w.devices[containeredits.CDIName(d, wanted.Edits.IDs)]:
				lacks[d.UUID] = why
			case d.Sharing == resource.InDriverUnits && w.unlimited != "":
				lacks[d.UUID] = w.unlimited
			}
		}
	}
	return lacks
}

// limits reports whether the limits of devices that are shared so are in specs.
func (w Written) limits(mode resource.SharingMode) bool {
	switch mode {
	case resource.InMPSUnits, resource.Percentage:
		return w.companions[containeredits.CDIMemory] && w.companions[containeredits.CDIThreads]
	case resource.InDriverUnits:
		return w.companions[containeredits.CDIDriverMemory]
	case resource.Unshared, resource.TimeSliced, resource.MPS, resource.InUnits:
	}
	return true
}
