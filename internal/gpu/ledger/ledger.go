// Package ledger saves state across restarts, in a directory shared by all processes on the node:
// the faults of GPUs and MIG devices, so that a bad GPU stays bad after a restart, and the release
// of the driver by quiesce.
//
// Only the leading process writes the faults. The other processes also find faults, and keep them
// in memory until they lead.
package ledger

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FaultsFile is the name of the ledger in the state directory.
const FaultsFile = "faults.json"

const (
	damagedFile = "faults.json.damaged" // an unreadable ledger; only the last one is kept
)

const (
	ledgerVersion = 1
	// maxLedger is the largest accepted ledger, in bytes. A fault takes a few hundred bytes.
	maxLedger = 4 << 20
)

// A Book is the content of the ledger: the faults that survive restarts and changes of the leader.
type Book struct {
	faults     map[faultKey]savedFault
	recoveries map[string][]time.Time // by device
	unknown    statefile.Unknown
}

type faultKey struct {
	device string // UUID of a GPU or MIG device
	source health.Source
	xid    uint64
}

// A savedFault is a fault in the ledger.
type savedFault struct {
	Device string           `json:"device"`
	Boot   string           `json:"boot"` // boot ID of the node when the fault was found
	Source health.Source    `json:"source"`
	XID    uint64           `json:"xid,omitempty"`
	State  string           `json:"state"`
	Reason string           `json:"reason"`
	Remedy inventory.Remedy `json:"cure"`
	Since  time.Time        `json:"since"`

	unknown statefile.Unknown
}

// UnmarshalJSON implements json.Unmarshaler.
func (e *savedFault) UnmarshalJSON(text []byte) (err error) {
	type known savedFault
	e.unknown, err = statefile.Decode(text, (*known)(e))
	return err
}

// MarshalJSON implements json.Marshaler.
func (e savedFault) MarshalJSON() ([]byte, error) {
	type known savedFault
	return statefile.Encode(known(e), e.unknown)
}

// fileFormat is the format of the file.
type fileFormat struct {
	Version    int                    `json:"version"`
	Faults     []savedFault           `json:"faults"`
	Recoveries map[string][]time.Time `json:"recoveries,omitempty"`
}

// NewBook returns an empty Book.
func NewBook() Book {
	return Book{faults: make(map[faultKey]savedFault), recoveries: make(map[string][]time.Time)}
}

// Add adds the durable faults and the recoveries of a device.
func (b Book) Add(uuid, boot string, d health.Device) {
	for _, f := range d.DurableFaults() {
		b.faults[faultKey{uuid, f.Source, f.XID}] = savedFault{
			Device: uuid, Boot: boot, Source: f.Source, XID: f.XID, State: f.State.String(), Reason: f.Reason,
			Remedy: f.Remedy,
			Since:  f.Since.UTC().Truncate(time.Millisecond),
		}
	}
	if len(d.Recoveries) > 0 {
		b.recoveries[uuid] = d.Recoveries
	}
}

// Device returns the faults and recoveries of a device.
func (b Book) Device(uuid string) (faults []health.Fault, recoveries []time.Time) {
	for key, e := range b.faults {
		if key.device != uuid {
			continue
		}
		state := inventory.Unhealthy
		if e.State == inventory.Lost.String() {
			state = inventory.Lost
		}
		faults = append(faults, health.Fault{
			Source: e.Source, XID: e.XID, State: state, Reason: e.Reason, Remedy: e.Remedy, Since: e.Since,
			LastSeen: e.Since,
		})
	}
	order.Sort(faults, func(a, b health.Fault) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Source, b.Source), cmp.Compare(a.XID, b.XID))
	})
	return faults, b.recoveries[uuid]
}

// Drop removes a device. It reports whether the Book had the device.
func (b Book) Drop(uuid string) bool {
	before := len(b.faults) + len(b.recoveries)
	maps.DeleteFunc(b.faults, func(key faultKey, _ savedFault) bool { return key.device == uuid })
	delete(b.recoveries, uuid)
	return len(b.faults)+len(b.recoveries) < before
}

// Expire removes the faults ended by a restart of the node: faults of another boot that need no
// operator.
func (b Book) Expire(boot string) {
	maps.DeleteFunc(b.faults, func(_ faultKey, e savedFault) bool {
		return boot != "" && e.Boot != "" && e.Boot != boot && !health.OutlivesBoot(e.Remedy)
	})
}

