package layout

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Planned is the printed form of Changes.
type Planned struct {
	Layout   string       `json:"layout"`
	Possible bool         `json:"possible"`
	GPUs     []PlannedGPU `json:"gpus"`
	Warnings []string     `json:"warnings,omitempty"`
}

// PlannedGPU is the printed form of a GPUChange.
type PlannedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Reason says why the layout is impossible, Note why it does not concern this GPU.
	Reason string            `json:"reason,omitempty"`
	Note   string            `json:"note,omitempty"`
	Before PlannedPartitions `json:"before"`
	After  PlannedPartitions `json:"after"`
	Steps  []PlannedStep     `json:"steps"`

	// Resets reports whether the driver resets the GPU to change its mode.
	Resets bool `json:"resets,omitempty"`
}

// PlannedPartitions is the printed form of a Division.
type PlannedPartitions struct {
	MIG          string            `json:"mig"` // enabled, disabled or unsupported
	MemorySlices int               `json:"memorySlices,omitempty"`
	Instances    []PlannedInstance `json:"instances"`
}

// PlannedInstance is a GPU instance.
type PlannedInstance struct {
	ID      *int     `json:"id,omitempty"` // of an existing instance
	Profile string   `json:"profile"`
	Start   int      `json:"start"` // first memory slice
	Size    int      `json:"size"`  // number of memory slices
	Devices []string `json:"devices"`
	InUse   bool     `json:"inUse,omitempty"`
}

// PlannedStep is one step from the division before the change to the division after it.
type PlannedStep struct {
	Action  inventory.MIGAction `json:"action"`
	GPU     *PlannedInstance    `json:"gpuInstance,omitempty"`
	Compute *PlannedCompute     `json:"computeInstance,omitempty"`
}

// PlannedCompute is a compute instance of a step.
type PlannedCompute struct {
	ID     *int `json:"id,omitempty"` // of a destroyed instance
	Start  int  `json:"start"`        // first compute slice
	Slices int  `json:"slices"`
}

// NewPlanned returns the printed form of changes. The architectures are by UUID of the GPU; the
// warnings precede those of the changes.
func NewPlanned(c Changes, architectures map[string]string, warnings []string) Planned {
	p := Planned{Layout: c.Layout, Possible: c.Possible(), GPUs: []PlannedGPU{},
		Warnings: append(warnings, c.Warnings...)}
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
			default: // without a compute instance
			}
			planned.Steps = append(planned.Steps, step)
		}
		p.GPUs = append(p.GPUs, planned)
	}
	return p
}

// NewPlannedPartitions returns the printed form of a division.
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

// Err returns the error of a command that prints the plan; nil if the layout is possible.
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
