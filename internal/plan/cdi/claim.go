package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// ClaimSpecs are the CDI specs of the claims of a driver, with metadata files beside them. Names of
// files and CDI devices contain the name of the driver, as in all drivers with Kubernetes' library.
// A claim prepared by NVIDIA's driver under the same name has one file; a claim with devices of two
// drivers has two.
type ClaimSpecs struct {
	// Dir is the folder in which runtimes look for specs, and Driver the name of the driver.
	Dir, Driver string
}

const claimClass = "claim"

func vendorOf(driver string) string { return "k8s." + driver }

// DeviceEdits are the files and devices of a container for each GPU and MIG device of a node. They
// are immutable.
type DeviceEdits struct {
	version string
	mpsRoot string
	common  json.RawMessage
	devices map[string]json.RawMessage // by UUID
	imex    []*specs.DeviceNode        // node of IMEX channel 0; nil if the node has none
}

// DeviceEdits returns the edits for the devices of a Snapshot. If files of the driver cannot be
// read, the error names them, and earlier findings are used. Without earlier findings, there are no
// devices.
func (w *Writer) DeviceEdits(snapshot inventory.Snapshot, e containeredits.Options, o Options) (DeviceEdits, error) {
	e.IDs, e.Void, e.IMEX = containeredits.ByUUID, true, true
	wanted := Wanted{Snapshot: snapshot, Plan: resource.New(snapshot, resource.Options{MIG: resource.MIGMixed}),
		Edits: e, Options: o}
	made, err := wanted.specs(w.root, &w.found)
	spec := made[containeredits.CDIGPU]
	if spec == nil {
		return DeviceEdits{}, err
	}
	spec.Kind = vendorOf("driver") + "/" + claimClass // The version is the same for all names.
	for _, class := range slices.Sorted(maps.Keys(made)) {
		if class == containeredits.CDIGPU || class == containeredits.CDIIMEX {
			continue
		}
		for _, d := range made[class].Devices {
			spec.ContainerEdits.DeviceNodes = append(spec.ContainerEdits.DeviceNodes, d.ContainerEdits.DeviceNodes...)
			spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts, d.ContainerEdits.Mounts...)
		}
	}
	named := *spec
	// The UID of a claim may begin with a digit.
	named.Devices = append(slices.Clone(spec.Devices), specs.Device{Name: "0"})
	if imex := made[containeredits.CDIIMEX]; imex != nil {
		named.Devices = append(named.Devices, imex.Devices...)
	}
	version, problem := specs.MinimumRequiredVersion(&named)
	spec.Version = version
	g := DeviceEdits{version: version, mpsRoot: e.MPSRoot, devices: map[string]json.RawMessage{}}
	if imex := made[containeredits.CDIIMEX]; imex != nil {
		g.imex = imex.Devices[0].ContainerEdits.DeviceNodes
	}
	add := func(e specs.ContainerEdits) json.RawMessage {
		text, err := json.Marshal(e)
		problem = errors.Join(problem, err, (&cdilib.ContainerEdits{ContainerEdits: &e}).Validate())
		return text
	}
	g.common = add(spec.ContainerEdits)
	byName := map[string]json.RawMessage{}
	for _, d := range spec.Devices {
		byName[d.Name] = add(d.ContainerEdits)
	}
	for _, d := range wanted.Plan.NodeDevices() {
		g.devices[d.UUID] = byName[containeredits.CDIName(d, containeredits.ByUUID)]
	}
	if problem != nil {
		return DeviceEdits{}, errors.Join(err, fmt.Errorf("make CDI specs of claims: %w", problem))
	}
	return g, err
}

// Has reports whether the edits for a device are known.
func (g DeviceEdits) Has(uuid string) bool {
	_, known := g.devices[uuid]
	return known
}

// HasIMEX reports whether the node has the IMEX channel for containers.
func (g DeviceEdits) HasIMEX() bool { return len(g.imex) > 0 }

// A claimSpec is a specs.Spec with parts that are already JSON.
type claimSpec struct {
	Version string          `json:"cdiVersion"`
	Kind    string          `json:"kind"`
	Devices []claimDevice   `json:"devices"`
	Edits   json.RawMessage `json:"containerEdits"`
}

type claimDevice struct {
	Name  string          `json:"name"`
	Edits json.RawMessage `json:"containerEdits"`
}

// A ClaimedDevice is a device of a claim.
type ClaimedDevice struct {
	UUID string
	// MPS is the directory of the containers' MPS daemon, below the host's directory of MPS state;
	// empty for no daemon.
	MPS string
	// Env are further environment variables of an MPS client, as NAME=VALUE.
	Env []string
	// Metadata maps the host's path of each metadata file of the device to the path in the
	// container.
	Metadata map[string]string
	// IMEX gives the containers IMEX channel 0.
	IMEX bool
}

// Claim returns the content of a claim's spec file, for the claim's devices by name. All devices
// must be known. The note is one line for ClaimSpecs.Note; runtimes read the line as a comment.
func (g DeviceEdits) Claim(driver, uid string, devices map[string]ClaimedDevice, note []byte) ([]byte, error) {
	spec := claimSpec{Version: g.version, Kind: vendorOf(driver) + "/" + claimClass, Edits: g.common}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		given, known := g.devices[devices[name].UUID]
		if !known {
			return nil, fmt.Errorf("the CDI edits for device %s are not known", devices[name].UUID)
		}
		given, err := g.with(devices[name], given)
		if err != nil {
			return nil, err
		}
		spec.Devices = append(spec.Devices, claimDevice{uid + "-" + name, given})
	}
	text, err := json.Marshal(spec)
	return slices.Concat([]byte(notePrefix), note, []byte("\n"), text), err
}