// Clone returns a copy.
func (b Book) Clone() Book {
	return Book{faults: maps.Clone(b.faults), recoveries: maps.Clone(b.recoveries), unknown: b.unknown}
}

// Empty reports whether the Book is empty.
func (b Book) Empty() bool { return len(b.faults) == 0 && len(b.recoveries) == 0 }

// Equal reports whether two Books have the same content.
func (b Book) Equal(other Book) bool {
	return maps.Equal(b.faults, other.faults) && maps.EqualFunc(b.recoveries, other.recoveries, slices.Equal)
}

// Unlike returns the faults of b that are in none of the others.
func (b Book) Unlike(others ...Book) Book {
	rest := NewBook()
	maps.Copy(rest.faults, b.faults)
	maps.Copy(rest.recoveries, b.recoveries)
	for _, other := range others {
		maps.DeleteFunc(rest.faults, func(key faultKey, _ savedFault) bool { _, has := other.faults[key]; return has })
		maps.DeleteFunc(rest.recoveries, func(uuid string, _ []time.Time) bool { return other.recoveries[uuid] != nil })
	}
	return rest
}

// Join adds the content of another Book.
func (b Book) Join(other Book) {
	maps.Copy(b.faults, other.faults)
	maps.Copy(b.recoveries, other.recoveries)
}

// withUnknownOf returns a copy of b with the unknown fields of from, written by a newer version of
// this program.
func (b Book) withUnknownOf(from Book) Book {
	b = b.Clone()
	b.unknown = from.unknown
	for key, e := range b.faults {
		e.unknown = from.faults[key].unknown
		b.faults[key] = e
	}
	return b
}

// A ledger is a Book on disk.
type ledger struct{ dir string }

func (l ledger) path(name string) string { return filepath.Join(l.dir, name) }

// errDamaged is wrapped by the error of reading an invalid ledger.
var errDamaged = errors.New("the fault ledger is damaged")

// read returns the content of the ledger; an empty Book without a ledger.
func (l ledger) read() (Book, error) {
	b := NewBook()
	text, err := statefile.Read(l.path(FaultsFile), maxLedger)
	if errors.Is(err, fs.ErrNotExist) {
		return b, nil
	}
	if errors.Is(err, statefile.ErrTooLarge) {
		return b, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if err != nil {
		return b, fmt.Errorf("read the fault ledger: %w", err)
	}
	var p fileFormat
	if b.unknown, err = statefile.Decode(text, &p); err != nil {
		return b, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if p.Version != ledgerVersion {
		return b, fmt.Errorf("%w: it has version %d, and this program writes %d", errDamaged, p.Version, ledgerVersion)
	}
	for _, e := range p.Faults {
		b.faults[faultKey{e.Device, e.Source, e.XID}] = e
	}
	maps.Copy(b.recoveries, p.Recoveries)
	return b, nil
}

// open returns the content of the ledger. A damaged ledger is set aside: then setAside is the
// reason.
func (l ledger) open() (b Book, setAside, err error) {
	b, err = l.read()
	if errors.Is(err, errDamaged) {
		setAside, err = err, os.Rename(l.path(FaultsFile), l.path(damagedFile))
	}
	return b, setAside, err
}

// replace replaces the ledger atomically.
func (l ledger) replace(b Book) error {
	p := fileFormat{Version: ledgerVersion, Faults: slices.AppendSeq([]savedFault{}, maps.Values(b.faults)),
		Recoveries: b.recoveries}
	order.Sort(p.Faults, func(a, b savedFault) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Source, b.Source), cmp.Compare(a.XID, b.XID))
	})
	text, err := statefile.Encode(p, b.unknown)
	var lines bytes.Buffer
	if err == nil {
		err = json.Indent(&lines, append(text, '\n'), "", "  ")
	}
	if err == nil {
		err = os.MkdirAll(l.dir, 0o700)
	}
	if err == nil {
		err = statefile.Write(l.path(FaultsFile), lines.Bytes(), 0o600, nil)
	}
	if err != nil {
		return fmt.Errorf("write the fault ledger: %w", err)
	}
	return nil
}
