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
//   - Only the leader owns the records of a node. A new leader reads the records. From
//     then on memory is authoritative: a record is written to disk before it takes effect,
//     and is rewritten if the file differs.
//   - A record exists before the first trace of a claim elsewhere and until the last trace
//     is gone, so that the work of a killed process can always be finished or undone. A
//     CDI spec without a record therefore means that the record was lost, with the state
//     directory or because it was unreadable. The spec contains a copy of the record.
//   - A record is written under the lock of the claim and the locks of its GPUs, and
//     removed under the lock of the claim.
//   - An unreadable record is set aside, and the other records are used. A record of
//     another process is accepted: an earlier leader was stopped during the write. An
//     extra claim can be unprepared; a GPU must not be given twice.
//   - Fields written by a newer version of this program are preserved.

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecord is the largest record to read, in bytes. A claim has at most 32 devices of
	// a thousand bytes each.
	maxRecord = 1 << 20
)

// A record is the state of a claim on disk. It is immutable.
type record struct {
	Version int    `json:"version"`
	Boot    string `json:"boot,omitempty"` // the node's boot ID when the claim was prepared
	// Driver is the name of the driver that prepared the claim; empty for dra.Driver.
	Driver    string `json:"driver,omitempty"`
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Prepared is when the record was first written.
	Prepared time.Time `json:"prepared"`
	// Pods are the UIDs of the pods of the claim at its preparation. Later pods may be
	// missing: the kubelet does not announce them.
	Pods []string `json:"pods,omitempty"`
	// OwnerPod is the UID of the only pod that can use the claim; empty if several pods can.
	OwnerPod string `json:"ownerPod,omitempty"`
	// Adopted says that NVIDIA's driver prepared the claim.
	Adopted bool `json:"adopted,omitempty"`
	// Released says that the claim was unprepared, but its MIG devices are not destroyed
	// yet or its MPS control daemons have not stopped yet.
	Released bool `json:"released,omitempty"`
	// Destroyed says that the devices and daemons of a released claim are gone, but the
	// MIG mode of the GPUs is not off yet.
	Destroyed bool `json:"destroyed,omitempty"`
	// Metadata says that containers get metadata files; nil if not.
	Metadata *recordMetadata `json:"metadata,omitempty"`
	Devices  []recordDevice  `json:"devices"`

	unknown statefile.Unknown
}

// A recordDevice is an allocation result, and the device at the time when the claim was
// prepared.
type recordDevice struct {
	Request          string            `json:"request"`
	Pool             string            `json:"pool"`
	Device           string            `json:"device"`
	ShareID          string            `json:"shareID,omitempty"`
	ConsumedCapacity map[string]string `json:"consumedCapacity,omitempty"`
	// Share is the claim's part of the device memory, in bytes; 0 for all of it. Other
	// claims can have the remaining memory.
	Share int64 `json:"share,omitempty"`
	// SharedBy says that other claims can have the device, by count or without a limit;
	// empty if only the memory is shared.
	SharedBy    dra.ShareBy  `json:"sharedBy,omitempty"`
	AdminAccess bool         `json:"adminAccess,omitempty"`
	Tolerations []toleration `json:"tolerations,omitempty"`
	// GPU is the UUID of the GPU, and BDF its PCI address.
	GPU string `json:"gpu"`
	BDF string `json:"bdf,omitempty"`
	// MIG is the MIG device, if any.
	MIG *recordMIG `json:"mig,omitempty"`
	// Settings describe how the claim uses the device. Equal settings have equal
	// descriptions.
	Settings string `json:"settings,omitempty"`
	// Interval is the time slice of the claim: 1 (short) to 3 (long); 0 for the default.
	Interval int `json:"timeSlice,omitempty"`
	// MPS is the control daemon of the device, if the claim uses MPS.
	MPS *recordMPS `json:"mps,omitempty"`
	// Attributes are the published attributes of the device, for metadata files; nil
	// without metadata files.
	Attributes map[string]dra.Attribute `json:"attributes,omitempty"`
	// DisableMIG says that the MIG mode of a whole GPU is not off yet, as the claim needs.
	DisableMIG bool `json:"undivide,omitempty"`
	// IMEX says that the claim requests IMEX channel 0.
	IMEX bool `json:"imexChannel,omitempty"`

	// equal is the claim's part of the device by count of shares: memory in bytes and
	// threads in percent; 0 if shares are not counted.
	equal   struct{ memory, threads int64 }
	unknown statefile.Unknown
}