// with adds the edits for an MPS client, the IMEX channel, and the metadata files to the edits of a
// device.
func (g DeviceEdits) with(device ClaimedDevice, given json.RawMessage) (json.RawMessage, error) {
	if device.MPS == "" && !device.IMEX && len(device.Metadata) == 0 {
		return given, nil
	}
	var all specs.ContainerEdits
	if err := json.Unmarshal(given, &all); err != nil {
		return nil, err
	}
	if device.IMEX {
		all.DeviceNodes = append(all.DeviceNodes, g.imex...)
	}
	if device.MPS != "" {
		client := containeredits.MPSClient(g.mpsRoot, device.MPS)
		for name, value := range client.Env {
			all.Env = append(all.Env, name+"="+value)
		}
		all.Env = append(all.Env, device.Env...)
		for _, m := range client.Mounts {
			all.Mounts = append(all.Mounts, mount(m.HostPath, m.ContainerPath,
				[]string{"rw", "nosuid", "nodev", "rbind", "rprivate"}))
		}
	}
	for _, host := range slices.Sorted(maps.Keys(device.Metadata)) {
		all.Mounts = append(all.Mounts, mount(host, device.Metadata[host],
			[]string{"ro", "nosuid", "nodev", "noexec", "bind"}))
	}
	return json.Marshal(all)
}

// notePrefix begins the line of the note.
const notePrefix = "# "

// name returns the beginning of the names of a claim's files.
func (s ClaimSpecs) name(uid string) string {
	return cdilib.GenerateTransientSpecName(vendorOf(s.Driver), claimClass, uid)
}

// File returns the path of a claim's spec file. The content is a note and JSON, together YAML.
func (s ClaimSpecs) File(uid string) string { return filepath.Join(s.Dir, s.name(uid)+claimSuffix) }

const claimSuffix = ".yaml"

// metadataSuffix ends the name of a metadata file. Runtimes ignore such files in the folder of
// specs.
const metadataSuffix = ".metadata"

// MetadataFile returns the path of the metadata file for a request of a claim. The file is beside
// the spec, because the runtime has to find both.
func (s ClaimSpecs) MetadataFile(uid, request string) string {
	return filepath.Join(s.Dir, s.name(uid)+"."+request+metadataSuffix)
}

// A ClaimFile is a spec or a metadata file of a claim.
type ClaimFile struct {
	// Driver is the name of the driver, and UID the UID of the claim.
	Driver, UID string
	Path        string
	Metadata    bool
}

// ClaimFiles returns the files of all claims of all drivers in a folder of specs; none for a
// missing folder.
func ClaimFiles(dir string) (all []ClaimFile, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !statefile.IsAbsent(err) {
		return nil, fmt.Errorf("list the CDI specs of claims: %w", err)
	}
	for _, e := range entries {
		rest, named := strings.CutPrefix(e.Name(), vendorOf(""))
		driver, rest, claimed := strings.Cut(rest, "-"+claimClass+"_")
		uid, isSpec := strings.CutSuffix(rest, claimSuffix)
		name, isMetadata := strings.CutSuffix(rest, metadataSuffix)
		if isMetadata {
			dot := strings.LastIndexByte(name, '.')
			uid, isMetadata = name[:max(dot, 0)], dot > 0
		}
		if named && claimed && (isSpec || isMetadata) {
			all = append(all, ClaimFile{driver, uid, filepath.Join(dir, e.Name()), isMetadata})
		}
	}
	return all, nil
}

// WriteMetadata writes a metadata file if the content differs, and reports a write. Running
// containers keep the file from their start.
func WriteMetadata(path string, content []byte) (written bool, err error) {
	if there, err := statefile.Read(path, maxClaimFile); err == nil && bytes.Equal(there, content) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	return true, statefile.Replace(path, content, readableByAll)
}

// Note returns the note in the spec file of a claim; nil if there is none, as in files of NVIDIA's
// driver.
func (s ClaimSpecs) Note(uid string) []byte {
	text, err := statefile.Read(s.File(uid), maxClaimFile)
	if note, is := bytes.CutPrefix(text, []byte(notePrefix)); is && err == nil {
		note, _, _ = bytes.Cut(note, []byte("\n"))
		return note
	}
	return nil
}

// maxClaimFile limits the spec of a claim, in bytes.
const maxClaimFile = 2 << 20

// Device returns the CDI name of a claim's device.
func (s ClaimSpecs) Device(uid, device string) string {
	return vendorOf(s.Driver) + "/" + claimClass + "=" + uid + "-" + device
}

// Write replaces the spec file of a claim. It does not wait for the disk, because the record of the
// claim suffices to write the file again.
func (s ClaimSpecs) Write(uid string, content []byte) error {
	err := statefile.Replace(s.File(uid), content, readableByAll)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(s.Dir, 0o755); err == nil {
			err = statefile.Replace(s.File(uid), content, readableByAll)
		}
	}
	return err
}
