// Package driverchange decides what gpu-node-agent does next to change the driver of its node. The
// program gpu-driver makes the change and keeps its journal. Each step follows from the journal and from
// the state of the node, so a process that starts during a change continues it.
//
// The steps are:
//
//  1. gpu-driver downloads the driver, if the configuration names a URL.
//  2. The agent takes a slot of the cluster, and withholds the GPUs from new pods.
//  3. The pods with GPUs end: the agent waits for them or evicts them.
//  4. gpu-driver copies the driver, and waits until nobody uses the present one.
//  5. The agent releases the driver, and gpu-driver loads the new one.
//  6. The agent uses the new driver. If the driver works, the agent confirms it; otherwise gpu-driver
//     changes it back, and the node keeps its slot.
//  7. The agent offers the GPUs again, and gives the slot back.
package driverchange

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// Pods is what happens to pods with GPUs before a change.
type Pods int

// What happens to pods.
const (
	Wait  Pods = iota // the change waits until they have ended
	Evict             // they are evicted within their disruption budgets
	None              // they are left alone: the next boot changes the driver if they still run
)

func (p Pods) String() string { return [...]string{"wait", "evict", "none"}[p] }

const (
	// HoldersLimit is how long gpu-driver waits for users of the driver, or tries to unload it, before
	// the change is left to the next boot.
	HoldersLimit = 5 * time.Minute
	// ProofLimit is how long a new driver may take until it works. Afterwards it is changed back.
	ProofLimit = 10 * time.Minute
	// SilenceLimit is how long a gpu-driver that does not answer may keep working GPUs from pods.
	SilenceLimit = 10 * time.Minute
	// MinTrial is the shortest time for which a process tries a new driver before it is changed back,
	// even after ProofLimit: no process may have used the driver until then.
	MinTrial = 2 * time.Minute
)

// releasedByOthers says that this program must not use the driver, and what ends that.
const releasedByOthers = "the driver is released by quiesce or by a request on the Node; run gpu-device-plugin " +
	"resume, or remove the request"

// HoldReason is the reason of the holds on all devices during a change.
const HoldReason = "the driver of the node is being changed"

// Facts are the inputs of Next.
type Facts struct {
	// Wanted is the configured version, such as 580.95.05, or digest, such as sha256:0a…; empty if the
	// driver is not changed. Pods is what happens to pods with GPUs.
	Wanted string
	Pods   Pods
	// Archive is the SHA-256 digest of the archive that has the wanted driver; empty if gpu-driver has it
	// from elsewhere.
	Archive string
	// Refused is why the driver must not be changed, according to the Node; empty if it may.
	Refused string
	Host    *Host // nil if gpu-driver does not answer, for the reason Silent
	Silent  string
	// SilentFor is for how long gpu-driver has not answered while this process had working GPUs, or had the
	// driver released.
	SilentFor time.Duration
	// HasSlot is true while the node has a slot of the cluster, since SlotSince. NoSlot is why it has
	// none. If the slot is newer than a failure, an operator has freed the previous slot, and the change
	// is tried again.
	HasSlot   bool
	NoSlot    string
	SlotSince time.Time
	// Withheld is true while no GPU is offered because of a change. Settled is true after the time in
	// which the kubelet may still give one to a pod.
	Withheld, Settled bool
	// Users are the pods with GPUs, and Unknown is why they are not known; empty if they are.
	Users   []string
	Unknown string
	// Released is true while this program has released the driver for a change, and ReleasedByOthers
	// while quiesce or a request on the Node has released it. This program then does not use the driver.
	Released, ReleasedByOthers bool
	Problem                    string // why the loaded driver does not work; empty if it works
	// Tried is how long this process has used a driver in PhaseUnproven.
	Tried time.Duration
	Now   time.Time
}

// An Act is the next thing to do.
type Act int

// The acts. Each may be repeated.
const (
	Nothing          Act = iota
	Fetch                // gpu-driver downloads the driver
	TakeSlot             // ask for a slot of the cluster
	Withhold             // stop offering GPUs
	EvictPods            // evict the pods with GPUs
	Swap                 // gpu-driver begins, and waits for users of the driver
	Release              // this process releases the driver
	ChangeAtNextBoot     // gpu-driver leaves the change to the next boot
	UseDriver            // this process uses the driver again
	Confirm              // gpu-driver keeps the driver
	Revert               // gpu-driver changes back, for Step.Reason
	Forget               // gpu-driver forgets the failed change
)

func (a Act) String() string {
	return [...]string{"nothing", "fetch the driver", "take a slot", "withhold", "end pods", "swap", "release",
		"leave to the next boot", "use", "confirm", "revert", "forget"}[a]
}

// A Step is the next step.
type Step struct {
	Act    Act
	State  State
	Reason string // a sentence without a full stop; empty if there is nothing to say
	// Digest is the folder of the wanted driver; empty if it is not known.
	Digest  string
	Percent int // of the whole change
	// Withholds is true if GPUs must not be offered, NeedsSlot if the change has or wants a slot.
	Withholds, NeedsSlot bool
	// Reboot is why the node must be restarted; empty if it need not.
	Reboot string
}

