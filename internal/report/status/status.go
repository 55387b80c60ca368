// Package status holds all that a daemon knows about itself and its node in one value. The command
// status prints the value, and readiness follows from it. The JSON is a public interface of the
// program: fields are added, but never renamed or removed.
package status

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// A Status is the knowledge of a daemon at one moment. Times are in UTC, truncated to seconds, and
// zero if unset.
type Status struct {
	// Summary is all other fields in one line.
	Summary Summary `json:"summary,omitzero"`
	// Version is the daemon's build.
	Version string `json:"version"`
	// Simulated is the profile of a simulated node; empty on a real node.
	Simulated string `json:"simulated,omitempty"`
	// Driver is the version of the driver; empty before the first successful scan.
	Driver string `json:"driver,omitempty"`
	// GivenAway counts the GPUs and virtual functions that virtual machines have, and no container
	// can use.
	GivenAway int `json:"givenAway,omitempty"`
	// DriverMismatch says that the driver's files on disk do not fit the kernel module, and how to
	// fix the mismatch; empty if they fit.
	DriverMismatch string `json:"driverMismatch,omitempty"`
	// CUDA is the newest CUDA version that the driver supports.
	CUDA string `json:"cuda,omitempty"`
	// Generation rises by one whenever the known state of the GPUs changes; 0 before the first
	// scan.
	Generation uint64 `json:"generation,omitempty"`
	// Looked is when the last successful scan of the node ended.
	Looked time.Time `json:"looked,omitzero"`
	// Stale is why the last scan failed; empty if it succeeded.
	Stale string `json:"stale,omitempty"`
	// Node is a reason that applies to all GPUs at once; empty if there is none.
	Node string `json:"node,omitempty"`
	// Hanging counts the calls into the driver that missed their deadline and have not returned.
	Hanging int `json:"hanging,omitempty"`
	// Calls are the pending calls into the driver, the oldest first.
	Calls []Call `json:"calls,omitempty"`
	// Quiet is true while the driver is released: by quiesce, by a request on the Node, or for a change
	// of the driver. Quiesced has the details.
	Quiet    bool      `json:"quiet,omitempty"`
	Quiesced *Quiesced `json:"quiesced,omitempty"`

	// Readiness is the answer to the readiness probe.
	Readiness Readiness `json:"readiness,omitzero"`
	// Lead is the process of the node that leads.
	Lead Lead `json:"lead,omitzero"`

	// KubeletSocket and PodResourcesSocket are the sockets of the kubelet that the daemon uses; empty
	// if it uses none.
	KubeletSocket      string `json:"kubeletSocket,omitempty"`
	PodResourcesSocket string `json:"podResourcesSocket,omitempty"`
	// ConfigFile is the path of the configuration file; empty if there is none.
	ConfigFile string `json:"configFile,omitempty"`
	// ConfigGeneration numbers the configurations since the process started, from 1.
	ConfigGeneration uint64 `json:"configGeneration,omitempty"`
	// ConfigError is why the present contents of the file are not in force; empty if they are.
	ConfigError string `json:"configError,omitempty"`
	// ConfigLoaded is when the configuration in force was read, or last confirmed to equal the
	// file.
	ConfigLoaded time.Time `json:"configLoaded,omitzero"`
	// MetricsError is why configured metrics are not served; empty if there is no problem.
	MetricsError string `json:"metricsError,omitempty"`
	// MetricsAbsent are sentences about metrics of GPUs that the driver does not provide, with
	// reasons.
	MetricsAbsent []string `json:"metricsAbsent,omitempty"`
	// APIServerError is why the API server provides no data about the node; empty if the API server
	// answers or is not used. The kubelet is served in any case.
	APIServerError string `json:"apiServerError,omitempty"`
	// PodResourcesError is why the daemon cannot ask a running kubelet which pods hold devices,
	// with the setting to change; empty if there is no problem.
	PodResourcesError string `json:"podResourcesError,omitempty"`
	// LabelsError is why the labels of the node are not as wanted; empty if there is no problem.
	LabelsError string `json:"labelsError,omitempty"`

	// Reexecutions counts how often the process replaced itself because the driver was replaced.
	Reexecutions int `json:"reexecutions,omitempty"`
	// Kubelets counts the kubelets seen since the process started.
	Kubelets uint64 `json:"kubelets,omitempty"`

	// GPUs are the GPUs of the last scan by ascending index, each followed by its MIG devices.
	GPUs []Device `json:"gpus"`
	// NVSwitches are the fatal errors of NVSwitches in the kernel log since the process started,
	// such as "NVSwitch 0000:c4:00.0: SXid 20034". The kernel log is read only if configured.
	NVSwitches []string `json:"nvswitches,omitempty"`
	// LeftOut are sentences about the GPUs that cannot be read and the devices that are not
	// offered, with reasons.
	LeftOut []string `json:"leftOut,omitempty"`
	// Retries are the unreadable GPUs and the times of their next checks.
	Retries []Retry `json:"retries,omitempty"`
	// Unwatched are sentences about the GPUs without driver events, with reasons. Faults of these
	// GPUs are found by scans only.
	Unwatched []string `json:"unwatched,omitempty"`
	// MIG is the progress of the wanted MIG layout; nil if the daemon does not change layouts.
	MIG *MIGLayout `json:"mig,omitempty"`
	// DRA is the state of Dynamic Resource Allocation; nil if DRA is not used.
	DRA *DRA `json:"dra,omitempty"`
	// Steps are the states on the way to GPUs for pods, in order; nil if neither CUDA checks nor a
	// range of drivers is configured.
	Steps []ReadyStep `json:"steps,omitempty"`
	// Validation holds the results of the CUDA checks; nil if none are configured.
	Validation *Validation `json:"validation,omitempty"`
	// Reset is the last reset of GPUs, by the command reset or by a repair; nil if there was none since the
	// start of the daemon.
	Reset *Reset `json:"reset,omitempty"`
	// Repair is what the daemon does about GPUs whose remedy is a reset; nil if health.repair is off.
	Repair *repair.Status `json:"repair,omitempty"`
	// DriverChange is the progress of a change of the driver; nil if driver.version is empty and no
	// change is under way.
	DriverChange *driverchange.Status `json:"driverChange,omitempty"`
	// Holds are the devices that are temporarily withheld.
	Holds []Hold `json:"holds,omitempty"`

	// Resources are the served resources, by name.
	Resources []Resource `json:"resources"`
	// Warnings are sentences about other parts of the plan that deviate from the configuration or
	// from expectations.
	Warnings []string `json:"warnings,omitempty"`
	// MPS are sentences about resources that are shared by MPS and cannot be used, with reasons.
	MPS []string `json:"mps,omitempty"`

	// Holders are the containers that hold devices, according to the kubelet; nil if not requested.
	// HoldersError is why the kubelet did not answer.
	Holders      []Holder `json:"holders,omitzero"`
	HoldersError string   `json:"holdersError,omitempty"`
}

