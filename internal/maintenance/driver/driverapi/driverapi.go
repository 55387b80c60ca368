// Package driverapi is what the program gpu-driver offers on a node: it places driver folders, and
// changes the loaded driver from one folder to another. gpu-node-agent decides when, and whether the
// new driver works; see package driverswap. The calls go through a control socket (package control).
//
// gpu-driver has the only journal of a change. Each call may be repeated: a call whose work is done
// or under way changes nothing.
package driverapi

import (
	"context"
	"encoding/json"
	"path/filepath"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

const (
	// DefaultSocket is the control socket of gpu-driver. The pod of gpu-node-agent has its folder, which it
	// cannot write to.
	DefaultSocket = DefaultDirectory + "/driver.sock"
	// DefaultDirectory has a folder DIGEST for each driver of the node, the link Current to the folder
	// that the node loads at its next boot, and the journal.
	DefaultDirectory = "/var/lib/gpu-device-plugin/driver"
	// Current is the name of the link. Driver roots follow it.
	Current = "current"
	// Journal is the name of the journal. Only gpu-driver writes it.
	Journal = "change.json"
	// MaxJournal is the size of the largest journal, in bytes.
	MaxJournal = 1 << 20
)

// The calls. All but CallStatus have Arguments, and all return a Status.
const (
	CallStatus = "driver-status"
	// CallPlace copies a folder of the sources into the directory and verifies it. The loaded driver
	// stays.
	CallPlace = "driver-place"
	// CallFetch downloads Arguments.Archive from Arguments.Source, and places its folder. The download ends
	// some time after the last such call: who wants the archive repeats the call until a Folder has it.
	CallFetch = "driver-fetch"
	// CallSwap unloads the present driver and loads another one. It fails if the driver must not be
	// changed on this node (Status.Refusals), or if another change is under way. While something uses
	// the driver, the change waits in StepUnloading and names the users; CallCancel ends the wait.
	CallSwap = "driver-swap"
	// CallNextBoot makes the next boot load another driver. The loaded driver stays until then. A change
	// to this driver that waits in StepUnloading is left to the next boot, and CallSwap begins it at once.
	CallNextBoot = "driver-next-boot"
	// CallConfirm ends a change in StepUnproven: the driver works.
	CallConfirm = "driver-confirm"
	// CallRevert ends a change in StepUnproven: the driver does not work, for Arguments.Reason. The
	// driver before it is loaded again, and the change has failed.
	CallRevert = "driver-revert"
	// CallCancel ends a change that has unloaded no module yet, and forgets one that failed.
	CallCancel = "driver-cancel"
)

// Arguments are the arguments of a call.
type Arguments struct {
	Digest string `json:"digest"` // of the wanted folder, in hexadecimal
	// Archive is the SHA-256 digest of the archive of CallFetch, in hexadecimal, and Source its URL.
	Archive string `json:"archive,omitempty"`
	Source  string `json:"source,omitempty"`
	Reason  string `json:"reason,omitempty"` // of CallRevert
	// Note is a text of the caller that a change of CallSwap or CallNextBoot keeps, such as the GPUs that
	// worked before.
	Note string `json:"note,omitempty"`
}

// A Status is what gpu-driver knows about the node.
type Status struct {
	Kernel string `json:"kernel"` // release of the running kernel
	BootID string `json:"bootID"`
	// LoadedVersion is the version of the loaded driver, and LoadedDigest the folder that it was loaded
	// from. LoadedDigest is empty if no driver is loaded or another program loaded it.
	LoadedVersion string `json:"loadedVersion,omitempty"`
	LoadedDigest  string `json:"loadedDigest,omitempty"`
	// Current is the digest of the folder that the next boot loads; empty for none.
	Current string   `json:"current,omitempty"`
	Folders []Folder `json:"folders,omitempty"`
	// Refusals are sentences that say why the driver of this node must not be changed by this program,
	// such as a package manager that owns it; none if it may.
	Refusals []string `json:"refusals,omitempty"`
	Change   *Change  `json:"change,omitempty"` // the latest change that is not confirmed; nil for none
	// Download is the archive of CallFetch that is not placed yet; nil for none.
	Download *Download `json:"download,omitempty"`
}

// Types of package driverchange in a Status.
type (
	// A Download is what is known of an archive that is not placed yet.
	Download = driverchange.Download
	// A Folder is a driver on the disk of the node.
	Folder = driverchange.Folder
	// A Step is the phase of a change.
	Step = driverchange.Phase
)

// The steps of a change, in their order. Only Unproven, NextBoot and Failed wait for a call.
const (
	StepPlacing   = driverchange.PhasePlacing
	StepUnloading = driverchange.PhaseUnloading // stops services, and takes modules out
	StepLoading   = driverchange.PhaseLoading   // sets the link, loads modules, creates device nodes, starts services
	StepUnproven  = driverchange.PhaseUnproven  // the driver is loaded; CallConfirm or CallRevert ends the change
	StepReverting = driverchange.PhaseReverting // loads the driver before it again
	StepNextBoot  = driverchange.PhaseNextBoot  // the next boot loads the driver
	StepFailed    = driverchange.PhaseFailed    // the driver before it is loaded, or Reason says why none is
)

// A Change is a change of the driver.
type Change struct {
	From string `json:"from,omitempty"` // digest; empty for none of this program's folders
	To   string `json:"to"`             // digest
	Step Step   `json:"step"`
	// Percent is the progress of StepPlacing by bytes, and of the others by their steps; 0 to 100.
	Percent int       `json:"percent"`
	Since   time.Time `json:"since"` // begin of the step
	// Reason says why the change waits or has failed; empty otherwise.
	Reason string `json:"reason,omitempty"`
	// Holders are the users of the driver for which StepUnloading waits.
	Holders []preflight.Holder `json:"holders,omitempty"`
	// Note is that of the call which began the change.
	Note string `json:"note,omitempty"`
	// Loads is how often the node has tried to load To, in all boots.
	Loads int `json:"loads,omitempty"`
}

// IsUnderWay reports whether the journal in a directory has a change during which no GPU may be offered.
// It is for the time before the first answer of gpu-driver, which says the same and more. bootID is that
// of the node: in another boot than that of the journal, a change for the next boot is being loaded. A
// journal that cannot be read has no change, as for gpu-driver.
func IsUnderWay(directory, bootID string) bool {
	text, err := statefile.Read(filepath.Join(directory, Journal), MaxJournal)
	if err != nil {
		return false
	}
	var journal struct {
		Change struct {
			Step   Step   `json:"step"`
			BootID string `json:"bootID"`
		} `json:"change"`
	}
	if json.Unmarshal(text, &journal) != nil {
		return false
	}
	switch c := journal.Change; c.Step {
	case "", StepFailed:
		return false
	case StepNextBoot:
		return c.BootID != bootID
	default:
		return true
	}
}

// Call makes a call at the control socket of gpu-driver. The errors are those of control.Call.
func Call(ctx context.Context, socket, call string, a Arguments) (Status, error) {
	var s Status
	err := control.Call(ctx, socket, call, a, &s)
	return s, err
}
