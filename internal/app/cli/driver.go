package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/findings"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func newDriverCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "driver", Short: "Prepare a change of the NVIDIA driver"}
	cmd.AddCommand(newPreflightCommand())
	return cmd
}

func newPreflightCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "preflight",
		Short: "Check whether the driver can be changed, and name everything that uses it",
		Long: "preflight reads the node's files and asks the kubelet and the running daemon, and prints whether the " +
			"driver can be\n" +
			"unloaded, changed and loaded again, now and after the next restart of the node. It names every user of " +
			"the driver:\n" +
			"pods, claims, services, processes, kernel modules and displays, with what makes each let go. It " +
			"changes nothing.\n\n" +
			"Without --to it judges the present driver. Run it as root on the node: in the daemon's container the " +
			"open files of\n" +
			"other processes are usually not readable, and the check says so.\n\n" +
			"The exit status is 0 if the node is ready, 2 if the worst finding is a warning, such as a user of the " +
			"driver, 3 if an\n" +
			"error blocks the change, and 1 if preflight itself cannot be run, as with a wrong flag.",
		Example: "  gpu-device-plugin driver preflight\n" +
			"  gpu-device-plugin driver preflight --to 580.95.05\n" +
			"  gpu-device-plugin driver preflight --to /opt/driver -o json",
		Args: cobra.NoArgs,
	}
	config.AddFlags(cmd.Flags(), slices.Concat(doctorFlags, []string{"node-name"})...)
	hostRoot := addHostRootFlag(cmd)
	to := cmd.Flags().String("to", "", "wanted driver: a version, a branch such as 580, or a folder with a driver")
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := doctorConfig(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), driverfacts.Timeout)
		defer cancel()
		daemonStatus := askStatus(ctx, c.ControlSocket)
		asRegistered(&c, daemonStatus.Value.Status, cmd.Flags())
		facts, err := preflightFacts(ctx, c, daemonStatus.Value.Status, *hostRoot, *to)
		if err != nil {
			return err
		}
		report := struct {
			Node string `json:"node,omitempty"`
			preflight.Report
		}{c.NodeName, preflight.Examine(facts)}
		if o.String() == outputTable {
			terminal.Clean(&report)
			_, err = io.WriteString(cmd.OutOrStdout(),
				preflightText(report.Node, report.Report, textWidth(cmd.OutOrStdout())))
		} else {
			err = o.print(cmd.OutOrStdout(), &report, nil)
		}
		if err != nil {
			return err
		}
		return severityStatus(diagnosis.Worst(report.Findings))
	}
	return cmd
}

// preflightFacts returns the facts about the driver, with the devices of pods and the claims.
func preflightFacts(
	ctx context.Context, c config.Config, daemonStatus status.Status, hostRoot, to string,
) (preflight.Facts, error) {
	p, _, err := places(c, hostRoot)
	if err != nil {
		return preflight.Facts{}, err
	}
	target, err := preflightTarget(p.Host, to)
	if err != nil {
		return preflight.Facts{}, err
	}
	if simulated := cmp.Or(c.Simulate, daemonStatus.Simulated); simulated != "" {
		profile, err := simulator.Load(simulated)
		if err != nil {
			return preflight.Facts{}, err
		}
		node := simulator.New(profile)
		defer node.Close()
		p.Kernel, p.Host, p.Hidden = node.Root(), nil, simulatedDriver
	}
	facts := driverPlaces(p).ReadAll(ctx)
	facts.Target = target
	facts.Devices = gpuDevices(ctx, c, daemonStatus)
	if d := daemonStatus.DRA; d != nil {
		for _, claim := range d.Claims {
			if claim.Released == "" {
				facts.Claims.Value = append(facts.Claims.Value,
					preflight.Claim{Namespace: claim.Namespace, Name: claim.Name})
			}
		}
	}
	return facts, nil
}

const simulatedDriver = "The node is simulated, and has no kernel modules and no processes"

func driverPlaces(p nodefacts.Places) driverfacts.Places {
	return driverfacts.Places{Kernel: p.Kernel, Host: p.Host, Hidden: p.Hidden}
}

