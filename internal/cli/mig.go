package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/migwish"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nvidia"
)

func newMIGCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mig",
		Short: "Plan, change and print the layout of GPUs in multi-instance mode (MIG)",
		Args:  noArguments,
	}
	cmd.AddCommand(newMIGPlanCommand(), newMIGApplyCommand(), newMIGStatusCommand(), newMIGExportCommand())
	return cmd
}

func newMIGExportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Print the MIG layout that the GPUs have, as a configuration file of mig-parted",
		Long: "export reads the MIG instances of this node once, or of a simulated node (--simulate). It prints a file with one layout,\n" +
			"current. What the layout cannot say is written to standard error, and the exit status is 1.",
		Example: "  gpu-device-plugin mig export --simulate a100-mig-mixed > layouts.yaml",
		Args:    noArguments,
	}
	config.AddFlags(cmd.Flags())
	o := &output{format: outputYAML, people: outputYAML}
	cmd.Flags().VarP(o, "output", "o", "output format")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		n, err := readPartitions(cmd.Context(), c)
		if err != nil {
			return err
		}
		l, lost := layout.Export(n.gpus)
		if err := o.print(cmd.OutOrStdout(), l.Document(), nil); err != nil {
			return err
		}
		if lost = append(n.warnings, lost...); len(lost) > 0 {
			return errors.New(strings.Join(lost, "; "))
		}
		return nil
	}
	return cmd
}

func newMIGPlanCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Print how a MIG layout would divide the GPUs, and the steps to it",
		Long: "plan reads the MIG instances of this node once, or of a simulated node (--simulate). For each GPU it prints the instances\n" +
			"before and after, and the steps. It changes nothing. Instances that exist and that the layout wants stay as they are.\n" +
			"The exit status is 1 if the layout is not possible on some GPU.\n\n" +
			"Layouts are those of a configuration file of NVIDIA's mig-parted (--config), in which devices may also be UUIDs of GPUs.\n" +
			"Without a file they are all-disabled, all-enabled, all-balanced, and all-PROFILE for each profile of the GPUs, such as\n" +
			"all-1g.10gb. The driver shows all instances only to root.",
		Example: "  gpu-device-plugin mig plan --simulate dgx-h100 --layout all-balanced\n" +
			"  gpu-device-plugin mig plan --config layouts.yaml --layout training --gpu 0,1 -o yaml",
		Args: noArguments,
	}
	config.AddFlags(cmd.Flags())
	var name, path string
	var only []string
	cmd.Flags().StringVar(&name, "layout", "", "name of the layout; may be left out if --config has one layout")
	cmd.Flags().StringVar(&path, "config", "", "path of a configuration file of mig-parted; default: the built-in layouts")
	cmd.Flags().StringSliceVar(&only, "gpu", nil, "GPUs to plan for, by index or UUID; default: all")
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		file, err := readLayouts(path)
		if err != nil {
			return err
		}
		n, err := readPartitions(cmd.Context(), c)
		if err != nil {
			return err
		}
		l, err := layout.Find(name, file, n.gpus)
		if err != nil {
			return fmt.Errorf("--layout: %w", err)
		}
		changes := layout.Plan(l, n.gpus)
		if only != nil {
			if changes.GPUs, err = selectGPUs(changes.GPUs, only); err != nil {
				return fmt.Errorf("--gpu: %w", err)
			}
		}
		p := newMIGPlan(changes, n)
		if err := o.print(cmd.OutOrStdout(), p, p.text); err != nil {
			return err
		}
		return p.err()
	}
	return cmd
}

// readLayouts reads a file of layouts; nil if the path is empty.
func readLayouts(path string) (*layout.File, error) {
	if path == "" {
		return nil, nil
	}
	data, err := files.Read(path, migwish.MaxLayouts)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	file, err := layout.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("--config %s: %w", path, err)
	}
	return &file, nil
}

// A partitioned is how the GPUs of a node are divided.
type partitioned struct {
	gpus          []layout.GPU
	architectures map[string]string // by UUID
	warnings      []string          // what could not be read
}

// readPartitions reads how the GPUs of the node are divided that the configuration names.
func readPartitions(ctx context.Context, c config.Config) (partitioned, error) {
	n := partitioned{architectures: map[string]string{}}
	err := withSession(ctx, c, func(ctx context.Context, session *nvidia.Session) error {
		snapshot, err := session.Scan(ctx)
		if err != nil {
			return err
		}
		n.read(ctx, snapshot, session)
		return nil
	})
	return n, err
}

// A partitionReader tells how a GPU is divided, and what computes on it, by UUID.
type partitionReader interface {
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	Processes(ctx context.Context, uuid string) ([]inventory.Process, error)
}

