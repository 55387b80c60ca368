package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// scanTimeout bounds a scan of a node outside the daemon. A real driver may have to wake its GPUs
// first.
const scanTimeout = time.Minute

func newPlanCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Print the resources of a node, and what a container gets",
		Long: "plan scans this node once, or a simulated node: the node of --simulate or of the running daemon.\n" +
			"It prints the resources that the daemon offers with the same flags, environment and configuration\n" +
			"file. For each resource it prints what a container with the first device gets.\n\n" +
			"With --dra it prints the ResourceSlices of the node for Dynamic Resource Allocation instead, as\n" +
			"published by gpu-node-agent: for all GPUs, or, with --dra-mode split, for the GPUs selected by\n" +
			"dra.gpus.\n\n" +
			"With -o classes it prints a DeviceClass for each resource, as values of the chart. With these\n" +
			"classes, pods that request the resources get devices by Dynamic Resource Allocation. If claims\n" +
			"cannot have all devices of a resource, the resource is named on standard error, and the exit\n" +
			"status is 1.",
		Example: "  gpu-device-plugin plan --simulate dgx-h100\n" +
			"  gpu-device-plugin plan --simulate a100-mig-mixed --mig-strategy mixed -o yaml\n" +
			"  gpu-device-plugin plan --dra --simulate dgx-h100 --node-name node-1 -o yaml\n" +
			"  gpu-device-plugin plan --dra --dra-dynamic-mig\n" +
			"  gpu-device-plugin plan -o classes --config-file config.yaml",
		Args: cobra.NoArgs,
	}
	config.AddFlags(cmd.Flags(), planFlags...)
	slices := cmd.Flags().Bool("dra", false, "print ResourceSlices instead of resources")
	o := addOutputFlag(cmd, outputClasses)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, warnings, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		simulateAsTheDaemon(cmd, &c)
		if o.format == outputClasses {
			return printClasses(cmd, c)
		}
		if *slices {
			return printSlices(cmd, o, c)
		}
		snapshot, err := scanOnce(cmd.Context(), c)
		if err != nil {
			return err
		}
		p, err := newPrintedPlan(snapshot, c)
		if err != nil {
			return err
		}
		for _, w := range warnings {
			p.Warnings = append(p.Warnings, w.String())
		}
		return o.print(cmd.OutOrStdout(), &p, func(w io.Writer) { p.table(w) })
	}
	return cmd
}

// scanOnce scans the node of the configuration.
func scanOnce(ctx context.Context, c config.Config) (snapshot inventory.Snapshot, err error) {
	err = withSession(ctx, c, func(ctx context.Context, session *nvidia.Session) (err error) {
		snapshot, err = scan(ctx, c, session)
		return err
	})
	return snapshot, err
}

// scan returns the scan of a session, with the current health of the GPUs.
func scan(ctx context.Context, c config.Config, session *nvidia.Session) (inventory.Snapshot, error) {
	snapshot, err := session.Scan(ctx)
	for range snapshot.GPUs { // each scan asks at least one GPU for its links
		if err == nil && snapshot.LinksDue {
			snapshot, err = session.Scan(ctx)
		}
	}
	if err != nil {
		return snapshot, err
	}
	for i := range snapshot.GPUs {
		g := &snapshot.GPUs[i]
		reading, err := session.Read(ctx, g.UUID)
		if err != nil {
			g.Health.Reason = err.Error()
			continue
		}
		g.Health = c.Health.FoldReading(health.GPU{}, reading, health.Facts{}, time.Now()).Health
		for j := range g.MIGDevices {
			g.MIGDevices[j].Health = inventory.Health{State: inventory.Healthy} // apart from its GPU
		}
	}
	return snapshot, nil
}

// withSession opens a session with the driver of the node that the configuration names for as long
// as use takes.
func withSession(ctx context.Context, c config.Config, use func(context.Context, *nvidia.Session) error) (err error) {
	ctx, cancel := context.WithTimeout(ctx, scanTimeout)
	defer cancel()
	driver, node, err := daemon.OpenNode(ctx, c.Startup, nil)
	if err != nil {
		return err
	}
	if node != nil {
		defer node.Close()
	}
	session, err := driver.Open(ctx)
	if err != nil {
		return fmt.Errorf("%w; to scan a simulated node, use --simulate", err)
	}
	defer func() { err = errors.Join(err, session.Close(ctx)) }()
	return use(ctx, session)
}

