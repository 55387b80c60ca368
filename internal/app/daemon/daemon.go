package daemon

import (
	"context"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options are the inputs of a long-running program.
type Options struct {
	// Config is the configuration at the start. Sources are the sources of later configurations.
	Config  config.Config
	Sources config.Sources
	// Cluster is the client of the API server; nil if the program has none.
	Cluster Cluster
	// Signals are the signals to handle.
	Signals <-chan os.Signal
	// Reexecutions counts how often the process has replaced itself.
	Reexecutions int
	// ExtendEnd extends the time of a terminating process to the given duration from now;
	// nil does nothing.
	ExtendEnd func(time.Duration)
}

// Cluster reads from the API server and writes to it.
type Cluster interface {
	// Observation returns the tasks that read the Node at the API server. The boot ID is
	// the node's; empty if unknown.
	Observation(configs *feed.Feed[config.Config], boot string) []Task
	// Problem returns why the API server provides no data about the node; nil if the API
	// server answers or is not used.
	Problem() error
	// Outputs returns the tasks that report the node to the API server.
	Outputs(v View) []Task
	// Labels returns only the tasks that write labels.
	Labels(v View) []Task
	// Evict evicts a pod, within its disruption budget.
	Evict(ctx context.Context, pod mig.Pod) error
	// Pause pauses the DaemonSets of pods with these UIDs.
	Pause(ctx context.Context, pods []string) error
	// RequestSlot returns why a change of the node must not begin, by the rules of the cluster; nil
	// if it may. change says in a few words what would change. The caller repeats the call each
	// second until the change begins.
	RequestSlot(change string) error
	// SlotSince returns when the node took its slot of the cluster; zero if it has none.
	SlotSince() time.Time
	// RequestRepair is RequestSlot for the repair of a GPU.
	RequestRepair(repair string) error
	// DriverRefusal returns why the driver of the node must not be changed, according to the labels
	// of the Node; empty if it may.
	DriverRefusal() string
	// RankPods sets the priorities and creation times of pods of the node.
	RankPods(ctx context.Context, pods []repair.Pod) error
	// Claim returns a ResourceClaim, and whether it exists.
	Claim(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error)
	// ClaimsOf returns the claims on a node with devices of the given GPUs, as "NAMESPACE/NAME" by
	// the UUID of the GPU. Function gpu maps the name of a device to the UUID of its GPU. The call
	// may take minutes in a large cluster. Calls are not concurrent.
	ClaimsOf(ctx context.Context, node string, gpus []string,
		gpu func(device string) (uuid string, known bool)) (map[string][]string, error)
}

// Run serves the kubelet until ctx ends. The error wraps inventory.ErrDriverReplaced if
// only a new process can talk to the driver.
func Run(ctx context.Context, o Options) error {
	d, err := newDaemon(ctx, o)
	if err != nil {
		return err
	}
	defer d.close()
	limitMemory(ctx, os.DirFS("/"))
	defer time.AfterFunc(headStart, shrink).Stop()
	observation, outputs := d.tasks()
	return monitor.Replaceable(ctx, RunTasks(ctx, d.lead, observation, outputs), d.gpus.driver.Calls)
}

// gcPercent makes the runtime collect garbage earlier than by default: the daemon itself
// needs little memory, but a scrape leaves up to a megabyte of garbage.
const gcPercent = 50

// shrink releases the memory of the start. The runtime itself would keep the memory for
// minutes. An operator's GOGC has precedence over gcPercent.
func shrink() {
	debug.FreeOSMemory() // first, or the present garbage would cause a second collection
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// A daemon joins the wings of the running program. wings.go has the wings: what each is made of,
// which other wings it uses, and its tasks.
type daemon struct {
	*program
	*leadership
	gpus        *gpuWing
	kubelet     *kubeletWing
	mig         *migWing
	claims      *claimsWing
	maintenance *maintenanceWing
	report      *reportWing
	shared      *Shared
}

// newDaemon creates the wings, each from the wings that it uses. Three functions call back into the
// maintenance wing, which is created last. They are called only while the tasks run.
func newDaemon(ctx context.Context, o Options) (*daemon, error) {
	d := &daemon{program: newProgram(o), report: newReportWing()}
	isBusy := func() bool { return len(d.gpus.driver.Calls()) > 0 || d.maintenance.resets.Runs() }
	mayGive := func(devices []resource.Device) error { return d.maintenance.mayGive(devices) }
	inspect := func(ctx context.Context, devices []resource.Device) error {
		return d.maintenance.inspectForClaim(ctx, devices)
	}
	p, counters := d.program, d.report.counters
	sweepLeftovers(p.startup)
	folder, err := newKubeletFolder(ctx, p)
	if err != nil {
		return nil, err
	}
	d.leadership = newLeadership(p, folder, isBusy)
	if d.gpus, err = newGPUWing(ctx, p, d.leadership, counters); err != nil {
		return nil, err
	}
	d.kubelet = newKubeletWing(p, folder, d.gpus, mayGive, counters)
	d.claims = newClaimsWing(ctx, p, d.leadership, d.gpus, d.kubelet, inspect, counters)
	d.mig = newMIGWing(ctx, p, d.leadership, d.gpus, d.kubelet, d.claims)
	d.maintenance = newMaintenanceWing(ctx, p, d.leadership, d.gpus, d.kubelet, d.claims, d.mig)
	d.report.labels = newLabels(p, d.gpus, d.claims)
	d.shared = NewShared(d.lead, d.claims.owners, d.mig.dividing, d.maintenance.proofs.Records(),
		d.maintenance.resets.Status(), d.maintenance.swaps.Status(), d.mig.controller != nil)
	return d, nil
}

// sweepLeftovers removes temporary files of killed processes. It runs in the background,
// because a disk may hang. In other folders the first write does the same.
func sweepLeftovers(c config.Startup) {
	if c.StateDir != "" {
		go func() { _ = statefile.Sweep(c.StateDir) }() // the next process tries again
	}
}

// leadFolder is the folder in the kubelet's directory, or else in the state directory,
// with the leader election of the node's processes. The kubelet removes sockets in its
// directory, but no folders.
const leadFolder = "gpu-device-plugin"

// tasks returns all tasks of the daemon.
func (d *daemon) tasks() (observation, outputs []Task) {
	observation, outputs = d.observation(), d.outputs()
	d.report.readiness = NewReadiness(d.lead, observation, outputs)
	d.report.readiness.EndBy(d.gpus.monitor.Snapshots(), func(ctx context.Context) string {
		state, err := d.gpus.monitor.Status(ctx)
		if err != nil { // the daemon ends
			return ""
		}
		return driverMismatch(state)
	})
	d.report.liveness = NewLiveness(d.lead, observation, outputs)
	return observation, append(outputs, Task{Name: "readiness", Run: d.report.readiness.Run})
}

// observation returns the tasks that observe the node and read the operator's settings.
func (d *daemon) observation() []Task {
	tasks := []Task{
		{Name: "configuration", Run: d.watcher.Run, Alive: d.watcher.Alive},
		{Name: "signals", Run: func(ctx context.Context) error {
			return followSignals(ctx, d.signals, d.watcher, d.requests())
		}},
	}
	tasks = slices.Concat(tasks, d.gpus.observation(), d.kubelet.observation())
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Observation(d.watcher.Configs(), BootID(d.gpus.node))...)
	}
	return tasks
}

