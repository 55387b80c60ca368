package status

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// DRA is the state of Dynamic Resource Allocation on the node.
type DRA struct {
	// Mode is plugin, dra or split.
	Mode string `json:"mode"`
	// DriverName is the name of the DRA driver; empty for gpu.nvidia.com. DriverNameKept is the
	// reason why another name than the configured one is in use; empty if there is no difference.
	DriverName     string `json:"driverName,omitempty"`
	DriverNameKept string `json:"driverNameKept,omitempty"`
	// Driver is the state of the DRA driver's registration with the kubelet.
	Driver DRADriver `json:"driver"`
	// Slices and Devices count the node's ResourceSlices at the API server and the devices in them.
	// Generation is the generation of the pool.
	Slices     int   `json:"slices,omitempty"`
	Devices    int   `json:"devices,omitempty"`
	Generation int64 `json:"generation,omitempty"`
	// Problem is why the slices at the API server are not as wanted; empty if they are.
	Problem string `json:"problem,omitempty"`
	// API is the version of resource.k8s.io that the API server serves; empty until the API server
	// was asked. NoTaints is true if the API server drops the taints of devices, NoCounters if it
	// drops counters, without which GPUs are not divided for claims, and NoShares if it does not
	// support devices that several claims share.
	API        string `json:"api,omitempty"`
	NoTaints   bool   `json:"noTaints,omitempty"`
	NoCounters bool   `json:"noCounters,omitempty"`
	NoShares   bool   `json:"noShares,omitempty"`
	// GPUs are the owners of the GPUs, by index.
	GPUs []DRAGPU `json:"gpus,omitempty"`
	// Claims are the prepared claims.
	Claims []DRAClaim `json:"claims,omitempty"`
}

// DRADriver is the state of the DRA driver's registration with the kubelet.
type DRADriver struct {
	Registered bool `json:"registered"`
	// Problem is why the driver is not registered; empty if it is, or should not be.
	Problem string `json:"problem,omitempty"`
	// NameConflict is the socket of another program's driver with the same name; empty if there is
	// none.
	NameConflict string `json:"foreign,omitempty"`
	// CompetingDriver explains that NVIDIA's driver, which has another name, may offer the same
	// GPUs. This driver then offers none. It is empty if NVIDIA's driver is absent.
	CompetingDriver string `json:"rival,omitempty"`
}

// DRAGPU is the owner of a GPU.
type DRAGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	// Owner is plugin, leaving-plugin, dra, leaving-dra or nobody; empty until the owner is known.
	Owner string `json:"owner,omitempty"`
	// Waiting is the condition that delays a change of the owner.
	Waiting string `json:"waiting,omitempty"`
	// Unpublished is why no ResourceSlice has a device of a GPU whose owner is dra: the API server
	// would drop a part of it. It is empty for all other GPUs.
	Unpublished string `json:"unpublished,omitempty"`
}

// DRAClaim is a prepared claim.
type DRAClaim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Since is when the claim was first prepared.
	Since time.Time `json:"since,omitzero"`
	// Devices are the names of the claim's devices.
	Devices []string `json:"devices"`
	// Shares are the devices of which the claim has only a part of the memory.
	Shares []DRAShare `json:"shares,omitempty"`
	// Problem is why the claim's containers cannot use a device; empty if they can.
	Problem string `json:"problem,omitempty"`
	// Released is why MIG devices or control daemons of a released claim still exist; empty for any
	// other claim.
	Released string `json:"released,omitempty"`
	// Destroyed is true if these MIG devices and control daemons are gone, but the GPUs are still
	// in MIG mode.
	Destroyed bool `json:"destroyed,omitempty"`
}

// DRAShare is a claim's part of the memory of a device.
type DRAShare struct {
	Device      string `json:"device"`
	MemoryBytes int64  `json:"memoryBytes"`
	// Limited is true if MPS enforces the limit for each process of the claim. Otherwise only the
	// scheduler counts the memory, and nothing limits a process.
	Limited bool `json:"limited"`
}

// Waiting returns why owners of GPUs do not change yet, as sentences without a full stop: each
// reason once, with the indexes of its GPUs.
func (d *DRA) Waiting() []string {
	if d == nil {
		return nil
	}
	var reasons []string
	gpus := map[string][]string{}
	for _, g := range d.GPUs {
		if g.Waiting == "" {
			continue
		}
		if !slices.Contains(reasons, g.Waiting) {
			reasons = append(reasons, g.Waiting)
		}
		gpus[g.Waiting] = append(gpus[g.Waiting], fmt.Sprint(g.Index))
	}
	sentences := make([]string, 0, len(reasons))
	for _, reason := range reasons {
		name := "GPU "
		if len(gpus[reason]) > 1 {
			name = "GPUs "
		}
		sentences = append(sentences, name+strings.Join(gpus[reason], ", ")+": "+reason)
	}
	return sentences
}
