package daemon

import (
	"context"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// Options are the inputs of a long-running program.
type Options struct {
	// Config is the configuration at the start. Sources are the sources of later
	// configurations.
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
	// MayChange returns why a change of the node must not begin, by the rules of the cluster; nil if
	// it may. change says in a few words what would change. The caller repeats the call each second
	// until the change begins.
	MayChange(change string) error
	// MayRepair is MayChange for the repair of a GPU.
	MayRepair(repair string) error
	// RankPods sets the priorities and creation times of pods of the node.
	RankPods(ctx context.Context, pods []policy.Pod) error
	// Claim returns a ResourceClaim, and whether it exists.
	Claim(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error)
	// ClaimsOf returns the claims on a node with devices of the given GPUs, as
	// "NAMESPACE/NAME" by the UUID of the GPU. Function gpu maps the name of a device to
	// the UUID of its GPU. The call may take minutes in a large cluster. Calls are not
	// concurrent.
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
	return replaceable(ctx, RunTasks(ctx, d.lead, observation, outputs), d.driver.Calls)
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

// A daemon joins the wings of the running program, which wings.go describes. newDaemon creates them
// in an order in which each part gets what it needs. What a part calls in a wing that is created
// later, such as the servers' question whether a device may be given, is called only while the
// tasks run.
type daemon struct {
	program
	gpuWing
	kubeletWing
	leadership
	migWing
	claimsWing
	maintenanceWing
	reportWing
}

func newDaemon(ctx context.Context, o Options) (*daemon, error) {
	d := &daemon{program: newProgram(o), reportWing: newReportWing()}
	err := d.open(ctx, d.startup, d.counters)
	if err != nil {
		return nil, err
	}
	d.recordFromStart(ctx)
	sweepLeftovers(d.startup)
	if d.kubeletWing, err = newKubeletWing(ctx, d.startup); err != nil {
		return nil, err
	}
	d.lead = d.newLead()
	d.monitor = d.newMonitor()
	d.watcher.JudgeOn(d.monitor.Snapshots().Value)
	d.labels = newLabels(d.watcher.Configs(), d.monitor.Snapshots())
	d.set = d.newSet()
	d.migWing, d.claimsWing = d.newMIGChoice(ctx), newClaimsWing()
	d.proofs, d.resets = d.newProofs(ctx), d.newResets()
	d.repairs = d.newRepairs() // by resets
	if d.dra = d.newDRA(ctx, o.Config); d.dra != nil {
		d.labels.InUse = d.dra.Claims.InUse()
	}
	if d.migChoice != nil {
		d.mig = d.newMIG()
		d.dividing = d.mig.Holds()
	}
	d.shared = NewShared(d.lead, d.owners, d.dividing, d.proofs.Records(), d.resets.Status(), d.mig != nil)
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

// newLead returns this process's participant in the leader election.
func (d *daemon) newLead() *lead.Lead {
	name, _ := os.Hostname() // in a pod, the pod's name
	o := lead.Options{
		Name: name + ", version " + version.String(), Token: kubelet.NewToken(),
		Busy: func() bool { return len(d.driver.Calls()) > 0 || d.resets.Runs() },
	}
	switch {
	case d.directory != nil:
		o.Dir = filepath.Join(d.directory.Path(), leadFolder)
	case d.startup.StateDir != "":
		o.Dir = filepath.Join(d.startup.StateDir, leadFolder)
		_ = os.MkdirAll(d.startup.StateDir, 0o700) // the lead reports the error
	}
	return lead.New(o)
}

// newMIG returns the controller of MIG layouts.
func (d *daemon) newMIG() *mig.Controller {
	o := mig.Options{
		Desired: d.migChoice.Desired(), Snapshots: d.monitor.Snapshots(), Driver: d.monitor, Evictor: d.cluster,
		StateDir: d.startup.StateDir,
		BootID:   BootID(d.node), TakeOver: d.migChoice.Reload, PreviousLeader: d.mayChangeHardware,
		Blocked: d.mayDivide,
		Clients: func(minor int) ([]inventory.DriverClient, error) { return nvidia.Clients(nodeRoot(d.node), minor) },
	}
	if d.directory != nil {
		o.Holders = pluginHolders{d.set, d.owners, d.monitor.Snapshots()}
	}
	if d.dra != nil {
		o.Refuse = d.dividedForClaims
	}
	if d.cluster != nil {
		o.Pauser, o.Admit = d.cluster, d.admitLayout
	}
	return mig.New(o)
}

// admitLayout returns why a change to a MIG layout must not begin, by the slots of the cluster.
func (d *daemon) admitLayout(layout string) error {
	if !d.watcher.Configs().Value().MIG.Budget {
		return nil
	}
	return d.cluster.MayChange("MIG layout " + layout)
}

// isDivided reports whether GPUs of the node are in MIG mode. The answer is unknown before
// the first scan.
func (d *daemon) isDivided() (divided, known bool) {
	s := d.monitor.Snapshots().Value()
	divided = slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return g.MIG == inventory.MIGEnabled })
	return divided, s.Driver != inventory.Driver{}
}

// dividedForClaims returns why the MIG layout of a GPU must not be applied now; empty if
// it may.
func (d *daemon) dividedForClaims(uuid string) string {
	if d.watcher.Configs().Value().DRA.DynamicMIG && d.dra.Owners.Value()[uuid] != dra.OwnedByPlugin {
		return "MIG devices of this GPU are created for claims: let the device plugin offer the GPU, or switch " +
			"dra.dynamicMIG off"
	}
	return ""
}

// tasks returns all tasks of the daemon.
func (d *daemon) tasks() (observation, outputs []Task) {
	observation, outputs = d.observation(), d.outputs()
	d.readiness = NewReadiness(d.lead, observation, outputs)
	d.readiness.EndBy(d.monitor.Snapshots(), func(ctx context.Context) string {
		seen, err := d.monitor.Status(ctx)
		if err != nil { // the daemon ends
			return ""
		}
		return driverMismatch(seen)
	})
	d.liveness = NewLiveness(d.lead, observation, outputs)
	return observation, append(outputs, Task{Name: "readiness", Run: d.readiness.Run})
}

// observation returns the tasks that observe the node and read the operator's settings.
func (d *daemon) observation() []Task {
	tasks := []Task{
		{Name: "configuration", Run: d.watcher.Run, Alive: d.watcher.Alive},
		{Name: "kernel log", Run: d.readKernelLog},
		{Name: "signals", Run: func(ctx context.Context) error {
			return followSignals(ctx, d.signals, d.watcher, d.requests())
		}},
		{Name: "monitor", Run: d.monitor.Run, Alive: d.monitor.Alive},
		{Name: "first scan", Run: func(ctx context.Context) error {
			return CheckFirstLook(ctx, d.monitor, d.watcher.Configs())
		}},
		{Name: "start", Run: func(ctx context.Context) error {
			return LogStart(ctx, version.String(), d.monitor.Snapshots(), d.watcher.Configs())
		}},
		{Name: "health policy", Run: func(ctx context.Context) error {
			return FollowHealth(ctx, d.requests(), d.watcher.Configs())
		}},
		{Name: "driver", Run: func(ctx context.Context) error { return FollowDriver(ctx, d.monitor) }},
	}
	if d.directory != nil {
		tasks = append(tasks, Task{Name: "kubelet's directory", Run: d.watchKubelet, Alive: d.directory.Alive})
	}
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Observation(d.watcher.Configs(), BootID(d.node))...)
	}
	return tasks
}