type recordMIG struct {
	// UUID is empty until the MIG device is created. Until then CI is unused, and GI is
	// valid only if Created.
	UUID    string `json:"uuid"`
	Profile string `json:"profile,omitempty"`
	GI      int    `json:"gi"`
	CI      int    `json:"ci"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
	// Dynamic says that the MIG device is created for the claim and destroyed with the
	// claim. ProfileID is then the driver's number of the profile, and Slices the number
	// of compute slices.
	Dynamic bool `json:"dynamic,omitempty"`
	// Created says that the call to create GPU instance GI for the claim has succeeded.
	Created   bool `json:"made,omitempty"`
	ProfileID int  `json:"profileID,omitempty"`
	Slices    int  `json:"slices,omitempty"`
	// Switched says that the MIG mode of the GPU is enabled for the claim, and disabled
	// when no claim needs MIG mode.
	Switched bool `json:"switched,omitempty"`
}

// A toleration is a dra.Toleration with Kubernetes' field names.
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

// uuid returns the UUID of the GPU or MIG device; empty for a MIG device that does not
// exist yet.
func (d recordDevice) uuid() string {
	if d.MIG != nil {
		return d.MIG.UUID
	}
	return d.GPU
}

// needsRelease reports whether the claim has its own MIG device or control daemon here.
// Another claim can have the device only after their end.
func (d recordDevice) needsRelease() bool { return d.MPS != nil || d.MIG != nil && d.MIG.Dynamic }

// isShare reports whether other claims can have the device at the same time.
func (d recordDevice) isShare() bool { return d.Share > 0 || d.SharedBy != "" }

// cdiName returns the name of a device in the CDI spec of the claim. The share ID tells
// several shares of one device apart. Adopted claims keep the names of NVIDIA's driver.
func (r record) cdiName(d recordDevice) string {
	if d.ShareID == "" || r.Adopted {
		return d.Device
	}
	return d.Device + "-" + d.ShareID
}

// request returns the name of the request without the chosen alternative: the kubelet
// compares only the request.
func (d recordDevice) request() string {
	name, _, _ := strings.Cut(d.Request, "/")
	return name
}

// String returns the namespace and name of the claim.
func (r record) String() string { return r.Namespace + "/" + r.Name }

// driver returns the name of the driver that prepared the claim.
func (r record) driver() string { return cmp.Or(r.Driver, dra.Driver) }

// recordDriver returns a driver name as written in records: empty for dra.Driver.
func recordDriver(name string) string {
	if name == dra.Driver {
		return ""
	}
	return name
}

// beforeRestart reports whether the node has restarted since the claim was prepared. Then
// no container of the claim runs.
func (r record) beforeRestart(boot string) bool { return r.Boot != "" && boot != "" && r.Boot != boot }

// gpus returns the UUIDs of the claim's GPUs, each once. GPUs with adminAccess are
// omitted, because such a claim needs no lock.
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

// inherit copies the fields of a newer version from an earlier record of the claim.
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

// A store keeps the records of one folder on disk.
type store struct {
	dir   string
	specs cdi.ClaimSpecs
	step  func()       // called before and after each change of a file; tests kill the process there
	lead  func() error // why this process must not write; nil if it may
	// written has the fs.FileInfo of the last file that was written or verified, by UID of
	// the claim.
	written *sync.Map
}

// A recordFile is the JSON form of a record file. The checksum covers the bytes of the
// record in the file.
type recordFile struct {
	Checksum string          `json:"checksum"`
	Record   json.RawMessage `json:"record"`
}

func checksum(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

func (s store) path(uid, suffix string) string { return filepath.Join(s.folder(), uid+suffix) }

// specsOf returns the CDI specs of the driver that prepared the claim.
func (s store) specsOf(r record) cdi.ClaimSpecs {
	return cdi.ClaimSpecs{Dir: s.specs.Dir, Driver: r.driver()}
}

// folder returns the folder of the records.
func (s store) folder() string { return filepath.Join(s.dir, "claims") }

// read returns a record, and false if it does not exist.
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

// decode returns the record from the content of a record file.
func decode(text []byte, uid string) (record, error) {
	var p recordFile
	var r record
	err := json.Unmarshal(text, &p)
	if err == nil && checksum(p.Record) != p.Checksum {
		err = errors.New("wrong checksum")
	}
	if err == nil {
		err = json.Unmarshal(p.Record, &r)
	}
	if err == nil && r.UID != uid {
		err = fmt.Errorf("it belongs to the claim with UID %q", r.UID)
	}
	return r, err
}

// encode returns the content of a record file.
func encode(r record) ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(recordFile{checksum(text), text})
}

// readCopy returns the copy of a record from the CDI spec of the claim.
func (s store) readCopy(uid string) (r record, found bool) {
	note := s.specs.Note(uid)
	if note == nil {
		return record{}, false
	}
	r, err := decode(note, uid)
	return r, err == nil
}

// readOrCopied returns a record, or the copy from the claim's CDI spec if the record was
// lost; copied tells which. An unreadable record is set aside.
func (s store) readOrCopied(ctx context.Context, uid string) (r record, found, copied bool) {
	r, found, err := s.read(uid)
	if err != nil {
		path := s.path(uid, recordSuffix)
		klog.FromContext(ctx).Error(errors.Join(err, os.Rename(path, path+statefile.Damaged)),
			"Cannot read the record of a claim; the file is set aside", "uid", uid)
	}
	if !found {
		r, found = s.readCopy(uid)
		copied = found
	}
	return r, found, copied
}

// uids returns the UIDs of all claims with a record, a spec or metadata files.
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

// all returns the readable records, by UID, including lost records with a copy. It changes
// nothing.
func (s store) all() (map[string]record, error) {
	uids, err := s.uids()
	if err != nil {
		return nil, err
	}
	records := map[string]record{}
	for _, uid := range uids {
		r, found, _ := s.read(uid) // an unreadable record is treated as absent
		if !found {
			r, found = s.readCopy(uid)
		}
		if found {
			records[uid] = r
		}
	}
	return records, nil
}

// isCurrent reports whether the file of a claim contains this record.
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

// write writes a record, and returns after it is on disk.
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
	written := func(string) error { s.step(); return nil }
	if err := statefile.Write(path, append(text, '\n'), 0o600, written); err != nil {
		return err
	}
	if info, err := os.Lstat(path); err == nil {
		s.written.Store(r.UID, info)
	}
	return nil
}

// remove removes a record, and its set-aside file.
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

// names returns the names of the files in a folder; nothing if the folder is unreadable.
func names(folder string) []string {
	entries, _ := os.ReadDir(folder)
	all := make([]string, len(entries))
	for i, e := range entries {
		all[i] = e.Name()
	}
	return all
}
