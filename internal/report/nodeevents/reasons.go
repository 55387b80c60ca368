// Package nodeevents decides on the Events, the GPU condition and the taint of a node in the
// cluster. It only compares values of package status: callers provide the time, and other packages
// write.
package nodeevents

// A Reason is the field reason of an Event.
type Reason string

// The reasons. Rows explains each of them.
const (
	GPUUnhealthy     Reason = "GPUUnhealthy"
	GPULost          Reason = "GPULost"
	GPUNeedsOperator Reason = "GPUNeedsOperator"
	GPUXid           Reason = "GPUXid"
	GPURecovered     Reason = "GPURecovered"
	GPURemoved       Reason = "GPURemoved"
	GPURepairPlanned Reason = "GPURepairPlanned"
	GPURepairStarted Reason = "GPURepairStarted"
	GPURepaired      Reason = "GPURepaired"
	GPURepairFailed  Reason = "GPURepairFailed"
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

	DriverChangeStarted      Reason = "DriverChangeStarted"
	DriverChangeNeedsRestart Reason = "DriverChangeNeedsRestart"
	DriverChangeFailed       Reason = "DriverChangeFailed"
	DriverChangeBlocked      Reason = "DriverChangeBlocked"
	DriverChanged            Reason = "DriverChanged"
)

// The types of Events.
const (
	normal  = "Normal"
	warning = "Warning"
)

// A Row is one row of the table of Events.
type Row struct {
	Reason Reason
	// Type is Normal or Warning, and Action the action of the daemon. Both are fields of the Event.
	Type, Action string
	// Pods is true if pods that hold the device also get the Event, if Events of pods are
	// configured.
	Pods bool
	// When explains when the Event is written, for the documentation.
	When string
}

// Rows is the table of Events. docs/reference.md is generated from it.
var Rows = []Row{
	{GPUUnhealthy, warning, "StopAllocating", true, "A GPU or MIG device became Unhealthy, or its remedy changed"},
	{GPULost, warning, "StopAllocating", true, "A GPU became Lost: the driver counts it, but cannot reach it"},
	{
		GPUNeedsOperator, warning, "StopAllocating", true,
		"The remedy for a GPU or MIG device became `human` or `hardware`: no reset or restart repairs the fault",
	},
	{
		GPUXid, warning, "UpdateCure", true, "An XID changed the verdict on a device that was not healthy before. " +
			"An XID that changes no verdict gives no Event; one that makes a device Unhealthy gives GPUUnhealthy " +
			"or GPUNeedsOperator",
	},
	{GPURecovered, normal, "StartAllocating", true, "A device with one of the Events above is Healthy again"},
	{GPURemoved, normal, "StopAllocating", true,
		"The driver no longer counts a GPU: it was unplugged, or unbound from the driver"},
	{GPURepairPlanned, normal, "PlanReset", false, "With `--repair=plan`: `idle` would reset the GPU now"},
	{GPURepairStarted, normal, "ResetGPU", false, "With `--repair=idle`, the daemon withdrew a GPU to reset it"},
	{GPURepaired, normal, "StartAllocating", false, "The GPU was reset by the daemon, and is Healthy"},
	{GPURepairFailed, warning, "StopAllocating", false,
		"The daemon's reset of a GPU failed, or did not repair the GPU"},
	{
		NVSwitchFailed, warning, "KeepDevices", false,
		"With `--kernel-log`, an NVSwitch logged a fatal error (SXid). It does not change the health of GPUs",
	},
	{DriverNotReady, warning, "KeepDevices", false, "The driver of a node with GPUs does not answer, or is missing"},
	{DriverReleased, normal, "KeepDevices", false,
		"The driver is released: by `quiesce`, by a request on the Node, or for a change of the driver"},
	{DriverReady, normal, "ReadDevices", false, "The driver answers again"},
	{
		GPUStepReached, normal, "Proceed", false,
		"With `--validate` or a range of drivers, a step on the way to GPUs for pods was reached",
	},
	{GPUStepMissing, warning, "Wait", false, "Such a step was not reached for a minute"},
	{
		ConfigRejected, warning, "KeepConfiguration", false,
		"The present configuration file is refused; the last good configuration stays in force",
	},
	{ConfigApplied, normal, "UseConfiguration", false, "The configuration file is used again"},
	{
		ResourceLeftOut, warning, "LeaveOut", false,
		"A GPU cannot be identified, and no other Event explains why, or a planned device is not offered",
	},
	{LabelsWithheld, warning, "LeaveLabels", false, "The labels of the node have not been as wanted for a minute"},
	{MIGLayoutWaiting, normal, "WaitForRelease", true,
		"A MIG layout cannot be applied to some GPUs before pods or processes end"},
	{
		MIGLayoutFailed, warning, "KeepInstances", false,
		"A MIG layout cannot be applied, or a step failed; the daemon retries where that can help",
	},
	{MIGLayoutReset, warning, "WaitForReset", false,
		"A MIG mode needs a reset of the GPU or a restart of the node to take effect"},
	{MIGLayoutMade, normal, "DivideGPUs", false, "A MIG layout was applied to the GPUs"},
	{DriverChangeStarted, normal, "ChangeDriver", false,
		"With `--driver-version`, the node has a slot, and no new pod gets a GPU until the driver is changed"},
	{DriverChangeNeedsRestart, warning, "WaitForRestart", false,
		"Something does not let go of the driver, and the next boot changes it"},
	{DriverChangeFailed, warning, "KeepDriver", false,
		"The new driver does not work. The driver before it is loaded again, and the node keeps its slot"},
	{DriverChangeBlocked, warning, "KeepDriver", false,
		"The wanted driver is not on the node, or must not or cannot be loaded there"},
	{DriverChanged, normal, "StartAllocating", false, "The wanted driver is loaded and works"},
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
