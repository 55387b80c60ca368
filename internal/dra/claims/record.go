package claims

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The rules of records:
//
//   - One process has the records of a node: the lead. It reads them when its time begins. From then on what it has in memory counts, and
//     the files follow: a record is on the disk before it counts, and is written again where the file is not like it.
//   - A claim has a record from before the first trace of it elsewhere until after the last one is gone: a CDI spec whose claim has no
//     record is never there, wherever the process is killed. So what was begun can be finished or taken back. And so, where there is one,
//     the record was lost: with the state directory, or because it could not be read. The spec has a copy of it.
//   - The record of a claim is written under the lock of the claim and those of its GPUs, and removed under that of the claim.
//   - A record that cannot be read is set aside, and the others go on. A record that nobody here has written is taken over: that of an
//     earlier lead which was stopped in the middle of a write. A claim too many can be given back; a GPU must not be given twice.
//   - What a newer version of this program has noted in a record stays in it.

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecord is the largest record that is read, in bytes. A claim has at most 32 devices, of a
	// thousand each.
	maxRecord = 1 << 20
)

// A record is what is noted of a claim. It is immutable.
type record struct {
	Version int    `json:"version"`
	Boot    string `json:"boot,omitempty"` // the node's boot ID when the claim was prepared
	// Driver is the name of the driver under which it was prepared; empty for dra.Driver.
	Driver    string `json:"driver,omitempty"`
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Prepared is when the record was written first.
	Prepared time.Time `json:"prepared"`
	// Pods are the UIDs of pods that used the claim when it was prepared. A pod that uses it later,
	// beside them, may not be among them: kubelet does not tell.
	Pods []string `json:"pods,omitempty"`
	// Adopted says that NVIDIA's driver prepared the claim.
	Adopted bool `json:"adopted,omitempty"`
	// Released says that the claim was given back, and that MIG devices which were made for it are to
	// be destroyed still, or its control daemons of MPS to be ended.
	Released bool `json:"released,omitempty"`
	// Destroyed says of a released claim that they are, and that the MIG mode of their GPUs is to be
	// switched off still.
	Destroyed bool `json:"destroyed,omitempty"`
	// Metadata says that containers get metadata files; nil if they do not.
	Metadata *recordMetadata `json:"metadata,omitempty"`
	Devices  []recordDevice  `json:"devices"`

	unknown statefile.Unknown
}

// A recordDevice is a result of an allocation, and what it was when the claim was prepared.
type recordDevice struct {
	Request          string            `json:"request"`
	Pool             string            `json:"pool"`
	Device           string            `json:"device"`
	ShareID          string            `json:"shareID,omitempty"`
	ConsumedCapacity map[string]string `json:"consumedCapacity,omitempty"`
	// Share is the part of the memory of the device that the claim has, in bytes; 0 for all of it.
	// Others can have the rest.
	Share int64 `json:"share,omitempty"`
	// SharedBy says that others can have the device, too, by count or without a limit; empty for one
	// of which the memory alone is shared.
	SharedBy    dra.ShareBy  `json:"sharedBy,omitempty"`
	AdminAccess bool         `json:"adminAccess,omitempty"`
	Tolerations []toleration `json:"tolerations,omitempty"`
	// GPU is the UUID of the GPU, and BDF its PCI address.
	GPU string `json:"gpu"`
	BDF string `json:"bdf,omitempty"`
	// MIG is the MIG device, if it is one.
	MIG *recordMIG `json:"mig,omitempty"`
	// Settings are how the claim uses the device, in words that are equal when the settings are.
	Settings string `json:"settings,omitempty"`
	// Interval is the time slice that the claim sets: 1 (short) to 3 (long); 0 for the default.
	Interval int `json:"timeSlice,omitempty"`
	// MPS is the control daemon that the device is shared by, if it is.
	MPS *recordMPS `json:"mps,omitempty"`
	// Attributes are those with which the device was published, for metadata files; nil without them.
	Attributes map[string]dra.Attribute `json:"attributes,omitempty"`
	// Undivide says of a whole GPU that its MIG mode is to be switched off for the claim still.
	DisableMIG bool `json:"undivide,omitempty"`
	// IMEX says that the claim has asked for IMEX channel 0.
	IMEX bool `json:"imexChannel,omitempty"`

	// equal is what the claim has of the device by its count of shares: bytes of memory and percent of
	// the threads; 0 where nothing is counted.
	equal   struct{ memory, threads int64 }
	unknown statefile.Unknown
}

