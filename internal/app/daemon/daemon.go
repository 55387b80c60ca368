package daemon

import (
	"context"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/recording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// Options are what a program that runs for long starts with.
type Options struct {
	// Config is the configuration that the program starts with, and Sources are where later ones are
	// read from.
	Config  config.Config
	Sources config.Sources
	// Cluster is the client of the API server; nil if the program has none.
	Cluster Cluster
	// Signals are those of the process that are to be handled.
	Signals <-chan os.Signal
	// Reexecutions is how often the process has replaced itself by a new one.
	Reexecutions int
	// ExtendEnd gives the process so much time from now on, where it has been told to end; nil does
	// nothing.
	ExtendEnd func(time.Duration)
}

// Cluster reads from the API server and writes to it.
type Cluster interface {
	// Observation returns the tasks that read the node at the API server. The boot ID is that of the
	// node; empty if it is not known.
	Observation(configs *feed.Feed[config.Config], boot string) []Task
	// Problem returns why the API server does not tell of the node; nil if it does, or is not asked.
	Problem() error
	// Outputs returns the tasks that tell the API server of the node.
	Outputs(v View) []Task
	// Labels returns those of them that write labels.
	Labels(v View) []Task
	// Evict has a pod evicted, within its disruption budget.
	Evict(ctx context.Context, pod mig.Pod) error
	// Pause has DaemonSets paused that have pods with these UIDs.
	Pause(ctx context.Context, pods []string) error
	// Claim returns a ResourceClaim, and whether there is one of that name.
	Claim(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error)
	// ClaimsOf returns which claims have devices of some GPUs of a node, as "NAMESPACE/NAME", by the
	// UUID of the GPU, which gpu returns for the name of a device. It may wait for minutes in a large
	// cluster. One call is made at a time.
	ClaimsOf(ctx context.Context, node string, gpus []string,
		gpu func(device string) (uuid string, known bool)) (map[string][]string, error)
}

// Run serves kubelet until ctx ends. The error wraps inventory.ErrDriverReplaced when only a new
// process can talk to the driver.
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

// gcPercent makes the runtime collect garbage earlier than by default: the daemon itself needs
// little memory, and a scrape leaves up to a megabyte of garbage.
const gcPercent = 50

// shrink gives back the memory that only the start needed. By itself the runtime keeps it for
// minutes. An operator who sets GOGC decides when garbage is collected.
func shrink() {
	debug.FreeOSMemory() // first: what is garbage now would have it collected a second time
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// A daemon is everything that the running program consists of.
type daemon struct {
	config         config.Config // as it was at the start, for settings that need a restart
	watcher        *config.Watcher
	driver         *nvidia.Driver
	node           *simulator.Node // nil on a real node
	pci            *pciBus
	recorder       recording.Recorder
	lead           *lead.Lead
	shared         *Shared
	proofs         *cudacheck.Proofs
	resets         *reset.Resets
	progress       *status.Progress
	monitor        *monitor.Monitor
	directory      *kubelet.Directory // nil when there is nothing to register with
	account        *kubelet.PodResources
	kubelets       *feed.Feed[uint64]   // the incarnation of the one that is there
	sockets        *feed.Feed[[]string] // beside its own
	set            *serve.Servers
	mps            *mps.Prober
	readiness      *Readiness
	liveness       *Liveness
	counters       *telemetry.Counters
	switchFaults   *feed.Feed[[]string] // fatal errors of NVSwitches
	metricsProblem *feed.Feed[error]    // why metrics are not served
	migChoice      *choice.Chooser      // nil where MIG layouts are not changed, as the next
	mig            *mig.Controller
	dividing       *feed.Feed[map[string]resource.GPUHold] // by UUID of the GPU; nil where nobody changes layouts
	owners         *feed.Feed[dra.Owners]                  // nil until this process knows them
	dra            *DRA                                    // nil where no GPU can be given by Dynamic Resource Allocation
	keptName       string                                  // why the driver has another name than the configuration
	labels         *Labels
	labelsProblem  *feed.Feed[error] // why the labels of the node are not as they are wanted
	asked          <-chan os.Signal  // signals to handle
	cluster        Cluster           // nil in a program that does not talk to the API server
	extendEnd      func(time.Duration)

	reexecutions int
}

func newDaemon(ctx context.Context, o Options) (*daemon, error) {
	c := o.Config
	d := &daemon{
		cluster:        o.Cluster,
		progress:       status.NewProgress(time.Now()),
		config:         c,
		asked:          o.Signals,
		extendEnd:      o.ExtendEnd,
		reexecutions:   o.Reexecutions,
		watcher:        config.NewWatcher(o.Sources, c, clock.RealClock{}),
		account:        kubelet.NewPodResources(c.PodResourcesSocket, clock.RealClock{}),
		kubelets:       feed.New(uint64(0)),
		sockets:        feed.New([]string(nil)),
		mps:            mps.NewProber(c.MPSRoot, clock.RealClock{}),
		counters:       telemetry.NewCounters(serve.Causes()),
		switchFaults:   feed.New([]string(nil)),
		metricsProblem: feed.New[error](nil),
		labelsProblem:  feed.New[error](nil),
		dividing:       feed.New(map[string]resource.GPUHold(nil)),
		owners:         feed.New(dra.Owners(nil)),
	}
	var err error
	if d.driver, d.node, err = OpenNode(ctx, c, d.counters); err != nil {
		return nil, err
	}
	d.pci = &pciBus{root: nodeRoot(d.node)}
	d.recordFromStart(ctx)
	sweepLeftovers(c)
	directory, err := d.newDirectory(ctx)
	if err != nil {
		return nil, err
	}
	d.lead = d.newLead()
	d.monitor = monitor.New(monitor.Options{
		Driver: d.recorder.Driver(driverOf{Driver: d.driver}), Policy: c.Health, StateDir: c.StateDir, BootID: BootID(d.node),
		Metrics: d.counters, Lead: d.lead.Check,
		While: func(ctx context.Context, task func(context.Context) error) error {
			return d.lead.While(ctx, "ledger", task)
		},
		Modes: &MIGModes{Configs: d.watcher.Configs(), DriverRoot: c.Driver.ContainerRoot, SearchPath: c.Driver.SearchPath,
			Node: d.node},
	})
	d.watcher.JudgeOn(d.monitor.Snapshots().Value)
	d.labels = &Labels{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Make: labels.All, Machine: MachineName, Now: time.Now,
		Wanted: feed.New[map[string]string](nil),
	}
	d.set = d.newSet(directory)
	if c.MIG.Enabled {
		d.migChoice = choice.New(ctx, d.watcher.Configs(), c.StateDir, d.lead.Check, d.isDivided, clock.RealClock{})
	}
	d.proofs, d.resets = d.newProofs(ctx), d.newResets()
	if d.dra = d.newDRA(ctx, c); d.dra != nil {
		d.labels.InUse = d.dra.Claims.InUse()
	}
	if d.migChoice != nil {
		d.mig = d.newMIG()
		d.dividing = d.mig.Holds()
	}
	d.shared = NewShared(d.lead, d.owners, d.dividing, d.proofs.Records(), d.resets.Status(), d.mig != nil)
	return d, nil
}

// sweepLeftovers removes the temporary files that earlier processes left when they were killed.
// Nothing waits for it: a disk may hang. In other folders the first write does the same.
func sweepLeftovers(c config.Config) {
	if c.StateDir != "" {
		go func() { _ = statefile.Sweep(c.StateDir) }() // the next process tries again
	}
}

// newDirectory finds kubelet's directory.
func (d *daemon) newDirectory(ctx context.Context) (*kubelet.Directory, error) {
	socket := d.config.KubeletSocket
	if socket == "" {
		klog.FromContext(ctx).Info("Not registering with kubelet: --kubelet-socket is empty")
		socket = config.DefaultKubeletSocket
	}
	directory, err := kubelet.NewDirectory(socket, clock.RealClock{})
	if err != nil {
		return nil, err
	}
	if d.config.KubeletSocket != "" {
		d.directory = directory
	}
	return directory, nil
}

// newSet returns the plugin servers.
func (d *daemon) newSet(directory *kubelet.Directory) *serve.Servers {
	return serve.NewServers(serve.Collaborators{
		Registrar: directory, Accountant: d.account, Connections: d.account.Connections, Checkpoint: directory.Checkpoint,
		CheckpointVersion: directory.CheckpointVersion,
		Incarnation:       d.kubelets, Sockets: d.sockets,
		Clock:     clock.RealClock{},
		Inspector: &Inspector{Configs: d.watcher.Configs(), Monitor: d.monitor},
		Metrics:   d.counters,
		MayGive:   d.mayGive,
		ExtendEnd: d.extendEnd,
	})
}

// leadFolder is the folder in kubelet's directory, or else in the state directory, in which the
// processes of a node agree on who leads. Kubelet removes sockets in its directory, and no folders.
const leadFolder = "gpu-device-plugin"

// newLead returns the part of this process in the lead of the node.
func (d *daemon) newLead() *lead.Lead {
	name, _ := os.Hostname() // of a pod, its name
	o := lead.Options{
		Name: name + ", version " + version.String(), Token: kubelet.NewToken(),
		Busy: func() bool { return len(d.driver.Calls()) > 0 || d.resets.Runs() },
	}
	switch {
	case d.directory != nil:
		o.Dir = filepath.Join(d.directory.Path(), leadFolder)
	case d.config.StateDir != "":
		o.Dir = filepath.Join(d.config.StateDir, leadFolder)
		_ = os.MkdirAll(d.config.StateDir, 0o700) // the lead says what is wrong
	}
	return lead.New(o)
}

// newMIG returns the owner of how GPUs are divided.
func (d *daemon) newMIG() *mig.Controller {
	o := mig.Options{
		Desired: d.migChoice.Desired(), Snapshots: d.monitor.Snapshots(), Driver: d.monitor, Evictor: d.cluster,
		StateDir: d.config.StateDir, BootID: BootID(d.node), TakeOver: d.migChoice.Reload,
		PreviousLeader: d.mayChangeHardware, Blocked: d.mayDivide,
		Clients: func(minor int) ([]inventory.DriverClient, error) { return nvidia.Clients(nodeRoot(d.node), minor) },
	}
	if d.directory != nil {
		o.Holders = pluginHolders{d.set, d.owners, d.monitor.Snapshots()}
	}
	if d.dra != nil {
		o.Refuse = d.dividedForClaims
	}
	if d.cluster != nil {
		o.Pauser = d.cluster
	}
	return mig.New(o)
}

// isDivided reports whether GPUs of the node are in MIG mode. It is not known before the first
// look.
func (d *daemon) isDivided() (divided, known bool) {
	s := d.monitor.Snapshots().Value()
	divided = slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return g.MIG == inventory.MIGEnabled })
	return divided, s.Driver != inventory.Driver{}
}

