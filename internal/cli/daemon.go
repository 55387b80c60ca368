package cli

import (
	"context"
	"io/fs"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	agent "github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/migwish"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/telemetry"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/version"
)

// runDaemon runs the daemon until ctx ends. It handles the signals of the process.
func (p Program) runDaemon(ctx context.Context, flags *pflag.FlagSet, own *process) error {
	sources := config.Sources{
		Env: os.LookupEnv, Flags: flags, OwnPIDNamespace: confined(os.DirFS("/")), Program: p.kind(), NVIDIA: p.nvidia,
	}
	first, err := p.begin(ctx, &sources, own)
	if err != nil {
		return err
	}
	d, err := newDaemon(ctx, first, sources, p.Cluster)
	if err != nil {
		return err
	}
	d.asked = own.signals
	defer d.close()
	defer time.AfterFunc(headStart, shrink).Stop()
	observation, outputs := d.tasks()
	return replaceable(ctx, agent.Run(ctx, observation, outputs), d.driver.Calls)
}

// gcPercent has garbage collected earlier than by default: the daemon itself needs little memory, and a scrape leaves up to a megabyte
// of garbage.
const gcPercent = 50

// shrink gives the memory back that only the start needed. By itself the runtime keeps it for minutes. An operator who sets GOGC decides
// when garbage is collected.
func shrink() {
	debug.FreeOSMemory() // first: what is garbage now would have it collected a second time
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// begin returns the configuration of a process that starts, and has it log as configured. It logs the warnings and the version of the
// program. Where a label of the node chooses the configuration file, sources follow that choice.
func (p Program) begin(ctx context.Context, sources *config.Sources, own *process) (config.Config, error) {
	early := sources.Early()
	own.logAs(early.LoggingFormat)
	if early.NodeConfig.Dir != "" {
		sources.Program = p.kind() // whatever runs: without a client it has no configuration
	}
	if p.Cluster != nil {
		sources.Chosen = p.Cluster.Choose(ctx, early)
	}
	c, warnings, err := config.Load(*sources)
	if err == nil {
		own.logAs(c.LoggingFormat)
	}
	log := klog.FromContext(ctx)
	if args := sources.Flags.Args(); len(args) > 0 {
		log.Info("Ignoring arguments", "arguments", args)
	}
	for _, w := range warnings {
		log.Info("Configuration warning", "warning", w.String())
	}
	if err == nil {
		log.Info("Starting", "program", p.Name, "version", version.String())
	}
	return c, err
}

// A daemon is everything that the running program consists of.
type daemon struct {
	config    config.Config // as it was at the start, for settings that need a restart
	watcher   *config.Watcher
	driver    *nvidia.Driver
	node      *simulator.Node // nil on a real node
	monitor   *monitor.Monitor
	directory *kubelet.Directory // nil when there is nothing to register with
	account   *kubelet.PodResources
	kubelets  *feed.Feed[uint64]   // the incarnation of the one that is there
	sockets   *feed.Feed[[]string] // beside its own
	set       *plugin.Set
	disk      *files.Disk // that of claims, as Allocate reads it
	mps       *mps.Prober
	readiness *agent.Readiness
	liveness  *agent.Liveness
	counters  *telemetry.Counters
	unheard   *feed.Feed[error] // why metrics are not served
	wishes    *migwish.Chooser  // nil where MIG layouts are not changed, as the next
	mig       *mig.Owner
	dra       *agent.DRA // nil where no GPU can be given by Dynamic Resource Allocation
	labels    *agent.Labels
	unlabeled *feed.Feed[error] // why the labels of the node are not as they are wanted
	asked     <-chan os.Signal  // signals to handle
	cluster   Cluster           // nil in a program that does not talk to the API server
}

func newDaemon(ctx context.Context, c config.Config, sources config.Sources, cluster Cluster) (*daemon, error) {
	d := &daemon{
		cluster:   cluster,
		config:    c,
		disk:      files.NewDisk(),
		watcher:   config.NewWatcher(sources, c, clock.RealClock{}),
		account:   kubelet.NewPodResources(c.PodResourcesSocket, clock.RealClock{}),
		kubelets:  feed.New(uint64(0)),
		sockets:   feed.New([]string(nil)),
		mps:       mps.NewProber(c.MPSRoot, clock.RealClock{}),
		counters:  telemetry.NewCounters(plugin.Causes()),
		unheard:   feed.New[error](nil),
		unlabeled: feed.New[error](nil),
	}
	driver, node, err := openNode(ctx, c, d.counters)
	if err != nil {
		return nil, err
	}
	d.driver, d.node = driver, node
	d.monitor = monitor.New(monitor.Options{
		Driver: driverOf{Driver: driver}, Policy: c.Health, StateDir: c.StateDir, BootID: bootID(d.node),
		Metrics: d.counters,
	})

	if c.MIG.Enabled {
		d.wishes = migwish.New(ctx, d.watcher.Configs(), c.StateDir, clock.RealClock{})
	}
	d.labels = &agent.Labels{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Make: labels.All, Machine: machineName, Now: time.Now,
		Wanted: feed.New[map[string]string](nil),
	}
	socket := c.KubeletSocket
	if socket == "" {
		klog.FromContext(ctx).Info("Not registering with kubelet: --kubelet-socket is empty")
		socket = config.DefaultKubeletSocket
	}
	directory, err := kubelet.NewDirectory(socket, clock.RealClock{})
	if err != nil {
		return nil, err
	}
	if c.KubeletSocket != "" {
		d.directory = directory
	}
	d.set = plugin.NewSet(plugin.Collaborators{
		Registrar: directory, Accountant: d.account, Connections: d.account.Connections, Checkpoint: directory.Checkpoint,
		Incarnation: d.kubelets, Sockets: d.sockets,
		Clock:     clock.RealClock{},
		Inspector: &agent.Inspector{Configs: d.watcher.Configs(), Monitor: d.monitor},
		Metrics:   d.counters,
		Elsewhere: d.elsewhere,
	})
	if d.dra = d.newDRA(ctx, c); d.dra != nil {
		d.labels.InUse = d.dra.Claims.InUse()
	}
	if d.wishes != nil {
		o := mig.Options{
			Wishes: d.wishes.Wishes(), Snapshots: d.monitor.Snapshots(), Driver: d.monitor, Evictor: cluster, StateDir: c.StateDir,
			BootID: bootID(d.node), Acquired: d.wishes.Reload,
		}
		if d.directory != nil {
			o.Users = d.set
			if d.dra != nil {
				o.Users = pluginUsers{d.set, d.dra.Owners, d.monitor.Snapshots()}
			}
		}
		if d.dra != nil {
			o.Elsewhere = d.dividedForClaims
		}
		if cluster != nil {
			o.Pauser = cluster
			o.Clients = func(minor int) ([]inventory.DriverClient, error) { return nvidia.Clients(nodeRoot(d.node), minor) }
		}
		d.mig = mig.New(o)
	}
	return d, nil
}

// dividedForClaims says why the MIG layout of a GPU, by UUID, is not made now; empty if it may be.
func (d *daemon) dividedForClaims(uuid string) string {
	if d.watcher.Configs().Value().DRA.DynamicMIG && d.dra.Owners.Value()[uuid] != dra.OwnedByPlugin {
		return "MIG devices are made of the GPU for claims: have the device plugin give it, or switch dra.dynamicMIG off"
	}
	return ""
}

// openNode returns the driver of the node that the configuration names, and the simulated node behind it, if it is one.
func openNode(ctx context.Context, c config.Config, m nvidia.Metrics) (*nvidia.Driver, *simulator.Node, error) {
	if c.Simulate == "" {
		return nvidia.New(nvidia.Options{DriverRoot: c.Driver.ContainerRoot, Metrics: m}), nil, nil
	}
	profile, err := simulator.Load(c.Simulate)
	if err != nil {
		return nil, nil, err
	}
	node := simulator.New(profile)
	klog.FromContext(ctx).Info("THE GPUS OF THIS NODE ARE SIMULATED: pods cannot use them", "profile", c.Simulate)
	return nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), Metrics: m}), node, nil
}