// outputs returns the tasks that act on the results.
func (d *daemon) outputs() []Task {
	plans := &offer.Loop{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Set: d.set, Specs: newSpecs(d.startup.CDIDir),
		MPS: d.mps, MIG: d.dividing, Owners: d.owners, Proofs: d.proofs, Pulse: supervise.NewPulse(),
	}
	if d.dra != nil {
		plans.Followed = d.dra.Offered
	}
	servers := Task{Name: "plugin servers", Run: d.set.Run, Alive: d.set.Alive}
	if d.directory != nil {
		serving := &Serving{
			Configs: d.watcher.Configs(), Monitor: d.monitor, Offered: d.set.Offered(), Servers: d.set.Status,
			Others: devicePlugins{d.account, d.directory}, Owners: d.owners,
			Leads: func() bool { return d.lead.Statuses().Value().Leads },
		}
		if d.dra != nil {
			serving.Waiting = func() []string { return d.allocation().Waiting() }
			serving.Returning = d.dra.Arbiter.Returning
		}
		servers.Ready = serving.Ready
	}
	tasks := []Task{
		// it ends with the tasks under the lead, without waiting for others
		{Name: "lead", Run: d.lead.Run, Alive: d.lead.Alive},
		servers,
		{Name: "MPS", Run: d.mps.Run},
		{Name: "plan", Run: plans.Run, Alive: plans.Pulse.Check},
	}
	tasks = append(tasks, d.draTasks()...)
	tasks = append(tasks, Task{Name: "CUDA results", Run: d.proofs.Follow},
		d.shared.Publisher(Task{Name: "CUDA checks", Run: d.proofs.Run}),
		Task{Name: "resets", Run: d.resets.Run, Lead: true},
		Task{Name: "repairs", Run: d.repairs.Run, Lead: true},
		Task{Name: "received state", Run: d.shared.Follow},
		d.shared.Publisher(Task{Name: "published state", Run: d.shared.Publish}),
		Task{Name: "metrics", Run: d.serveMetrics}, Task{Name: "labels", Run: d.labels.Run},
		Task{Name: "feature file", Run: func(ctx context.Context) error { return d.featureFile().run(ctx) },
			Lead: true},
		Task{Name: "restart request", Run: d.askForReboot, Lead: true})
	if d.mig != nil {
		tasks = append(tasks, Task{Name: "desired MIG layout", Run: d.migChoice.Run},
			d.shared.Publisher(Task{Name: "MIG", Run: d.mig.Run, Alive: d.mig.Alive}))
	}
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
		LabelView:   LabelView{Labels: d.labels.Wanted, LabelsProblem: d.labelsProblem},
		AccountView: AccountView{Held: d.account.Held},
		ShrinkView: ShrinkView{
			PendingShrink: d.set.PendingShrink(), ApproveShrink: d.set.ApproveShrink, Listed: d.listed,
		},
		CountView: CountView{
			APIRequested: d.counters.APIRequested, EventDropped: d.counters.EventDropped,
			HealthEventsSent: d.counters.HealthEventsSent,
		},
		Lead: d.lead, Snapshots: d.monitor.Snapshots(), Repairs: d.repairs.Status(), Offered: d.set.Offered(),
		DRA: d.dra, Status: d.status,
		Quiesce: func(ctx context.Context) error { return d.requests().Quiesce(ctx, false) },
		Resume:  func(ctx context.Context) error { return d.requests().Resume(ctx) },
		Unproven: func(s inventory.Snapshot) (map[string]string, <-chan struct{}) {
			changed := d.proofs.Changed() // taken first
			return d.proofs.Unproven(s), changed
		},
	}
	if d.directory != nil {
		v.Checkpoint = d.directory.Checkpoint
	}
	if d.dra != nil {
		v.ClaimsOf = func(devices []string) []dra.Claim { return claims.Of(d.dra.Claims.Status().Value(), devices) }
	}
	if d.mig != nil {
		v.MIGChoice, v.MIG = d.migChoice, d.mig.Status()
	}
	return v
}

