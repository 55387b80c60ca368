package status

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// DRA is what is known of Dynamic Resource Allocation on the node.
type DRA struct {
	// Mode is plugin, dra or split.
	Mode string `json:"mode"`
	// DriverName is the name of the driver; empty for gpu.nvidia.com. Kept is why that is not the one
	// of the configuration; empty if it is.
	DriverName string `json:"driverName,omitempty"`
	Kept       string `json:"driverNameKept,omitempty"`
	// Driver is the state of the driver's registration at kubelet.
	Driver DRADriver `json:"driver"`
	// Slices, Devices and Generation are how many ResourceSlices the API server has of the node, with
	// how many devices, and the generation of the pool.
	Slices     int   `json:"slices,omitempty"`
	Devices    int   `json:"devices,omitempty"`
	Generation int64 `json:"generation,omitempty"`
	// Problem is why the slices at the API server are not as wanted; empty if they are.
	Problem string `json:"problem,omitempty"`
	// API is the version of resource.k8s.io that the API server serves; empty as long as it was not
	// asked. NoTaints says that it does not keep the taints of devices, NoCounters that it keeps no
	// counters, without which GPUs are not divided for claims, and NoShares that it knows no devices
	// that several claims can have.
	API        string `json:"api,omitempty"`
	NoTaints   bool   `json:"noTaints,omitempty"`
	NoCounters bool   `json:"noCounters,omitempty"`
	NoShares   bool   `json:"noShares,omitempty"`
	// GPUs say who gives out each GPU, by index.
	GPUs []DRAGPU `json:"gpus,omitempty"`
	// Claims are those that are prepared.
	Claims []DRAClaim `json:"claims,omitempty"`
}

// DRADriver is the state of the driver's registration at kubelet.
type DRADriver struct {
	Registered bool `json:"registered"`
	// Problem is why it is not registered; empty if it is, or is not to be.
	Problem string `json:"problem,omitempty"`
	// Foreign is the socket of another program's driver of the same name; empty if there is none.
	Foreign string `json:"foreign,omitempty"`
	// Rival is why NVIDIA's driver, of another name, may give the same GPUs: then this one gives none.
	// Empty if that driver is not there.
	Rival string `json:"rival,omitempty"`
}

// DRAGPU is who gives out a GPU.
type DRAGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	// Owner is plugin, leaving-plugin, dra, leaving-dra or nobody; empty as long as it is not known.
	Owner string `json:"owner,omitempty"`
	// Waiting is what is waited for before it gets another owner.
	Waiting string `json:"waiting,omitempty"`
}

// DRAClaim is a claim that is prepared.
type DRAClaim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Since is when it was first prepared.
	Since time.Time `json:"since,omitzero"`
	// Devices are the names of its devices.
	Devices []string `json:"devices"`
	// Shares are those devices of which it has a part of the memory.
	Shares []DRAShare `json:"shares,omitempty"`
	// Problem is why its containers cannot use a device; empty if they can.
	Problem string `json:"problem,omitempty"`
	// Released is why MIG devices or control daemons of a claim are there still although it was given
	// back; empty for any other claim.
	Released string `json:"released,omitempty"`
	// Destroyed says that they are not there any more, and that the MIG mode of their GPUs is on
	// still.
	Destroyed bool `json:"destroyed,omitempty"`
}

// DRAShare is the part that a claim has of the memory of a device.
type DRAShare struct {
	Device      string `json:"device"`
	MemoryBytes int64  `json:"memoryBytes"`
	// Limited says that MPS keeps each process of the claim to it. Otherwise the scheduler counts it,
	// and nothing keeps a process to it.
	Limited bool `json:"limited"`
}

// Waiting returns why GPUs do not get another owner, each reason once with the indexes of its GPUs:
// sentences without a full stop.
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