// bootID returns the boot ID of the simulated node, or of this one if that is nil; empty if it cannot be told.
func bootID(simulated *simulator.Node) string {
	text, err := fs.ReadFile(nodeRoot(simulated), "proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // then faults stand until a reading or an operator clears them
	}
	return strings.TrimSpace(string(text))
}

// nodeRoot returns the root folder of the simulated node, or of this one if that is nil.
func nodeRoot(simulated *simulator.Node) fs.FS {
	if simulated != nil {
		return simulated.Root()
	}
	return os.DirFS("/")
}

// driverOf gives the driver's sessions the type that the monitor asks for.
type driverOf struct{ *nvidia.Driver }

func (d driverOf) Open(ctx context.Context) (monitor.Session, error) {
	session, err := d.Driver.Open(ctx)
	if err != nil {
		return nil, err // not the nil *Session, which would be a Session
	}
	return session, nil
}

// tasks are all tasks of the daemon.
func (d *daemon) tasks() (observation, outputs []agent.Task) {
	observation, outputs = d.observation(), d.outputs()
	d.readiness = agent.NewReadiness(clock.RealClock{}, observation, outputs)
	d.liveness = agent.NewLiveness(observation, outputs)
	return observation, append(outputs, agent.Task{Name: "readiness", Run: d.readiness.Run})
}