// Next returns the next step.
func Next(f Facts) Step {
	if f.Host == nil {
		return await(f)
	}
	if c := f.Host.Change; c != nil {
		return follow(f, *c)
	}
	if f.Released { // for a change that is over
		return Step{Act: UseDriver, State: Changing, Reason: "the driver is used again", Withholds: true,
			NeedsSlot: true, Percent: 95}
	}
	if f.Wanted == "" {
		return Step{State: Off}
	}
	return begin(f)
}

// await returns the next step while gpu-driver does not answer. Nothing is concluded from that: GPUs
// that are withheld stay so, and a slot stays taken. After SilenceLimit GPUs are offered again.
func await(f Facts) Step {
	s := Step{State: Waiting, Reason: "gpu-driver does not answer: " + f.Silent, Withholds: f.Withheld,
		NeedsSlot: f.HasSlot}
	switch isOver := f.SilentFor >= SilenceLimit; {
	case f.Wanted == "" && !f.Withheld:
		s = Step{State: Off}
	case isOver && f.Released:
		s.Act, s.Reason = UseDriver, fmt.Sprintf("gpu-driver has not answered for %v, and the driver is used: %s",
			SilenceLimit, f.Silent)
	case isOver:
		s.Withholds, s.Reason = false, fmt.Sprintf("gpu-driver has not answered for %v, and GPUs are offered: %s",
			SilenceLimit, f.Silent)
	}
	return s
}

// begin returns the next step of a node without a change.
func begin(f Facts) Step {
	folder, reason := find(f)
	s := Step{State: Blocked, Reason: reason, Digest: folder.Digest}
	switch {
	case f.Refused != "":
		s.Reason = f.Refused
		return s
	case reason != "":
		return s
	case folder.Digest == "":
		return fetch(f)
	case folder.Digest == f.Host.LoadedDigest && f.Host.Current == folder.Digest:
		s.State = Done
		return s
	case len(f.Host.Refusals) > 0:
		s.Reason = strings.Join(f.Host.Refusals, "; ")
		return s
	case folder.Problem != "":
		s.Reason = folder.Problem
		return s
	}
	s.State = Waiting
	if f.ReleasedByOthers {
		s.Reason = "the change waits: " + releasedByOthers
		return s
	}
	if s.NeedsSlot = true; !f.HasSlot {
		s.Act, s.Reason = TakeSlot, f.NoSlot
		return s
	}
	s.State, s.Withholds, s.Percent = Changing, true, 5
	switch {
	case !f.Settled:
		s.Act, s.Reason = Withhold, "GPUs are withheld from new pods"
	case f.Pods == None: // gpu-driver finds out who uses the driver
		s.Act, s.Reason = Swap, "the change begins"
	case f.Unknown != "":
		s.State, s.Reason = Waiting, "the pods with GPUs are not known: "+f.Unknown
	case len(f.Users) > 0 && f.Pods == Evict:
		s.Act, s.Reason = EvictPods, "pods with GPUs are evicted: "+wording.List(f.Users)
	case len(f.Users) > 0:
		s.State, s.Reason = Waiting, "waiting for the end of pods with GPUs: "+wording.List(f.Users)
	default:
		s.Act, s.Reason, s.Percent = Swap, "the change begins", 10
	}
	return s
}

// fetch returns the next step of a node whose driver is not downloaded yet. The node needs no slot for
// it, and its GPUs stay in service.
func fetch(f Facts) Step {
	if len(f.Host.Refusals) > 0 {
		return Step{State: Blocked, Reason: strings.Join(f.Host.Refusals, "; ")}
	}
	s := Step{Act: Fetch, State: Waiting, Reason: "gpu-driver downloads the driver"}
	d := f.Host.Download
	switch {
	case d == nil || d.Archive != f.Archive:
		return s
	case d.IsFinal:
		s.State, s.Reason = Blocked, "the driver cannot be downloaded: "+d.Problem
		return s
	case d.Problem != "":
		s.Reason += "; the last try failed: " + d.Problem
	case d.Total > 0:
		s.Reason += fmt.Sprintf(": %.1f of %.1f MB", float64(d.Done)/1e6, float64(d.Total)/1e6)
	}
	s.Percent = d.Percent
	return s
}

