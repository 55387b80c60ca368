// Package status is all that a daemon knows of itself and its node, as one value: what status
// prints and what readiness is judged by. Its JSON is an interface of the program: fields are
// added, and none is renamed or removed.
package status

import "time"

// A Status is what a daemon knows at one moment. Times are in UTC, to the second, and zero where
// there is none.
type Status struct {
	// Summary is all other fields in one line.
	Summary Summary `json:"summary,omitzero"`
	// Version is the daemon's build.
	Version string `json:"version"`
	// Simulated is the profile of a simulated node; empty on a real one.
	Simulated string `json:"simulated,omitempty"`
	// Driver is the version of the driver; empty before the first look that succeeded.
	Driver string `json:"driver,omitempty"`
	// GivenAway is how many GPUs and virtual functions of GPUs of the node are given to virtual
	// machines, so that no container can use them.
	GivenAway int `json:"givenAway,omitempty"`
	// DriverMismatch says that the driver's files on disk do not fit the kernel module, and what to
	// do; empty if they fit.
	DriverMismatch string `json:"driverMismatch,omitempty"`
	// CUDA is the newest CUDA version that the driver supports.
	CUDA string `json:"cuda,omitempty"`
	// Generation rises by one whenever what is known of the GPUs changes; 0 before the first look.
	Generation uint64 `json:"generation,omitempty"`
	// Looked is when the last look at the node that succeeded ended.
	Looked time.Time `json:"looked,omitzero"`
	// Stale is why the last look failed; empty if it did not.
	Stale string `json:"stale,omitempty"`
	// Node is a reason that holds for all GPUs at once; empty if there is none.
	Node string `json:"node,omitempty"`
	// Hanging is the number of calls into the driver that have not returned within their deadline.
	Hanging int `json:"hanging,omitempty"`
	// Calls are the calls into the driver that are under way, the oldest first.
	Calls []Call `json:"calls,omitempty"`
	// Quiet says that the driver was released by quiesce; Quiesced, how.
	Quiet    bool      `json:"quiet,omitempty"`
	Quiesced *Quiesced `json:"quiesced,omitempty"`

	// Readiness is the answer to the readiness probe.
	Readiness Readiness `json:"readiness,omitzero"`
	// Lead says which process of the node decides.
	Lead Lead `json:"lead,omitzero"`

	// ConfigFile is the path of the configuration file; empty if there is none.
	ConfigFile string `json:"configFile,omitempty"`
	// ConfigGeneration numbers the configurations that were in force since the process started, from
	// 1.
	ConfigGeneration uint64 `json:"configGeneration,omitempty"`
	// ConfigError is why the file as it is now is not in force; empty if it is.
	ConfigError string `json:"configError,omitempty"`
	// ConfigLoaded is when the configuration in force was read, or found to be the file's content
	// still.
	ConfigLoaded time.Time `json:"configLoaded,omitzero"`
	// MetricsError is why metrics are not served although they are to be; empty if there is no reason.
	MetricsError string `json:"metricsError,omitempty"`
	// MetricsAbsent are sentences: which metrics of GPUs the driver does not let the daemon have, and
	// why.
	MetricsAbsent []string `json:"metricsAbsent,omitempty"`
	// APIServerError is why the API server does not tell of the node; empty if it does, or is not
	// asked. kubelet is served as before.
	APIServerError string `json:"apiServerError,omitempty"`
	// PodResourcesError is why a kubelet that runs is not asked which pods hold devices, and what
	// to set; empty if there is no reason.
	PodResourcesError string `json:"podResourcesError,omitempty"`
	// LabelsError is why the labels of the node are not as the daemon wants them; empty if there is no
	// reason.
	LabelsError string `json:"labelsError,omitempty"`

	// Reexecutions is how often the process replaced itself by a new one, because the driver was
	// replaced.
	Reexecutions int `json:"reexecutions,omitempty"`
	// Kubelets is how many kubelets were seen since the process started.
	Kubelets uint64 `json:"kubelets,omitempty"`

	// GPUs are the GPUs of the last look by ascending index, each followed by its MIG devices.
	GPUs []Device `json:"gpus"`
	// NVSwitches are the fatal errors of NVSwitches that the kernel's log told since the process
	// started, such as "NVSwitch 0000:c4:00.0: SXid 20034". It is read where the configuration wants
	// that.
	NVSwitches []string `json:"nvswitches,omitempty"`
	// LeftOut are sentences: which GPUs cannot be read, which devices are not offered, and why.
	LeftOut []string `json:"leftOut,omitempty"`
	// Retries are the GPUs that could not be read and when each is asked again.
	Retries []Retry `json:"retries,omitempty"`
	// Unwatched are sentences: which GPUs give no events, and why. Only looks find their faults.
	Unwatched []string `json:"unwatched,omitempty"`
	// MIG is how far the node is with the MIG layout that is asked for; nil where layouts are not
	// changed.
	MIG *MIGLayout `json:"mig,omitempty"`
	// DRA is what is known of Dynamic Resource Allocation; nil where it is not used.
	DRA *DRA `json:"dra,omitempty"`
	// Steps are the states that the node goes through until pods get its GPUs, in their order; nil
	// where neither proofs nor certain drivers are asked for.
	Steps []ReadyStep `json:"steps,omitempty"`
	// Validation is on which devices CUDA is proven to work; nil where that is not asked for.
	Validation *Validation `json:"validation,omitempty"`
	// Reset is the last reset that was asked for by the command reset; nil if there was none since the
	// start of the daemon.
	Reset *Reset `json:"reset,omitempty"`
	// Holds are the devices that are not given out for a while.
	Holds []Hold `json:"holds,omitempty"`

	// Resources are the resources that are served, by name.
	Resources []Resource `json:"resources"`
	// Warnings are sentences: what else of the plan is not as the configuration or the node makes one
	// expect.
	Warnings []string `json:"warnings,omitempty"`
	// MPS are sentences: which resources that are shared by MPS cannot be used, and why.
	MPS []string `json:"mps,omitempty"`

	// Holders are the containers that hold devices, as kubelet says; nil where they were not asked
	// for. HoldersError is why kubelet did not say.
	Holders      []Holder `json:"holders,omitzero"`
	HoldersError string   `json:"holdersError,omitempty"`
}