// outputs returns the tasks that act on the results.
func (d *daemon) outputs() []Task {
	tasks := slices.Concat(
		// it ends with the tasks under the lead, without waiting for others
		[]Task{{Name: "lead", Run: d.lead.Run, Alive: d.lead.Alive}},
		d.kubelet.outputs(d.claims, d.mig, d.maintenance),
		d.claims.outputs(d.shared),
		d.maintenance.outputs(d.shared),
		d.mig.outputs(d.shared),
		[]Task{
			{Name: "received state", Run: d.shared.Follow},
			d.shared.Publisher(Task{Name: "published state", Run: d.shared.Publish}),
			{Name: "metrics", Run: d.serveMetrics},
			{Name: "labels", Run: d.report.labels.Run},
			{Name: "feature file", Lead: true, Run: func(ctx context.Context) error {
				return d.featureFile().run(ctx)
			}},
		})
	if d.startup.ControlSocket != "" {
		tasks = append(tasks, Task{Name: "control socket", Run: d.serveControl})
	}
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Outputs(d.view())...)
	}
	return tasks
}

// view returns the parts of the daemon for the tasks that use the API server.
func (d *daemon) view() View {
	v := View{
		ConfigView:  ConfigView{Startup: d.startup, Configs: d.watcher.Configs(), ConfigErrors: d.watcher.Errors()},
		LabelView:   LabelView{Labels: d.report.labels.Wanted, LabelsProblem: d.report.labelsProblem},
		AccountView: AccountView{Held: d.kubelet.account.Held},
		ShrinkView: ShrinkView{
			PendingShrink: d.kubelet.set.PendingShrink(), ApproveShrink: d.kubelet.set.ApproveShrink,
			Listed: d.kubelet.listed,
		},
		CountView: CountView{
			APIRequested: d.report.counters.APIRequested, EventDropped: d.report.counters.EventDropped,
			HealthEventsSent: d.report.counters.HealthEventsSent,
		},
		Lead: d.lead, Snapshots: d.gpus.monitor.Snapshots(),
		MaintenanceView: MaintenanceView{
			Repairs: d.maintenance.repairs.Status(), DriverChange: d.maintenance.swaps.Status(),
		},
		Offered: d.kubelet.set.Offered(), DRA: d.claims.dra, Status: d.status,
		Quiesce: func(ctx context.Context) error { return d.requests().Quiesce(ctx, false) },
		Resume:  func(ctx context.Context) error { return d.requests().Resume(ctx) },
		Unproven: func(s inventory.Snapshot) (map[string]string, <-chan struct{}) {
			changed := d.maintenance.proofs.Changed() // taken first
			return d.maintenance.proofs.Unproven(s), changed
		},
	}
	if d.kubelet.directory != nil {
		v.Checkpoint = d.kubelet.directory.Checkpoint
	}
	if d.claims.dra != nil {
		v.ClaimsOf = func(devices []string) []dra.Claim {
			return claims.Of(d.claims.dra.Claims.Status().Value(), devices)
		}
	}
	if d.mig.controller != nil {
		v.MIGChoice, v.MIG = d.mig.choice, d.mig.controller.Status()
	}
	return v
}

// featureFile returns the file for node-feature-discovery.
func (d *daemon) featureFile() *featureFile {
	return &featureFile{configs: d.watcher.Configs(), labels: d.report.labels.Wanted, problem: d.report.labelsProblem}
}

// close releases the daemon's resources after its end.
func (d *daemon) close() {
	if d.gpus.node != nil {
		d.gpus.node.Close()
	}
	_ = d.gpus.recorder.Stop()    // there may be no recording
	_ = d.kubelet.account.Close() // only the connection; an error has no consequence
}

// serveControl serves the control socket. Without the socket the daemon still serves GPUs.
func (d *daemon) serveControl(ctx context.Context) error {
	server := control.NewServer(d.startup.ControlSocket, d.handlers(), d.streams())
	return supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute},
		server.Run)
}
