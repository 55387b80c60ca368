package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/findings"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The exit statuses of doctor, in addition to 0 and the status of a failed command.
const (
	exitWarning = 2
	exitError   = 3
)

// An ExitStatus ends the program with this exit status and no message: the command has printed all
// there is to say.
type ExitStatus int

func (s ExitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

func newDoctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the node: driver, container runtime, the kubelet and the running daemon",
		Long: "doctor reads the node's files and asks the running daemon, and prints each problem with evidence\n" +
			"and the commands to fix it. It changes nothing. Run doctor as root on the node, or in the daemon's\n" +
			"container, with the flags and the environment of the daemon. The running daemon names the\n" +
			"kubelet's sockets and the simulated node. If the files for a check are not visible, the check is\n" +
			"printed as not checked.\n\n" +
			"The exit status is 0 if no finding is worse than info, 2 if the worst finding is a warning, 3 if\n" +
			"it is an error, and 1 if doctor itself cannot run, for example because of a wrong flag.",
		Example: "  gpu-device-plugin doctor\n" +
			"  kubectl -n kube-system exec POD -- gpu-device-plugin doctor -o json\n" +
			"  gpu-device-plugin doctor --simulate dgx-h100",
		Args: cobra.NoArgs,
	}
	config.AddFlags(cmd.Flags(), doctorFlags...)
	hostRoot := addHostRootFlag(cmd)
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, problem, err := doctorConfig(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		answer := askStatus(cmd.Context(), c.ControlSocket)
		standIn := asRegistered(&c, answer.Value.Status, cmd.Flags())
		found, at, err := examine(cmd.Context(), c, answer, problem, *hostRoot, standIn)
		if err != nil {
			return err
		}
		report := struct {
			Worst    diagnosis.Severity  `json:"worst"`
			Node     string              `json:"node"`
			Findings []diagnosis.Finding `json:"findings"`
		}{diagnosis.Worst(found), at, found}
		if o.String() == "table" {
			for i := range found {
				found[i].Message = terminal.Line(found[i].Message)
				terminal.Clean(&found[i].Evidence)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), findings.Text("doctor", at, found, textWidth(cmd.OutOrStdout())))
		} else {
			err = o.print(cmd.OutOrStdout(), &report, nil)
		}
		if err != nil {
			return err
		}
		return severityStatus(report.Worst)
	}
	return cmd
}

// addHostRootFlag adds the flag of commands that read the node's files.
func addHostRootFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("host-root", "",
		"where the node's root folder is seen; default: / on the node, and in a container the driver root if that "+
			"is the node's root")
}

// severityStatus returns the exit status for the worst finding; nil for 0.
func severityStatus(worst diagnosis.Severity) error {
	switch worst {
	case diagnosis.Error:
		return ExitStatus(exitError)
	case diagnosis.Warning:
		return ExitStatus(exitWarning)
	default:
		return nil
	}
}

// doctorConfig returns the configuration. If the file cannot be used, c is the
// configuration without the file, and problem says why.
func doctorConfig(sources config.Sources) (c config.Config, problem string, err error) {
	c, _, err = config.Load(sources)
	if err == nil {
		return c, "", nil
	}
	plain, _, flags := sources.Resolve("", nil)
	if flags != nil {
		return config.Config{}, "", flags // the file is not to blame
	}
	return plain, "The configuration file cannot be used: " + err.Error(), nil
}

// asRegistered replaces the kubelet's sockets in c by the sockets of the running daemon,
// except sockets set by a flag and sockets that do not exist here. It reports whether the
// node is simulated with a kubelet of its own: then this machine's container runtime does
// not belong to the node.
func asRegistered(c *config.Config, s status.Status, flags *pflag.FlagSet) (standIn bool) {
	for _, socket := range []struct {
		flag, path string
		to         *string
	}{
		{"pod-resources-socket", s.PodResourcesSocket, &c.PodResourcesSocket},
		{"kubelet-socket", s.KubeletSocket, &c.KubeletSocket},
	} {
		if flags.Changed(socket.flag) || socket.path == "" || socket.path == *socket.to {
			continue
		}
		if _, err := os.Stat(socket.path); err == nil {
			*socket.to, standIn = socket.path, s.Simulated != ""
		}
	}
	return standIn
}