// dividedForClaims says why the MIG layout of a GPU, by UUID, is not made now; empty if it may be.
func (d *daemon) dividedForClaims(uuid string) string {
	if d.watcher.Configs().Value().DRA.DynamicMIG && d.dra.Owners.Value()[uuid] != dra.OwnedByPlugin {
		return "MIG devices are made of the GPU for claims: have the device plugin give it, or switch dra.dynamicMIG off"
	}
	return ""
}

// tasks are all tasks of the daemon.
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

// observation is the tasks that find out what the node has and what its operator wants.
func (d *daemon) observation() []Task {
	tasks := []Task{
		{Name: "configuration", Run: d.watcher.Run, Alive: d.watcher.Alive},
		{Name: "kernel log", Run: d.readKernelLog},
		{Name: "signals", Run: func(ctx context.Context) error { return followSignals(ctx, d.asked, d.watcher, d.requests()) }},
		{Name: "monitor", Run: d.monitor.Run, Alive: d.monitor.Alive},
		{Name: "first look", Run: func(ctx context.Context) error { return CheckFirstLook(ctx, d.monitor, d.watcher.Configs()) }},
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

// outputs are the tasks that act on it.
func (d *daemon) outputs() []Task {
	plans := &offer.Loop{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Set: d.set, Specs: newSpecs(d.config.CDIDir),
		MPS: d.mps, MIG: d.dividing, Owners: d.owners, Proofs: d.proofs, Pulse: supervise.NewPulse(),
	}
	if d.dra != nil {
		plans.Followed = d.dra.Offered
	}
	servers := Task{Name: "plugin servers", Run: d.set.Run, Alive: d.set.Alive}
	if d.directory != nil {
		serving := &Serving{
			Configs: d.watcher.Configs(), Monitor: d.monitor, Offered: d.set.Offered(), Servers: d.set.Status,
			Others: devicePlugins{d.account, d.directory}, Owners: d.owners, Leads: func() bool { return d.lead.Statuses().Value().Leads },
		}
		if d.dra != nil {
			serving.Waiting, serving.Returning = func() []string { return d.allocation().Waiting() }, d.dra.Arbiter.Returning
		}
		servers.Ready = serving.Ready
	}
	tasks := []Task{
		// it ends as soon as the tasks under it, whatever else takes its time
		{Name: "lead", Run: d.lead.Run, Alive: d.lead.Alive},
		servers,
		{Name: "MPS", Run: d.mps.Run},
		{Name: "plan", Run: plans.Run, Alive: plans.Pulse.Check},
	}
	tasks = append(tasks, d.draTasks()...)
	tasks = append(tasks, Task{Name: "verdicts on CUDA", Run: d.proofs.Follow},
		d.shared.Publisher(Task{Name: "proofs of CUDA", Run: d.proofs.Run}), Task{Name: "resets", Run: d.resets.Run, Lead: true},
		Task{Name: "heard of GPUs", Run: d.shared.Follow}, d.shared.Publisher(Task{Name: "told of GPUs", Run: d.shared.Publish}),
		Task{Name: "metrics", Run: d.serveMetrics}, Task{Name: "labels", Run: d.labels.Run},
		Task{Name: "feature file", Run: func(ctx context.Context) error { return d.featureFile().run(ctx) }, Lead: true},
		Task{Name: "request of a restart", Run: d.askForReboot, Lead: true})
	if d.mig != nil {
		tasks = append(tasks, Task{Name: "desired MIG layout", Run: d.migChoice.Run},
			d.shared.Publisher(Task{Name: "MIG", Run: d.mig.Run, Alive: d.mig.Alive}))
	}
	if d.config.ControlSocket != "" {
		tasks = append(tasks, Task{Name: "control socket", Run: d.serveControl})
	}
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Outputs(d.view())...)
	}
	return tasks
}