// Readiness is true if the daemon serves no less than was served on its node before.
type Readiness struct {
	// Ready never becomes false again.
	Ready bool `json:"ready"`
	// Reason is a sentence: why the daemon is not ready, or why a daemon that serves nothing is
	// ready.
	Reason string `json:"reason,omitempty"`
	// Since is when Ready last changed.
	Since time.Time `json:"since,omitzero"`
}

// Lead is the leading process among the processes of this program on the node. During a roll-out
// there are two of them.
type Lead struct {
	// This is true if this process leads.
	This bool `json:"this"`
	// Name is the name of the leading process; empty if unknown.
	Name string `json:"name,omitempty"`
	// Since is when the process began to lead.
	Since time.Time `json:"since,omitzero"`
	// Standbys counts the processes that wait to take over from this process.
	Standbys int `json:"standbys,omitempty"`
	// PreviousLeader is a previous leader that may still change GPUs; empty if there is none. MIG layouts,
	// MPS and time slices stay unchanged until it has ended.
	PreviousLeader string `json:"former,omitempty"`
	// Problem is why this process cannot take the lead; empty if it can.
	Problem string `json:"problem,omitempty"`
}

// String names the leader, for people.
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
		text += "; " + wording.Count(l.Standbys, "standby")
	}
	if l.PreviousLeader != "" {
		text += "; GPUs are not changed: " + l.PreviousLeader + " led before and is still running"
	}
	if l.Problem != "" {
		text += "; " + l.Problem
	}
	return text
}

// A Call is a pending call into the driver.
type Call struct {
	// GPU is the index of the GPU in the call; nil if the call concerns no GPU.
	GPU *int `json:"gpu,omitempty"`
	// Function is the NVML function.
	Function string `json:"function"`
	// Since is when the call began.
	Since time.Time `json:"since"`
}

// Quiesced describes a release of the driver.
type Quiesced struct {
	// Since is when the release was requested.
	Since time.Time `json:"since,omitzero"`
	// Allocate is true if new pods still get GPUs.
	Allocate bool `json:"allocate"`
	// ForChange is true if the daemon itself released the driver, to change it.
	ForChange bool `json:"forChange,omitempty"`
}