// read reads how the GPUs of a Snapshot are divided.
func (n *partitioned) read(ctx context.Context, snapshot inventory.Snapshot, from partitionReader) {
	for _, l := range snapshot.LeftOut {
		n.warnings = append(n.warnings, fmt.Sprintf("GPU %d: %s", l.Index, l.Reason))
	}
	for _, found := range snapshot.GPUs {
		g := layout.GPU{Index: found.Index, UUID: found.UUID, Model: found.Model, InUse: map[int]bool{}}
		var err error
		if g.Partitions, err = from.Partitions(ctx, found.UUID); err != nil {
			g.Partitions = inventory.Partitions{Mode: found.MIG, Pending: found.MIG, Unread: err.Error()}
		}
		if g.Mode == inventory.MIGEnabled {
			processes, err := from.Processes(ctx, found.UUID)
			if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
				g.Unread = cmp.Or(g.Unread, err.Error())
			}
			for _, i := range g.Instances { // a driver that does not say where a process is, may mean each
				g.InUse[i.ID] = slices.ContainsFunc(processes, func(p inventory.Process) bool { return !p.GI.Known || p.GI.Value == i.ID })
			}
		}
		n.gpus = append(n.gpus, g)
		n.architectures[g.UUID] = found.Architecture
	}
}

// selectGPUs returns the GPUs with the given indexes or UUIDs.
func selectGPUs(gpus []layout.GPUChange, names []string) ([]layout.GPUChange, error) {
	wanted := func(g layout.GPUChange, name string) bool {
		return g.GPU.UUID == name || strconv.Itoa(g.GPU.Index) == name
	}
	for _, name := range names {
		if !slices.ContainsFunc(gpus, func(g layout.GPUChange) bool { return wanted(g, name) }) {
			return nil, fmt.Errorf("no GPU has the index or UUID %q", name)
		}
	}
	return slices.DeleteFunc(gpus, func(g layout.GPUChange) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return wanted(g, name) })
	}), nil
}

// A migPlan is what a layout makes of GPUs, as it is printed.
type migPlan struct {
	Layout   string       `json:"layout"`
	Possible bool         `json:"possible"`
	GPUs     []plannedGPU `json:"gpus"`
	Warnings []string     `json:"warnings,omitempty"`
}

type plannedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Reason says why the layout is not possible, Note why it is not about this GPU.
	Reason string            `json:"reason,omitempty"`
	Note   string            `json:"note,omitempty"`
	Before plannedPartitions `json:"before"`
	After  plannedPartitions `json:"after"`
	Steps  []plannedStep     `json:"steps"`

	// Resets says that the driver resets the GPU to change its mode.
	Resets bool `json:"resets,omitempty"`
}

type plannedPartitions struct {
	MIG          string            `json:"mig"` // enabled, disabled or unsupported
	MemorySlices int               `json:"memorySlices,omitempty"`
	Instances    []plannedInstance `json:"instances"`
}

type plannedInstance struct {
	ID      *int     `json:"id,omitempty"` // of an instance that exists before
	Profile string   `json:"profile"`
	Start   int      `json:"start"` // its first memory slice
	Size    int      `json:"size"`  // its memory slices
	Devices []string `json:"devices"`
	InUse   bool     `json:"inUse,omitempty"`
}

type plannedStep struct {
	Action  inventory.MIGAction `json:"action"`
	GPU     *plannedInstance    `json:"gpuInstance,omitempty"`
	Compute *plannedCompute     `json:"computeInstance,omitempty"`
}

type plannedCompute struct {
	ID     *int `json:"id,omitempty"` // of an instance that is destroyed
	Start  int  `json:"start"`        // its first compute slice
	Slices int  `json:"slices"`
}

func newMIGPlan(c layout.Changes, n partitioned) migPlan {
	p := migPlan{Layout: c.Layout, Possible: c.Possible(), GPUs: []plannedGPU{}, Warnings: append(n.warnings, c.Warnings...)}
	for _, g := range c.GPUs {
		planned := plannedGPU{
			Index: g.GPU.Index, UUID: g.GPU.UUID, Model: g.GPU.Model, Reason: g.Reason, Note: g.Note,
			Before: newPlannedPartitions(g.Before), After: newPlannedPartitions(g.After),
			Steps: []plannedStep{}, Resets: n.architectures[g.GPU.UUID] == "ampere",
		}
		for _, s := range g.Steps {
			step := plannedStep{Action: s.Action}
			if s.Action != inventory.MIGEnable && s.Action != inventory.MIGDisable {
				step.GPU = new(newPlannedInstance(s.Part))
			}
			switch s.Action {
			case inventory.MIGDestroyCompute:
				step.Compute = &plannedCompute{ID: &s.Compute.ID, Start: s.Compute.Start, Slices: s.Compute.Slices}
			case inventory.MIGCreateCompute:
				step.Compute = &plannedCompute{Start: s.Compute.Start, Slices: s.Compute.Slices}
			default: // not about a compute instance
			}
			planned.Steps = append(planned.Steps, step)
		}
		p.GPUs = append(p.GPUs, planned)
	}
	return p
}

func newPlannedPartitions(d layout.Division) plannedPartitions {
	p := plannedPartitions{MIG: d.Mode.String(), MemorySlices: d.Slices, Instances: []plannedInstance{}}
	for _, i := range d.Instances {
		p.Instances = append(p.Instances, newPlannedInstance(i))
	}
	return p
}

func newPlannedInstance(i layout.Part) plannedInstance {
	p := plannedInstance{Profile: i.Profile, Start: i.Start, Size: i.Size, Devices: i.Devices(), InUse: i.InUse}
	if i.Exists {
		p.ID = &i.ID
	}
	return p
}

// err returns what the command fails with; nil if the layout is possible.
func (p migPlan) err() error {
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
