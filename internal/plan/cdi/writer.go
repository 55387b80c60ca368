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

// DefaultDir is the runtimes' folder of specs created while the node is up.
const DefaultDir = "/var/run/cdi"

// maxRetired is the number of names of missing devices kept in a spec.
const maxRetired = 128 // two layouts of 8 GPUs with 7 MIG devices each

// A Writer writes the spec files of one directory. It is for one goroutine.
type Writer struct {
	dir   string
	root  fs.FS
	found searchResult
}

// NewWriter returns a Writer of files in dir. It looks for the driver's files in root, the file
// system of this process.
func NewWriter(dir string, root fs.FS) *Writer {
	return &Writer{dir: dir, root: root}
}

// Written has the names in the spec files. It is immutable; the zero value has none.
type Written struct {
	devices         map[string]bool // of class containeredits.CDIGPU
	companions      map[containeredits.CDIClass]bool
	unlimitedReason string // why the driver cannot enforce limits of containers; empty if the driver can
	err             error
}

// Apply writes changed spec files, and returns the names in all files. The error names files that
// could not be written and keep their earlier content.
func (w *Writer) Apply(wanted Wanted) (Written, error) {
	made, err := wanted.specs(w.root, &w.found)
	if err != nil {
		err = fmt.Errorf("make CDI specs: %w", err)
	}
	written := Written{devices: map[string]bool{}, companions: map[containeredits.CDIClass]bool{},
		unlimitedReason: w.found.hook.unlimitedReason(w.root)}
	for class, spec := range made {
		needed := spec.Devices // the file may also keep others
		names, problem := w.write(class, spec, wanted.Edits.IDs)
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("write the CDI spec of %s: %w", spec.Kind, problem))
		}
		if class == containeredits.CDIGPU {
			written.devices = names
		} else {
			written.companions[class] = !slices.ContainsFunc(needed,
				func(d specs.Device) bool { return !names[d.Name] })
		}
	}
	written.err = err
	return written, err
}

// write replaces a spec file if the content differs, and returns the names of the devices that are
// correct in the file. After a failure these are the earlier, unchanged devices. By is how
// containers refer to devices.
func (w *Writer) write(
	class containeredits.CDIClass, spec *specs.Spec, by containeredits.IDStrategy,
) (map[string]bool, error) {
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
		err = w.replace(name, spec) // also replaces a link, whose target belongs to another program
	} else if there.Mode().Perm() != readableByAll {
		err = os.Chmod(path, readableByAll)
	}
	if err != nil {
		return alike(spec, file), err
	}
	return alike(spec, spec), nil
}

// DeviceFiles returns the paths of the spec files of devices in a folder of specs; none for a
// missing folder. NVIDIA's device plugin uses the same names.
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

// readableByAll is the mode of spec files: runtimes of other users also read them.
const readableByAll = 0o644

// replace writes a spec file. An invalid file does not replace the old one.
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

// alike returns the names of the devices with the same edits in both specs.
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

// same reports whether two specs, or parts of specs, have the same text in a file.
func same[T any](a, b T) bool {
	textA, errA := json.Marshal(a)
	textB, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(textA, textB)
}

// maxSpec limits a spec file, in bytes. One device takes some hundred.
const maxSpec = 16 << 20

// read returns a spec file; nil for a missing or invalid file, because a new file must not contain
// what runtimes refuse.
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

// retire copies devices missing in the spec from the previous file, because containers may use
// them. It copies an index without a device only if containers refer to devices by index.
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

// Lacks returns the devices of a plan, by UUID, without CDI for containers, each with the reason.
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
			case !companions || !w.limits(d.Sharing) || !isToken(d) &&
				!w.devices[containeredits.CDIName(d, wanted.Edits.IDs)]:
				lacks[d.UUID] = why
			case d.Sharing == resource.InDriverUnits && w.unlimitedReason != "":
				lacks[d.UUID] = w.unlimitedReason
			}
		}
	}
	return lacks
}

// limits reports whether the limits for a sharing mode are in specs.
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
