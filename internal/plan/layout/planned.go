package layout

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Planned is what a layout makes of GPUs, as it is printed.
type Planned struct {
	Layout   string       `json:"layout"`
	Possible bool         `json:"possible"`
	GPUs     []PlannedGPU `json:"gpus"`
	Warnings []string     `json:"warnings,omitempty"`
}

// PlannedGPU is what a layout makes of one GPU.
type PlannedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Reason says why the layout is not possible, Note why it is not about this GPU.
	Reason string            `json:"reason,omitempty"`
	Note   string            `json:"note,omitempty"`
	Before PlannedPartitions `json:"before"`
	After  PlannedPartitions `json:"after"`
	Steps  []PlannedStep     `json:"steps"`

	// Resets says that the driver resets the GPU to change its mode.
	Resets bool `json:"resets,omitempty"`
}

// PlannedPartitions is how a GPU is divided.
type PlannedPartitions struct {
	MIG          string            `json:"mig"` // enabled, disabled or unsupported
	MemorySlices int               `json:"memorySlices,omitempty"`
	Instances    []PlannedInstance `json:"instances"`
}

// PlannedInstance is a GPU instance.
type PlannedInstance struct {
	ID      *int     `json:"id,omitempty"` // of an instance that exists before
	Profile string   `json:"profile"`
	Start   int      `json:"start"` // its first memory slice
	Size    int      `json:"size"`  // its memory slices
	Devices []string `json:"devices"`
	InUse   bool     `json:"inUse,omitempty"`
}

// PlannedStep is one step from the division before to the one after.
type PlannedStep struct {
	Action  inventory.MIGAction `json:"action"`
	GPU     *PlannedInstance    `json:"gpuInstance,omitempty"`
	Compute *PlannedCompute     `json:"computeInstance,omitempty"`
}

// PlannedCompute is a compute instance of a step.
type PlannedCompute struct {
	ID     *int `json:"id,omitempty"` // of an instance that is destroyed
	Start  int  `json:"start"`        // its first compute slice
	Slices int  `json:"slices"`
}

// NewPlanned returns what changes make of GPUs. The architectures are those of the GPUs, by UUID;
// the warnings come before those of the changes.
func NewPlanned(c Changes, architectures map[string]string, warnings []string) Planned {
	p := Planned{Layout: c.Layout, Possible: c.Possible(), GPUs: []PlannedGPU{}, Warnings: append(warnings, c.Warnings...)}
	for _, g := range c.GPUs {
		planned := PlannedGPU{
			Index: g.GPU.Index, UUID: g.GPU.UUID, Model: g.GPU.Model, Reason: g.Reason, Note: g.Note,
			Before: NewPlannedPartitions(g.Before), After: NewPlannedPartitions(g.After),
			Steps: []PlannedStep{}, Resets: architectures[g.GPU.UUID] == "ampere",
		}
		for _, s := range g.Steps {
			step := PlannedStep{Action: s.Action}
			if s.Action != inventory.MIGEnable && s.Action != inventory.MIGDisable {
				step.GPU = new(newPlannedInstance(s.Part))
			}
			switch s.Action {
			case inventory.MIGDestroyCompute:
				step.Compute = &PlannedCompute{ID: &s.Compute.ID, Start: s.Compute.Start, Slices: s.Compute.Slices}
			case inventory.MIGCreateCompute:
				step.Compute = &PlannedCompute{Start: s.Compute.Start, Slices: s.Compute.Slices}
			default: // not about a compute instance
			}
			planned.Steps = append(planned.Steps, step)
		}
		p.GPUs = append(p.GPUs, planned)
	}
	return p
}

// NewPlannedPartitions returns a division as it is printed.
func NewPlannedPartitions(d Division) PlannedPartitions {
	p := PlannedPartitions{MIG: d.Mode.String(), MemorySlices: d.Slices, Instances: []PlannedInstance{}}
	for _, i := range d.Instances {
		p.Instances = append(p.Instances, newPlannedInstance(i))
	}
	return p
}

func newPlannedInstance(i Part) PlannedInstance {
	p := PlannedInstance{Profile: i.Profile, Start: i.Start, Size: i.Size, Devices: i.Devices(), InUse: i.InUse}
	if i.Exists {
		p.ID = &i.ID
	}
	return p
}

// Err returns what a command that prints the plan fails with; nil if the layout is possible.
func (p Planned) Err() error {
	if p.Possible {
		return nil
	}
	var gpus []string
	for _, g := range p.GPUs {
		if g.Reason != "" {
			gpus = append(gpus, strconv.Itoa(g.Index))
		}
	}
	return fmt.Errorf("layout %s is not possible on GPU %s: the plan says why", p.Layout, strings.Join(gpus, ", "))
}