// follow returns the next step of a node with a change.
func follow(f Facts, c Change) Step {
	s := Step{State: Changing, Reason: c.Reason, Digest: c.To, NeedsSlot: true, Withholds: true, Percent: percent(c)}
	folder, _ := find(f)
	if f.Wanted != "" && folder.Digest != c.To && (c.Phase == PhaseFailed || c.Phase == PhaseNextBoot) {
		s.Act, s.Reason = Forget, "another driver is wanted now"
		return s
	}
	switch c.Phase {
	case PhasePlacing:
		s.Reason = "the driver is copied and verified"
	case PhaseUnloading:
		switch {
		case !f.Released && !f.ReleasedByOthers:
			s.Act, s.Reason = Release, "this program releases the driver"
		case len(c.Holders) > 0 && f.Now.Sub(c.Since) >= HoldersLimit:
			s.Act, s.Reason = ChangeAtNextBoot, "the driver is still in use: "+wording.List(c.Holders)
		case c.Reason != "" && f.Now.Sub(c.Since) >= HoldersLimit:
			s.Act, s.Reason = ChangeAtNextBoot, "the driver is not unloaded: "+c.Reason
		case len(c.Holders) > 0:
			s.Reason = "the driver is in use: " + wording.List(c.Holders)
		}
	case PhaseLoading, PhaseReverting:
		if s.Reason == "" {
			s.Reason = "modules are loaded"
		}
		if c.Phase == PhaseReverting && !f.Released && !f.ReleasedByOthers { // this program has tried the new driver
			s.Act = Release
		}
	case PhaseUnproven:
		switch {
		case f.Released:
			s.Act, s.Reason = UseDriver, "the new driver is used"
		case f.ReleasedByOthers:
			s.State, s.Reason = Waiting, "the new driver is not tried yet: "+releasedByOthers
		case f.Problem == "":
			s.Act, s.Reason = Confirm, "the new driver works"
		case f.Now.Sub(c.Since) >= ProofLimit && f.Tried >= MinTrial:
			s.Act, s.Reason = Revert, f.Problem
		default:
			s.Reason = "the new driver does not work yet: " + f.Problem
		}
	case PhaseNextBoot:
		s.State, s.Withholds = AwaitsBoot, false
		s.Reason = "the driver is changed at the next boot, because it is in use"
		if c.Reason != "" {
			s.Reason += ": " + c.Reason
		}
		s.Reboot = "the driver is to be changed"
		if f.Released {
			s.Act = UseDriver
		}
	case PhaseFailed:
		s.State, s.Withholds, s.Percent = Failed, false, 0
		switch {
		case f.Released:
			s.Act = UseDriver
		case f.Wanted == "":
			s.Act, s.NeedsSlot = Forget, false
		case f.HasSlot && f.SlotSince.After(c.Since):
			s.Act, s.Reason = Forget, "the change is tried again"
		}
	default:
		s.State = Waiting
		s.Reason = fmt.Sprintf("gpu-driver is in the unknown phase %q: upgrade gpu-node-agent", c.Phase)
	}
	return s
}

// percent returns the progress of a whole change: most of its time is for copying and for the proof.
func percent(c Change) int {
	switch c.Phase {
	case PhasePlacing:
		return 10 + c.Percent*3/10
	case PhaseUnloading:
		return 40 + c.Percent/10
	case PhaseLoading, PhaseReverting:
		return 50 + c.Percent/5
	case PhaseUnproven:
		return 75
	case PhaseNextBoot, PhaseFailed: // nothing is under way
	}
	return 0
}

// find returns the folder of the wanted driver, or why there is none. Without a folder and a reason, the
// driver is not downloaded yet.
func find(f Facts) (found Folder, reason string) {
	wanted, folders := f.Wanted, f.Host.Folders
	isWanted := func(f Folder) bool { return f.Version == wanted || "sha256:"+f.Digest == wanted }
	if f.Archive != "" {
		i := slices.IndexFunc(folders, func(one Folder) bool { return slices.Contains(one.Archives, f.Archive) })
		switch {
		case i < 0:
			return Folder{}, ""
		case !isWanted(folders[i]):
			return Folder{}, fmt.Sprintf("the archive with driver.sha256 has driver %s (sha256:%s), and "+
				"driver.version is %s: correct one of them", folders[i].Version, folders[i].Digest, wanted)
		}
		return folders[i], ""
	}
	return only(wanted, slices.DeleteFunc(slices.Clone(folders), func(f Folder) bool { return !isWanted(f) }), folders)
}

// only returns the only folder of those found, or why there is not one.
func only(wanted string, found, folders []Folder) (f Folder, reason string) {
	switch len(found) {
	case 1:
		return found[0], ""
	case 0:
		return Folder{}, fmt.Sprintf("gpu-driver has no driver %s: %s", wanted, describeFolders(folders))
	}
	var digests []string
	for _, folder := range found {
		digests = append(digests, "sha256:"+folder.Digest)
	}
	slices.Sort(digests)
	return Folder{}, fmt.Sprintf("there are %d folders of driver %s: set driver.version to one of %s", len(found),
		wanted, strings.Join(digests, ", "))
}

// describeFolders lists the drivers that gpu-driver has.
func describeFolders(folders []Folder) string {
	if len(folders) == 0 {
		return "it has none; give it an image in driver.images of the chart, or set driver.source"
	}
	var versions []string
	for _, f := range folders {
		versions = append(versions, f.Version)
	}
	slices.Sort(versions)
	return "it has " + strings.Join(slices.Compact(versions), ", ") +
		"; give it the image in driver.images of the chart, or set driver.source"
}