// preflightTarget returns the target of --to; nil for the present driver. A folder may be
// on the node or in this container.
func preflightTarget(host fs.FS, to string) (*preflight.Target, error) {
	if to == "" {
		return nil, nil
	}
	if !strings.Contains(to, "/") {
		target, err := driverfacts.VersionTarget(to)
		if err != nil {
			return nil, fmt.Errorf("--to %s: %w; name a folder with its path", to, err)
		}
		return target, nil
	}
	if host != nil {
		if resolved, _, err := driverroot.Resolve(host, to); err == nil && resolved != "" {
			if info, err := fs.Stat(host, resolved); err == nil && !info.IsDir() {
				return nil, fmt.Errorf("--to %s: it is not a folder", to)
			}
			if folder, err := fs.Sub(host, resolved); err == nil {
				return driverfacts.Target(to, folder), nil
			}
		}
	}
	path, err := filepath.Abs(to)
	if err == nil {
		var info fs.FileInfo
		if info, err = os.Stat(path); err == nil && !info.IsDir() {
			err = errors.New("it is not a folder")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("--to %s: %w", to, err)
	}
	return driverfacts.Target(to, os.DirFS(path)), nil
}

// gpuDevices returns the devices of GPUs held by containers, for any name of the resource.
func gpuDevices(ctx context.Context, c config.Config, s status.Status) (fact diagnosis.Fact[[]preflight.PodDevice]) {
	client := kubelet.NewPodResources(c.PodResourcesSocket, clock.RealClock{})
	defer func() { _ = client.Close() }() // used for reading only
	all, err := client.ContainerDevices(ctx)
	if err != nil {
		fact.Missing = "The pods with GPUs are not known by the kubelet: " + err.Error()
		return fact
	}
	var resources []string
	for _, r := range s.Resources {
		resources = append(resources, r.Name)
	}
	driver := ""
	if s.DRA != nil {
		driver = s.DRA.DriverName
	}
	for _, d := range all {
		one := preflight.PodDevice{Namespace: d.Namespace, Pod: d.Pod, Container: d.Container, Resource: d.Resource}
		if d.Claim.Name != "" {
			one.Claim = d.Claim.Namespace + "/" + d.Claim.Name
		}
		if d.IsGPU(resources, driver) {
			fact.Value = append(fact.Value, one)
		}
	}
	return fact
}

// preflightText returns a report as text of so many columns.
func preflightText(node string, r preflight.Report, width int) string {
	var b strings.Builder
	head := r.Summary
	if node != "" {
		head = node + ": " + head
	}
	b.WriteString(terminal.Wrap(head, width, "", "  "))
	about := "driver " + cmp.Or(r.Driver, "not loaded")
	if len(r.Owners) > 0 {
		about += ", of " + strings.Join(r.Owners, " and ")
	}
	about += "; kernel " + cmp.Or(r.Kernel, "unknown") + ", next boot " + cmp.Or(r.NextKernel, "unknown")
	b.WriteString(terminal.Wrap(about, width, "", "  ") + "\n")
	indent := strings.Repeat(" ", findings.MessageColumn)
	for _, h := range r.Holders {
		text := h.Name
		if len(h.Containers) > 0 {
			text += ", container " + strings.Join(h.Containers, " and ")
		}
		if uses := slices.Concat(h.Resources, h.Uses); len(uses) > 0 {
			text += ": " + strings.Join(uses, ", ")
		}
		if len(h.PIDs) > 0 {
			text += "; PID " + strings.Trim(fmt.Sprint(h.PIDs[:min(len(h.PIDs), 8)]), "[]")
		}
		room := width - findings.MessageColumn
		b.WriteString(fmt.Sprintf("%-12s %-18s ", "held by", h.Kind) + terminal.Wrap(text, room, "", indent))
		b.WriteString(indent + terminal.Wrap("to let go: "+h.Release, room, "", indent))
	}
	if len(r.Holders) > 0 {
		b.WriteString("\n")
	}
	for _, f := range r.Findings {
		b.WriteString(findings.Lines(f, width))
	}
	return b.String()
}
