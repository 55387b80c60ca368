// Package nodeevents decides which Events, GPU condition and taint a node has in the cluster. It
// compares values of package status and does nothing else: times are given to it, and other
// packages write.
package nodeevents

// A Reason is why an Event was written, as its field reason has it.
type Reason string

// The reasons. Rows says when each is given.
const (
	GPUUnhealthy     Reason = "GPUUnhealthy"
	GPULost          Reason = "GPULost"
	GPUNeedsOperator Reason = "GPUNeedsOperator"
	GPUXid           Reason = "GPUXid"
	GPURecovered     Reason = "GPURecovered"
	GPURemoved       Reason = "GPURemoved"
	NVSwitchFailed   Reason = "NVSwitchFailed"
	DriverNotReady   Reason = "DriverNotReady"
	DriverReleased   Reason = "DriverReleased"
	DriverReady      Reason = "DriverReady"
	GPUStepReached   Reason = "GPUStepReached"
	GPUStepMissing   Reason = "GPUStepMissing"
	ConfigRejected   Reason = "ConfigRejected"
	ConfigApplied    Reason = "ConfigApplied"
	ResourceLeftOut  Reason = "ResourceLeftOut"
	LabelsWithheld   Reason = "LabelsWithheld"
	MIGLayoutWaiting Reason = "MIGLayoutWaiting"
	MIGLayoutFailed  Reason = "MIGLayoutFailed"
	MIGLayoutReset   Reason = "MIGLayoutNeedsReset"
	MIGLayoutMade    Reason = "MIGLayoutMade"
)

// The types of Events.
const (
	normal  = "Normal"
	warning = "Warning"
)

// A Row is one row of the table of Events.
type Row struct {
	Reason Reason
	// Type is Normal or Warning, Action what the daemon did: both as the Event has them.
	Type, Action string
	// Pods says that the pods that hold the device get the Event too, where Events of pods are wanted.
	Pods bool
	// When says when the Event is written, for the documentation.
	When string
}

// Rows is the table of Events. docs/reference.md is written from it.
var Rows = []Row{
	{GPUUnhealthy, warning, "StopAllocating", true, "A GPU or MIG device became Unhealthy, or its remedy changed"},
	{GPULost, warning, "StopAllocating", true, "A GPU became Lost: it is counted by the driver and cannot be reached"},
	{
		GPUNeedsOperator, warning, "StopAllocating", true,
		"The remedy for a GPU or MIG device became `human` or `hardware`: no reset or restart ends the fault",
	},
	{
		GPUXid, warning, "UpdateCure", true, "An XID changed the verdict on a device that was not healthy before. " +
			"An XID that changes no verdict gives no Event; one that makes a device Unhealthy gives GPUUnhealthy " +
			"or GPUNeedsOperator",
	},
	{GPURecovered, normal, "StartAllocating", true, "A device of which one of the Events above told is Healthy again"},
	{GPURemoved, normal, "StopAllocating", true, "The driver no longer counts a GPU: it was unplugged, or unbound from the driver"},
	{
		NVSwitchFailed, warning, "KeepDevices", false,
		"With `--kernel-log`, an NVSwitch logged a fatal error (SXid). No GPU is judged by it",
	},
	{DriverNotReady, warning, "KeepDevices", false, "The driver of a node with GPUs does not answer, or is not there"},
	{DriverReleased, normal, "KeepDevices", false, "The driver was released by `quiesce`"},
	{DriverReady, normal, "ReadDevices", false, "The driver answers again"},
	{
		GPUStepReached, normal, "Proceed", false,
		"With `--validate` or a range of drivers, a step until pods get GPUs was reached",
	},
	{GPUStepMissing, warning, "Wait", false, "It was not reached for a minute"},
	{
		ConfigRejected, warning, "KeepConfiguration", false,
		"The configuration file as it is now is refused; the last good one stays in force",
	},
	{ConfigApplied, normal, "UseConfiguration", false, "The configuration file is used again"},
	{
		ResourceLeftOut, warning, "LeaveOut", false,
		"A GPU cannot be identified, and no other Event tells why; or a device of the plan is not offered",
	},
	{LabelsWithheld, warning, "LeaveLabels", false, "For a minute the labels of the node are not as the daemon wants them"},
	{MIGLayoutWaiting, normal, "WaitForRelease", true, "A MIG layout cannot be made on some GPUs before pods or processes end"},
	{
		MIGLayoutFailed, warning, "KeepInstances", false,
		"A MIG layout cannot be made, or a step failed; what may succeed later is tried again",
	},
	{MIGLayoutReset, warning, "WaitForReset", false, "A MIG mode is in force only after a reset of the GPU or a restart of the node"},
	{MIGLayoutMade, normal, "DivideGPUs", false, "The GPUs are as a MIG layout says, and were not before"},
}

// Row returns the reason's row of the table.
func (r Reason) Row() Row {
	for _, row := range Rows {
		if row.Reason == r {
			return row
		}
	}
	return Row{Reason: r, Type: warning}
}