// observation is the tasks that find out what the node has and what its operator wants.
func (d *daemon) observation() []agent.Task {
	tasks := []agent.Task{
		{Name: "configuration", Run: d.watcher.Run, Alive: d.watcher.Alive},
		{Name: "kernel log", Run: d.readKernelLog},
		{Name: "signals", Run: d.followSignals},
		{Name: "monitor", Run: d.monitor.Run, Alive: d.monitor.Alive},
		{Name: "first look", Run: func(ctx context.Context) error { return agent.CheckFirstLook(ctx, d.monitor, d.watcher.Configs()) }},
		{Name: "start", Run: func(ctx context.Context) error {
			return agent.LogStart(ctx, version.String(), d.monitor.Snapshots(), d.watcher.Configs())
		}},
		{Name: "health policy", Run: func(ctx context.Context) error { return agent.FollowHealth(ctx, d.monitor, d.watcher.Configs()) }},
		{Name: "driver", Run: func(ctx context.Context) error { return agent.FollowDriver(ctx, d.monitor) }},
	}
	if d.directory != nil {
		tasks = append(tasks, agent.Task{Name: "kubelet's directory", Run: d.watchKubelet, Alive: d.directory.Alive})
	}
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Observation(d.watcher.Configs(), bootID(d.node))...)
	}
	return tasks
}

// outputs are the tasks that act on it.
func (d *daemon) outputs() []agent.Task {
	plans := &offer.Loop{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Set: d.set, Specs: newSpecs(d.config.CDIDir),
		MPS: d.mps, Pulse: supervise.NewPulse(),
	}
	if d.mig != nil {
		plans.MIG = d.mig.Holds()
	}
	var owners *feed.Feed[dra.Owners]
	if d.dra != nil {
		owners = d.dra.Owners
		plans.Owners, plans.Followed = owners, d.dra.Offered
	}
	servers := agent.Task{Name: "plugin servers", Run: d.set.Run, Alive: d.set.Alive}
	if d.directory != nil {
		servers.Ready = (&agent.Serving{
			Configs: d.watcher.Configs(), Monitor: d.monitor, Offered: d.set.Offered(), Servers: d.set.Status,
			Others: others{d.account, d.directory}, Owners: owners,
		}).Ready
	}
	tasks := []agent.Task{
		servers,
		{Name: "MPS", Run: d.mps.Run},
		{Name: "plan", Run: plans.Run, Alive: plans.Pulse.Check},
	}
	tasks = append(tasks, d.draTasks()...)
	tasks = append(tasks, agent.Task{Name: "metrics", Run: d.serveMetrics}, agent.Task{Name: "labels", Run: d.labels.Run},
		agent.Task{Name: "feature file", Run: d.writeFeatures})
	if d.mig != nil {
		tasks = append(tasks, agent.Task{Name: "MIG wish", Run: d.wishes.Run},
			agent.Task{Name: "MIG", Run: d.mig.Run, Alive: d.mig.Alive})
	}
	if d.config.ControlSocket != "" {
		tasks = append(tasks, agent.Task{Name: "control socket", Run: d.serveControl})
	}
	if d.cluster != nil {
		tasks = append(tasks, d.cluster.Outputs(d.known())...)
	}
	return tasks
}

// known is what the tasks of the cluster work with.
func (d *daemon) known() agent.View {
	known := agent.View{
		Config: d.config, Configs: d.watcher.Configs(), ConfigErrors: d.watcher.Errors(),
		Labels: d.labels.Wanted, Unlabeled: d.unlabeled, Yields: d.yields,
		Snapshots: d.monitor.Snapshots(), Offered: d.set.Offered(), Status: d.status, Held: d.account.Held,
		DRA: d.dra, APIRequested: d.counters.APIRequested, EventDropped: d.counters.EventDropped,
	}
	if d.directory != nil {
		known.Checkpoint = d.directory.Checkpoint
	}
	if d.mig != nil {
		known.MIGWish, known.MIG = d.wishes, d.mig.Status()
	}
	return known
}

// close releases what the daemon has opened, after its end.
func (d *daemon) close() {
	if d.node != nil {
		d.node.Close()
	}
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
	return supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute}, server.Run)
}