// examine returns the findings on the node, and the place of the node's files. answer is the
// daemon's status, and standIn the result of asRegistered.
func examine(
	ctx context.Context, c config.Config, answer diagnosis.Fact[doctor.Daemon], problem, hostRoot string, standIn bool,
) (found []diagnosis.Finding, at string, err error) {
	p, at, err := places(c, hostRoot)
	if err != nil {
		return nil, "", err
	}
	if simulated := cmp.Or(c.Simulate, answer.Value.Status.Simulated); simulated != "" {
		profile, err := simulator.Load(simulated)
		if err != nil {
			return nil, "", err
		}
		node := simulator.New(profile)
		defer node.Close()
		p.Kernel, p.Devices, p.DevFolder, p.Container, p.Simulated = node.Root(), node.Root(), "/dev", nil, true
		at += "; the GPUs are simulated: " + simulated
		if standIn && hostRoot == "" {
			p.Host, p.Hidden = nil, "The simulated node has no container runtime: its kubelet starts no containers"
			at = "simulated node " + simulated
		}
	}
	var next diagnosis.Fact[[]diagnosis.Finding]
	if p.Simulated {
		next.Missing = simulatedDriver
	} else {
		next.Value = preflight.ExamineNextBoot(driverPlaces(p).Read(ctx))
	}
	facts := p.Gather(ctx)
	facts.Daemon, facts.NextBoot, facts.Today = answer, next, time.Now()
	facts.Settings = doctor.Settings{
		Problem: problem, ConfigFile: c.File, CDI: c.Edits.UsesCDI(), DeviceNodes: c.Edits.DeviceNodes,
		Envvar:       slices.Contains(c.Edits.Strategies, containeredits.EnvVar),
		VolumeMounts: slices.Contains(c.Edits.Strategies, containeredits.VolumeMounts),
		CDIFolder:    c.CDIDir, CDIVendor: containeredits.CDIVendor, KernelLog: c.KernelLog,
		MPS: c.Resource.Sharing.Mode == resource.MPS, Claims: c.DRA.Mode != config.DRAOff,
		DriverRoot: c.Driver.Root, Companions: companions(c.Edits), Reader: reader(c.NodeName, p.Simulated),
	}
	return doctor.Examine(facts), at, nil
}

// companions returns the features that containers need in addition to their GPUs.
func companions(o containeredits.Options) (all []doctor.CompanionModule) {
	for _, companion := range []struct {
		doctor.CompanionModule
		when containeredits.Companion
	}{{doctor.GDRCopy, o.GDRCopy}, {doctor.GDS, o.GDS}, {doctor.MOFED, o.MOFED}} {
		if companion.Auto = companion.when == containeredits.Auto; companion.when != containeredits.Never {
			all = append(all, companion.CompanionModule)
		}
	}
	return all
}

// askStatus asks the running daemon for its status.
func askStatus(ctx context.Context, socket string) (fact diagnosis.Fact[doctor.Daemon]) {
	if socket == "" {
		fact.Missing = "The daemon has no control socket: --control-socket is empty"
		return fact
	}
	ctx, cancel := context.WithTimeout(ctx, nodefacts.Timeout)
	defer cancel()
	var s status.Status
	switch err := control.Call(ctx, socket, daemon.CallStatus, nil, &s); {
	case err == nil:
		fact.Value = doctor.Daemon{Status: s}
	case errors.Is(err, control.ErrNoDaemon):
		fact.Missing = noDaemon(socket)
	default:
		fact.Missing, fact.Hung = "The daemon does not tell its status: "+err.Error(), true
	}
	return fact
}

func noDaemon(socket string) string {
	return "No daemon answers at " + socket + ": it does not run, or this is not its container: " +
		"run doctor in the container of the daemon's pod on this node"
}

// reader returns where the findings are read: by kubectl, if doctor runs in a pod.
func reader(node string, simulated bool) doctor.Reader {
	r := doctor.Reader{Node: node, MayReset: simulated}
	if _, pod := os.LookupEnv("KUBERNETES_SERVICE_HOST"); !pod {
		return r
	}
	r.Pod, r.Namespace = os.Getenv("POD_NAME"), "kube-system"
	if host, err := os.Hostname(); err == nil && r.Pod == "" {
		r.Pod = host
	}
	if text, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace"); err == nil {
		r.Namespace = strings.TrimSpace(string(text))
	} else if namespace := os.Getenv("NAMESPACE"); namespace != "" {
		r.Namespace = namespace
	}
	var capabilities [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if unix.Capget(&header, &capabilities[0]) == nil {
		r.MayReset = r.MayReset || capabilities[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
	}
	return r
}

// inContainer reports whether this process is in a container: the kubelet sets a variable
// in its containers, and other containers have their own PID namespace.
func inContainer() bool {
	_, pod := os.LookupEnv("KUBERNETES_SERVICE_HOST")
	return pod || nodefiles.HasOwnPIDNamespace(os.DirFS("/"))
}

// places returns where the node's files are: below hostRoot, if set.
func places(c config.Config, hostRoot string) (p nodefacts.Places, at string, err error) {
	d := c.Driver
	p, at, err = nodefacts.Find(nodefacts.Roots{Driver: d.Root, Dev: d.DevRoot, Container: d.ContainerRoot}, hostRoot,
		inContainer())
	p.SearchPath, p.KubeletSocket, p.PodResourcesSocket = d.SearchPath, c.KubeletSocket, c.PodResourcesSocket
	return p, at, err
}

// textWidth returns the text width for w: the width of the terminal, or else the usual
// width.
func textWidth(w io.Writer) int {
	return max(60, cmp.Or(terminal.Columns(w), terminal.DefaultColumns))
}