// listed returns the number of devices in the lists of the plugin servers, by resource.
func (d *daemon) listed() map[string]int {
	devices := map[string]int{}
	for _, s := range d.set.Status() {
		devices[s.Resource] = s.Healthy
	}
	return devices
}

// featureFile returns the file for node-feature-discovery.
func (d *daemon) featureFile() *featureFile {
	return &featureFile{configs: d.watcher.Configs(), labels: d.labels.Wanted, problem: d.labelsProblem}
}

// close releases the daemon's resources after its end.
func (d *daemon) close() {
	if d.node != nil {
		d.node.Close()
	}
	_ = d.recorder.Stop() // there may be no recording
	_ = d.account.Close() // only the connection; an error has no consequence
}

// watchKubelet publishes changes in the kubelet's directory.
func (d *daemon) watchKubelet(ctx context.Context) error {
	if err := d.directory.Check(); err != nil {
		klog.FromContext(ctx).Info("Waiting for the kubelet", "reason", err.Error())
	}
	return d.directory.Watch(ctx, d.kubelets, d.sockets)
}

// serveControl serves the control socket. Without the socket the daemon still serves GPUs.
func (d *daemon) serveControl(ctx context.Context) error {
	server := control.NewServer(d.startup.ControlSocket, d.handlers(), d.streams())
	return supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute},
		server.Run)
}