type recordMIG struct {
	// UUID is empty for one that is to be made. Then CI means nothing, and GI only if it is Made.
	UUID    string `json:"uuid"`
	Profile string `json:"profile,omitempty"`
	GI      int    `json:"gi"`
	CI      int    `json:"ci"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
	// Dynamic says that it is made for the claim, and destroyed with it. ProfileID is then the
	// driver's number of the profile, and Slices how many compute slices it has.
	Dynamic bool `json:"dynamic,omitempty"`
	// Made says that a call which made the GPU instance GI for the claim has succeeded.
	Created   bool `json:"made,omitempty"`
	ProfileID int  `json:"profileID,omitempty"`
	Slices    int  `json:"slices,omitempty"`
	// Switched says that the MIG mode of the GPU is switched on for it, and off when no claim needs it
	// any more.
	Switched bool `json:"switched,omitempty"`
}

// A toleration is a dra.Toleration with the names that Kubernetes has for its fields.
type toleration struct {
	Key      string `json:"key,omitempty"`
	Operator string `json:"operator,omitempty"`
	Value    string `json:"value,omitempty"`
	Effect   string `json:"effect,omitempty"`
}

func tolerations(of []dra.Toleration) []toleration {
	var all []toleration
	for _, t := range of {
		all = append(all, toleration(t))
	}
	return all
}

// uuid returns the UUID of the GPU or MIG device; empty for one that is to be made.
func (d recordDevice) uuid() string {
	if d.MIG != nil {
		return d.MIG.UUID
	}
	return d.GPU
}

// taken reports whether something was made for the claim at the device, which is taken back before
// others can have it.
func (d recordDevice) needsRelease() bool { return d.MPS != nil || d.MIG != nil && d.MIG.Dynamic }

// part reports whether others can have the device at the same time.
func (d recordDevice) isShare() bool { return d.Share > 0 || d.SharedBy != "" }

// cdiName returns the name of a device in the CDI spec of the claim: a claim can have several
// shares of one device. NVIDIA's driver has named those of claims that were taken over.
func (r record) cdiName(d recordDevice) string {
	if d.ShareID == "" || r.Adopted {
		return d.Device
	}
	return d.Device + "-" + d.ShareID
}

// request returns the name of the request without that of the alternative that was taken: kubelet
// compares with the first alone.
func (d recordDevice) request() string {
	name, _, _ := strings.Cut(d.Request, "/")
	return name
}

// String names the claim.
func (r record) String() string { return r.Namespace + "/" + r.Name }

// driver returns the name of the driver under which the claim was prepared.
func (r record) driver() string { return cmp.Or(r.Driver, dra.Driver) }

// recordDriver returns what a record has for the name of a driver. Former versions know no other
// name than dra.Driver.
func recordDriver(name string) string {
	if name == dra.Driver {
		return ""
	}
	return name
}

// former reports whether the node was restarted since the claim was prepared: no container of it
// runs.
func (r record) beforeRestart(boot string) bool { return r.Boot != "" && boot != "" && r.Boot != boot }

// gpus returns the UUIDs of the claim's GPUs, each once, without those at which it only looks with
// adminAccess: it waits for nobody there, and nobody for it.
func (r record) gpus() []string {
	var all []string
	for _, d := range r.Devices {
		if !d.AdminAccess && !slices.Contains(all, d.GPU) {
			all = append(all, d.GPU)
		}
	}
	return all
}

func (r record) MarshalJSON() ([]byte, error) {
	type plain record
	return statefile.Encode(plain(r), r.unknown)
}

func (r *record) UnmarshalJSON(text []byte) (err error) {
	type plain record
	r.unknown, err = statefile.Decode(text, (*plain)(r))
	return err
}

func (d recordDevice) MarshalJSON() ([]byte, error) {
	type plain recordDevice
	return statefile.Encode(plain(d), d.unknown)
}

func (d *recordDevice) UnmarshalJSON(text []byte) (err error) {
	type plain recordDevice
	d.unknown, err = statefile.Decode(text, (*plain)(d))
	return err
}

// inherit takes over what a newer version has noted of the claim.
func (r *record) inherit(from record) {
	r.Prepared, r.unknown = from.Prepared, from.unknown
	for i := range r.Devices {
		d := &r.Devices[i]
		for _, f := range from.Devices {
			if f.Request == d.Request && f.Device == d.Device && f.ShareID == d.ShareID {
				d.unknown = f.unknown
			}
		}
	}
}

// A store has the records of one folder on disk.
type store struct {
	dir   string
	specs cdi.ClaimSpecs
	step  func()       // called before and after each change of a file; tests end the process there
	lead  func() error // why this process may not write; nil if it may
	// written has the fs.FileInfo of the file that was last written or found to be right, by the UID
	// of the claim.
	written *sync.Map
}

// A recordFile is the JSON form of a file with a record. The checksum is that of the bytes of the
// record as they are in the file.
type recordFile struct {
	Checksum string          `json:"checksum"`
	Record   json.RawMessage `json:"record"`
}

func checksum(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

func (s store) path(uid, suffix string) string { return filepath.Join(s.folder(), uid+suffix) }

// specsOf returns the CDI specs of the driver under whose name a claim is prepared.
func (s store) specsOf(r record) cdi.ClaimSpecs {
	return cdi.ClaimSpecs{Dir: s.specs.Dir, Driver: r.driver()}
}

// folder is where the records are.
func (s store) folder() string { return filepath.Join(s.dir, "claims") }

// read returns a record, and false if there is none.
func (s store) read(uid string) (record, bool, error) {
	path := s.path(uid, recordSuffix)
	text, err := statefile.Read(path, maxRecord)
	if statefile.IsAbsent(err) {
		return record{}, false, nil
	}
	var r record
	if err == nil {
		r, err = decode(text, uid)
	}
	if err != nil {
		return record{}, false, fmt.Errorf("read the record of a claim: %s: %w", path, err)
	}
	return r, true, nil
}

// decode returns the record of a claim whose page this is.
func decode(text []byte, uid string) (record, error) {
	var p recordFile
	var r record
	err := json.Unmarshal(text, &p)
	if err == nil && checksum(p.Record) != p.Checksum {
		err = errors.New("its checksum is wrong")
	}
	if err == nil {
		err = json.Unmarshal(p.Record, &r)
	}
	if err == nil && r.UID != uid {
		err = fmt.Errorf("it is about the claim with UID %q", r.UID)
	}
	return r, err
}

// encode returns the page of a record.
func encode(r record) ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(recordFile{checksum(text), text})
}

// copied returns the copy of a record that is in the spec of its claim.
func (s store) readCopy(uid string) (r record, found bool) {
	note := s.specs.Note(uid)
	if note == nil {
		return record{}, false
	}
	r, err := decode(note, uid)
	return r, err == nil
}

// readOrCopied returns a record, or the copy in the spec of the claim if the record was lost, and
// says so. A record that cannot be read is set aside.
func (s store) readOrCopied(ctx context.Context, uid string) (r record, found, copied bool) {
	r, found, err := s.read(uid)
	if err != nil {
		path := s.path(uid, recordSuffix)
		klog.FromContext(ctx).Error(errors.Join(err, os.Rename(path, path+statefile.Damaged)),
			"Setting the record of a claim aside", "uid", uid)
	}
	if !found {
		r, found = s.readCopy(uid)
		copied = found
	}
	return r, found, copied
}

// uids returns the UIDs of all claims that have a record, a spec or metadata files.
func (s store) uids() ([]string, error) {
	entries, err := os.ReadDir(s.folder())
	if err != nil && !statefile.IsAbsent(err) {
		return nil, fmt.Errorf("list the records of claims: %w", err)
	}
	beside, err := cdi.ClaimFiles(s.specs.Dir)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, f := range beside {
		if f.Driver == s.specs.Driver {
			all = append(all, f.UID)
		}
	}
	for _, e := range entries {
		if uid, is := strings.CutSuffix(e.Name(), recordSuffix); is && validUID(uid) {
			all = append(all, uid)
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// all returns the records that can be read, by UID, and changes nothing. Lost records are among
// them.
func (s store) all() (map[string]record, error) {
	uids, err := s.uids()
	if err != nil {
		return nil, err
	}
	records := map[string]record{}
	for _, uid := range uids {
		r, found, _ := s.read(uid) // of one that cannot be read nothing is known
		if !found {
			r, found = s.readCopy(uid)
		}
		if found {
			records[uid] = r
		}
	}
	return records, nil
}

// has reports whether the file of a claim has this record.
func (s store) isCurrent(r record) bool {
	path := s.path(r.UID, recordSuffix)
	info, err := os.Lstat(path)
	if err != nil {
		return false
	}
	if known, ok := s.written.Load(r.UID); ok {
		if was, _ := known.(fs.FileInfo); os.SameFile(was, info) && was.ModTime().Equal(info.ModTime()) &&
			was.Size() == info.Size() {
			return true
		}
	}
	text, err := statefile.Read(path, maxRecord)
	wanted, problem := encode(r)
	if err != nil || problem != nil || !bytes.Equal(bytes.TrimSpace(text), wanted) {
		return false
	}
	s.written.Store(r.UID, info)
	return true
}

// write writes a record, and returns once it is on the disk.
func (s store) write(r record) error {
	text, err := encode(r)
	if err != nil {
		return err
	}
	if err := s.lead(); err != nil {
		return err
	}
	if err := os.MkdirAll(s.folder(), 0o700); err != nil {
		return err
	}
	s.step()
	defer s.step()
	path := s.path(r.UID, recordSuffix)
	if err := statefile.Write(path, append(text, '\n'), 0o600, func(string) error { s.step(); return nil }); err != nil {
		return err
	}
	if info, err := os.Lstat(path); err == nil {
		s.written.Store(r.UID, info)
	}
	return nil
}

// remove removes a record, also one that was set aside.
func (s store) remove(uid string) error {
	if err := s.lead(); err != nil {
		return err
	}
	s.written.Delete(uid)
	for _, suffix := range []string{recordSuffix + statefile.Damaged, recordSuffix} {
		if err := statefile.Remove(s.path(uid, suffix)); err != nil {
			return fmt.Errorf("remove the record of a claim: %w", err)
		}
		s.step()
	}
	return nil
}

// names returns what is in a folder; nothing if it cannot be read.
func names(folder string) []string {
	entries, _ := os.ReadDir(folder)
	all := make([]string, len(entries))
	for i, e := range entries {
		all[i] = e.Name()
	}
	return all
}