// view returns the parts of the daemon that the tasks for the API server use.
func (d *daemon) view() View {
	v := View{
		Config: d.config, Configs: d.watcher.Configs(), ConfigErrors: d.watcher.Errors(),
		Labels: d.labels.Wanted, LabelsProblem: d.labelsProblem, Lead: d.lead,
		Snapshots: d.monitor.Snapshots(), Offered: d.set.Offered(), Status: d.status, Held: d.account.Held,
		Fewer: d.set.PendingShrink(), Proceed: d.set.ApproveShrink, Listed: d.listed,
		Quiesce: func(ctx context.Context) error { return d.requests().Quiesce(ctx, false) },
		Resume:  func(ctx context.Context) error { return d.requests().Resume(ctx) },
		DRA:     d.dra, APIRequested: d.counters.APIRequested, EventDropped: d.counters.EventDropped,
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

// listed returns how many devices the lists of the plugin servers offer, by resource.
func (d *daemon) listed() map[string]int {
	devices := map[string]int{}
	for _, s := range d.set.Status() {
		devices[s.Resource] = s.Healthy
	}
	return devices
}

// featureFile is the file for node-feature-discovery.
func (d *daemon) featureFile() *featureFile {
	return &featureFile{configs: d.watcher.Configs(), labels: d.labels.Wanted, problem: d.labelsProblem}
}

// close releases what the daemon has opened, after its end.
func (d *daemon) close() {
	if d.node != nil {
		d.node.Close()
	}
	_ = d.recorder.Stop() // there may be none
	_ = d.account.Close() // its connection only; an error has no consequence
}

// watchKubelet publishes what is in kubelet's directory.
func (d *daemon) watchKubelet(ctx context.Context) error {
	if err := d.directory.Check(); err != nil {
		klog.FromContext(ctx).Info("Waiting for kubelet", "reason", err.Error())
	}
	return d.directory.Watch(ctx, d.kubelets, d.sockets)
}

// serveControl serves the control socket. The daemon serves GPUs without it, if it cannot be made.
func (d *daemon) serveControl(ctx context.Context) error {
	server := control.NewServer(d.config.ControlSocket, d.handlers(), d.streams())
	return supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute},
		server.Run)
}