// Readiness is whether the daemon serves no less than what was served on its node before.
type Readiness struct {
	// Ready stays true once it was.
	Ready bool `json:"ready"`
	// Reason is a sentence: why the daemon is not ready, or why it is although it serves nothing.
	Reason string `json:"reason,omitempty"`
	// Since is when Ready became what it is.
	Since time.Time `json:"since,omitzero"`
}

// Lead says which of the processes of this program on the node decides, and since when. During a
// roll-out there are two of them.
type Lead struct {
	// This says that it is this process.
	This bool `json:"this"`
	// Name is the name of the process; empty if it is not known.
	Name string `json:"name,omitempty"`
	// Since is when it began to lead.
	Since time.Time `json:"since,omitzero"`
	// Standbys is how many processes wait for the lead of this one.
	Standbys int `json:"standbys,omitempty"`
	// Former is a process that led before and may still change GPUs: MIG layouts, MPS and time slices
	// stay as they are until it has ended. It is empty if there is none.
	Former string `json:"former,omitempty"`
	// Problem is why this process cannot take the lead; empty if it can.
	Problem string `json:"problem,omitempty"`
}

// String says who leads, in words for people.
func (l Lead) String() string {
	var text string
	switch {
	case l.This:
		text = "this process"
	case l.Name != "":
		text = l.Name
	default:
		text = "no process is known to lead"
	}
	if !l.Since.IsZero() {
		text += " since " + Stamp(l.Since)
	}
	if l.Standbys > 0 {
		text += "; " + Count(l.Standbys, "standby")
	}
	if l.Former != "" {
		text += "; GPUs are not changed: " + l.Former + " led before and has not ended"
	}
	if l.Problem != "" {
		text += "; " + l.Problem
	}
	return text
}

// A Call is a call into the driver that has not returned.
type Call struct {
	// GPU is the index of the GPU that the call is about; nil if it is about none.
	GPU *int `json:"gpu,omitempty"`
	// Function is the NVML function.
	Function string `json:"function"`
	// Since is when the call began.
	Since time.Time `json:"since"`
}

// Quiesced is how the driver was released.
type Quiesced struct {
	// Since is when it was asked for.
	Since time.Time `json:"since,omitzero"`
	// Allocate says that GPUs are given to new pods meanwhile.
	Allocate bool `json:"allocate"`
}

// A Retry is a GPU that could not be read.
type Retry struct {
	// Index is the GPU's NVML index.
	Index int `json:"index"`
	// Reason is why it could not be read.
	Reason string `json:"reason"`
	// Next is when it is asked again.
	Next time.Time `json:"next,omitzero"`
}

