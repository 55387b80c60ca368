package inventory

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Snapshot is the state of the node's GPUs at one generation.
type Snapshot struct {
	// Generation rises by one with every change of the Snapshot. Generation 0 is the Snapshot
	// before the first health check.
	Generation uint64
	// Driver has the driver's versions; zero until NVML has answered.
	Driver Driver
	// GPUs are the GPUs of the node by ascending Index. An unreachable GPU stays here with State
	// Lost until the owner of the Snapshot removes it.
	GPUs []GPU
	// Control is the set of the driver's device nodes on the node.
	Control ControlNodes
	// Majors are the numbers of the driver's device nodes.
	Majors Majors
	// LeftOut are the GPUs counted by the driver that could not be identified, by ascending Index.
	LeftOut []LeftOut
	// Stale says why the last health check of the node failed; empty on success. A stale Snapshot
	// keeps the GPUs of the last successful check: a failed check does not mean an empty node.
	Stale string
	// LinksDue is true until the Links of all GPUs have been read. The missing ones are read soon.
	LinksDue bool
}

// Driver identifies the driver of a Snapshot.
type Driver struct {
	// Version is the driver's version, such as "580.95.05".
	Version string
	// CUDA is the newest CUDA version supported by the driver, such as "13.0"; empty if the driver
	// does not say.
	CUDA string
	// OnDisk is the version of the driver's files on disk, if different from Version, as after an
	// upgrade without a restart of the node. New processes load these files and cannot use the
	// kernel module.
	OnDisk string
}

// Mismatch reports, with the remedy, that the driver's files on disk do not match the loaded kernel
// module; empty if they match.
func (d Driver) Mismatch() string {
	if d.OnDisk == "" {
		return ""
	}
	return fmt.Sprintf("driver %s on disk, %s loaded: restart the node", d.OnDisk, d.Version)
}

// Branch returns the driver's branch, the number before the first dot of the version (580 for
// "580.95.05"). It returns 0 for a version that does not begin with a number.
func (d Driver) Branch() int {
	branch := 0
	for _, c := range d.Version {
		if c < '0' || c > '9' {
			break
		}
		branch = branch*10 + int(c-'0')
	}
	return branch
}

// Before reports whether the driver's version is known and older than the given one, such as
// "575.51.02".
func (d Driver) Before(version string) bool {
	numbers := strings.Split(d.Version, ".")
	for i, other := range strings.Split(version, ".") {
		if i == len(numbers) {
			return true
		}
		own, err := strconv.Atoi(numbers[i])
		if n, _ := strconv.Atoi(other); err != nil || own != n {
			return err == nil && own < n
		}
	}
	return false
}

// LeftOut is a GPU counted by the driver that could not be identified, with the reason.
type LeftOut struct {
	// Index is the expected NVML index of the GPU.
	Index int
	// Reason is a sentence without a full stop, for logs and status.
	Reason string
	// Retry is true if the GPU may be back, and only a new session can find it.
	Retry bool
}

// GPU returns the GPU with the given UUID.
func (s Snapshot) GPU(uuid string) (GPU, bool) {
	i := slices.IndexFunc(s.GPUs, func(g GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return GPU{}, false
	}
	return s.GPUs[i], true
}

// GPUAt returns the GPU with the given index.
func (s Snapshot) GPUAt(index int) (GPU, bool) {
	i := slices.IndexFunc(s.GPUs, func(g GPU) bool { return g.Index == index })
	if i < 0 {
		return GPU{}, false
	}
	return s.GPUs[i], true
}

// Equal reports whether two Snapshots are equal except for their generations.
func (s Snapshot) Equal(other Snapshot) bool {
	return s.Driver == other.Driver &&
		s.Control == other.Control &&
		s.Majors == other.Majors &&
		s.Stale == other.Stale &&
		s.LinksDue == other.LinksDue &&
		slices.Equal(s.LeftOut, other.LeftOut) &&
		slices.EqualFunc(s.GPUs, other.GPUs, GPU.Equal)
}

// UVMPatience is the longest wait for nvidia-uvm, a node that was seen to appear 13 s after the
// nodes of the GPUs. A container created earlier can never use CUDA.
const UVMPatience = time.Minute

// LacksUVM reports whether the node has nvidiactl but not nvidia-uvm. With byNumber, the kernel's
// major number for nvidia-uvm is enough.
func (s Snapshot) LacksUVM(byNumber bool) bool {
	return s.Control.Has(NodeControl) && !s.Control.Has(NodeUVM) && (!byNumber || s.Majors.UVM == 0)
}