// printedPlan is a plan for printing.
type printedPlan struct {
	Resources []printedResource `json:"resources"`
	// GPUs that cannot be read and devices that are not offered, with reasons
	LeftOut  []string `json:"leftOut,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
}

type printedResource struct {
	Name    string          `json:"name"`
	Devices []printedDevice `json:"devices"`
	// Container has the edits for a container with the first device.
	Container printedEdits `json:"container"`
}

type printedDevice struct {
	ID       string `json:"id"`
	Index    string `json:"index"`
	NUMANode *int   `json:"numaNode,omitempty"`
	Healthy  bool   `json:"healthy"`
	Reason   string `json:"reason,omitempty"`
}

type printedEdits struct {
	Env         map[string]string           `json:"env,omitempty"`
	Mounts      []containeredits.Mount      `json:"mounts,omitempty"`
	Nodes       []containeredits.DeviceNode `json:"nodes,omitempty"`
	Annotations map[string]string           `json:"annotations,omitempty"`
	CDIDevices  []string                    `json:"cdiDevices,omitempty"`
}

func newPrintedPlan(snapshot inventory.Snapshot, c config.Config) (printedPlan, error) {
	plan := resource.New(snapshot, c.Resource)
	p := printedPlan{Resources: []printedResource{}, LeftOut: status.LeftOut(snapshot, plan),
		Warnings: plan.OtherWarnings()}
	for _, r := range plan.Resources {
		e, err := containeredits.For(r.Devices[:1], c.Edits)
		if err != nil {
			return printedPlan{}, fmt.Errorf("allocate %s: %w", r.Name, err)
		}
		printed := printedResource{Name: r.Name, Container: printedEdits(e)}
		for d := range r.All() {
			device := printedDevice{ID: d.ID, Index: d.Index, Healthy: d.Healthy, Reason: d.Reason}
			if d.NUMANode != inventory.NoNUMANode {
				device.NUMANode = &d.NUMANode
			}
			printed.Devices = append(printed.Devices, device)
		}
		p.Resources = append(p.Resources, printed)
	}
	return p, nil
}

func (p printedPlan) table(w io.Writer) {
	if len(p.Resources) == 0 {
		fmt.Fprintln(w, "The node has no resources.")
	}
	for _, r := range p.Resources {
		fmt.Fprintf(w, "%s: %d\n", r.Name, len(r.Devices))
		fmt.Fprintln(w, "  DEVICE\tINDEX\tNUMA\tHEALTH")
		for _, d := range r.Devices {
			numa, health := "-", "Healthy"
			if d.NUMANode != nil {
				numa = fmt.Sprint(*d.NUMANode)
			}
			if !d.Healthy {
				health = "Unhealthy: " + d.Reason
			}
			fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", d.ID, d.Index, numa, health)
		}
		fmt.Fprintln(w, "  a container with the first device gets:")
		r.Container.table(w)
	}
	for _, l := range p.LeftOut {
		fmt.Fprintf(w, "left out: %s\n", l)
	}
	for _, warning := range p.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
}

func (e printedEdits) table(w io.Writer) {
	for _, name := range slices.Sorted(maps.Keys(e.Env)) {
		fmt.Fprintf(w, "    env %s=%s\n", name, e.Env[name])
	}
	for _, m := range e.Mounts {
		fmt.Fprintf(w, "    mount %s from %s\n", m.ContainerPath, m.HostPath)
	}
	for _, n := range e.Nodes {
		fmt.Fprintf(w, "    device node %s from %s (%s)\n", n.ContainerPath, n.HostPath, n.Permissions)
	}
	for _, key := range slices.Sorted(maps.Keys(e.Annotations)) {
		fmt.Fprintf(w, "    annotation %s=%s\n", key, e.Annotations[key])
	}
	for _, name := range e.CDIDevices {
		fmt.Fprintf(w, "    CDI device %s\n", name)
	}
}