// A Retry is a GPU that could not be read.
type Retry struct {
	// Index is the GPU's NVML index.
	Index int `json:"index"`
	// Reason is why the GPU could not be read.
	Reason string `json:"reason"`
	// Next is the time of the next check.
	Next time.Time `json:"next,omitzero"`
}

// A MIGLayout is the progress of a node towards a MIG layout.
type MIGLayout struct {
	// Layout is the name of the wanted layout, and From the source of the choice. Both are empty if
	// no layout is wanted.
	Layout string `json:"layout,omitempty"`
	From   string `json:"from,omitempty"`
	// State is pending, rebooting, success or failed. Reason explains any state but success.
	State  string `json:"state,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Waiting are the UUIDs of the GPUs and MIG devices that must become free before the layout can
	// be applied.
	Waiting []string `json:"waiting,omitempty"`
}

// A Validation is the results of the CUDA checks.
type Validation struct {
	// Devices are the GPUs outside of MIG mode and the MIG devices, by ascending index.
	Devices []Validated `json:"devices"`
	// Seconds is the time from the start of the daemon to a verdict on every device; 0 before, and
	// in a process that does not lead.
	Seconds float64 `json:"seconds,omitempty"`
	// Unsaved is why the shown verdicts are not on disk; empty if they are.
	Unsaved string `json:"unsaved,omitempty"`
}

// A Validated is the result of the CUDA check of one device.
type Validated struct {
	Index string `json:"index"`
	UUID  string `json:"uuid"`
	// Result is proven, failed or waiting. Since is the time of the result. Reason explains any
	// result but proven.
	Result string    `json:"result"`
	Since  time.Time `json:"since,omitzero"`
	Reason string    `json:"reason,omitempty"`
	// InUse is true if the check waits for the users of the device.
	InUse bool `json:"inUse,omitempty"`
	// Retry is the time of the next check of a failed device.
	Retry time.Time `json:"retry,omitzero"`
	// Milliseconds is the duration of the check, and MemoryBytes the memory of its process.
	Milliseconds int64 `json:"milliseconds,omitempty"`
	MemoryBytes  int64 `json:"memoryBytes,omitempty"`
}

// The results.
const (
	Proven  = "proven"
	Failed  = "failed"
	Waiting = "waiting"
)

// A Hold withholds a device from pods.
type Hold struct {
	// Device is the UUID of the GPU or MIG device.
	Device string `json:"device"`
	// Resource is the name of the resource that would offer the device.
	Resource string `json:"resource,omitempty"`
	// Reason is a sentence without a full stop.
	Reason string `json:"reason"`
	// Listed is true if the device is listed as Unhealthy, and false if it is not listed.
	Listed bool `json:"listed"`
	// Node is true if a device node is missing.
	Node bool `json:"node,omitempty"`
	// Waits is true if another reason keeps the device from pods and counts first: the health of the
	// device, or another hold.
	Waits bool `json:"waits,omitempty"`
}

// A Resource is the state of one served resource.
type Resource struct {
	Name string `json:"name"`
	// Planned is true if the resource is in the plan. A resource that left the plan is served until
	// its devices have departed.
	Planned bool `json:"planned,omitempty"`
	// MPS is true if containers with the resource are clients of an MPS control daemon, whose
	// shared memory is mounted at /dev/shm.
	MPS bool `json:"mps,omitempty"`
	// Devices counts the devices in the list sent to the kubelet, Healthy the devices in it that
	// pods can get.
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	// Unoffered counts healthy units of GPUs that pods cannot get: with units.fit one, only the
	// units of one GPU are offered.
	Unoffered int `json:"unoffered,omitempty"`
	// Server is the phase of the resource's server: "waiting for kubelet", "registering",
	// "serving", "standing by: another server has registered", for a later process of this program,
	// or "standing by: another program has registered".
	Server string `json:"server"`
	// Agreed is true if the last comparison found the kubelet's account equal to the list that was
	// sent.
	Agreed bool `json:"agreed,omitempty"`
	// Problem is why the last registration failed or ended, or how the kubelet's account differs;
	// empty if there is no problem.
	Problem string `json:"problem,omitempty"`
	// Departing are the devices that left the plan and are still listed, as Unhealthy.
	Departing []Departing `json:"departing,omitempty"`
}

// Departing is a device that left the plan.
type Departing struct {
	// ID is the device's ID at the kubelet.
	ID string `json:"id"`
	// Reason is why the device left the plan.
	Reason string `json:"reason"`
	// Waiting is the condition for dropping the device from the list; empty if only time must pass.
	Waiting string `json:"waiting,omitempty"`
}

// Moment returns t in the precision of a Status.
func Moment(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// Stamp returns t in UTC in the format of RFC 3339; empty for the zero time.
func Stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}