// A MIGLayout is how far a node is with a MIG layout.
type MIGLayout struct {
	// Layout is the name of the wanted layout, and From where it was named; both are empty if none is
	// wanted.
	Layout string `json:"layout,omitempty"`
	From   string `json:"from,omitempty"`
	// State is pending, rebooting, success or failed, and Reason why it is not success.
	State  string `json:"state,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Waiting are the GPUs and MIG devices, by UUID, that are in use and have to be free before the
	// layout can be made.
	Waiting []string `json:"waiting,omitempty"`
}

// A Validation is on which devices CUDA is proven to work.
type Validation struct {
	// Devices are the GPUs that are not in MIG mode, and the MIG devices, by ascending index.
	Devices []Validated `json:"devices"`
	// Seconds is how long after the start of the daemon there was a verdict on each device; 0 before,
	// and in a process that does not lead.
	Seconds float64 `json:"seconds,omitempty"`
	// Unsaved is why verdicts are not on disk as they are shown; empty if they are.
	Unsaved string `json:"unsaved,omitempty"`
}

// A Validated is a device in it.
type Validated struct {
	Index string `json:"index"`
	UUID  string `json:"uuid"`
	// Result is proven, failed or waiting, Since when that was found, and Reason why it is not proven.
	Result string    `json:"result"`
	Since  time.Time `json:"since,omitzero"`
	Reason string    `json:"reason,omitempty"`
	// InUse says that it waits for those who use it.
	InUse bool `json:"inUse,omitempty"`
	// Retry is when a device that failed is tried again.
	Retry time.Time `json:"retry,omitzero"`
	// Milliseconds is how long the proof took, and MemoryBytes how much memory its process had.
	Milliseconds int64 `json:"milliseconds,omitempty"`
	MemoryBytes  int64 `json:"memoryBytes,omitempty"`
}

// The results.
const (
	Proven  = "proven"
	Failed  = "failed"
	Waiting = "waiting"
)

// A Hold keeps a device from being given out.
type Hold struct {
	// Device is the UUID of the GPU or MIG device.
	Device string `json:"device"`
	// Resource is the name of the resource that would offer it.
	Resource string `json:"resource,omitempty"`
	// Reason is a sentence without a full stop.
	Reason string `json:"reason"`
	// Listed says that the device is listed as Unhealthy; otherwise it is not listed.
	Listed bool `json:"listed"`
	// Node says that a device node is missing for it.
	Node bool `json:"node,omitempty"`
}

// A Resource is how one resource is being served.
type Resource struct {
	Name string `json:"name"`
	// Planned says that the plan has the resource. One that it has no longer is served until its
	// devices have departed.
	Planned bool `json:"planned,omitempty"`
	// MPS says that containers with its devices are clients of an MPS control daemon, whose shared
	// memory they have at /dev/shm.
	MPS bool `json:"mps,omitempty"`
	// Devices counts the devices that kubelet is told of, Healthy those of them that may be given to
	// pods.
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	// Unoffered counts the units of GPUs that are well which are not given to pods: with units.fit
	// one, those of one GPU are on offer.
	Unoffered int `json:"unoffered,omitempty"`
	// Server is the phase of the resource's server: "waiting for kubelet", "registering", "serving",
	// "standing by: another server has registered", which is a later process of this program, or
	// "standing by: another program has registered".
	Server string `json:"server"`
	// Agreed says that kubelet's own account of the resource was the list that was sent, when it was
	// compared last.
	Agreed bool `json:"agreed,omitempty"`
	// Problem is why the last registration failed or ended, or how kubelet's account differs; empty
	// while all is well.
	Problem string `json:"problem,omitempty"`
	// Departing are the devices that left the plan and are still listed, as Unhealthy.
	Departing []Departing `json:"departing,omitempty"`
}

// Departing is a device that left the plan.
type Departing struct {
	// ID is the device's ID at kubelet.
	ID string `json:"id"`
	// Reason is why the device left the plan.
	Reason string `json:"reason"`
	// Waiting is what its list waits for before it drops the device; empty if that is only time.
	Waiting string `json:"waiting,omitempty"`
}

// Moment returns t as a Status has it.
func Moment(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// Stamp returns t as RFC 3339 writes it, in UTC; empty for the zero time.
func Stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}
