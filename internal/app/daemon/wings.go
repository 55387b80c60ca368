package daemon

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverswap"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repairer"
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

// A program has what the process was started with, and its configuration. All wings use it.
// Settings that follow the file come from watcher.Configs.
type program struct {
	startup      config.Startup
	watcher      *config.Watcher
	cluster      Cluster // nil in a program without a client of the API server
	signals      <-chan os.Signal
	extendEnd    func(time.Duration)
	reexecutions int
}

func newProgram(o Options) *program {
	return &program{
		startup: o.Config.Startup, watcher: config.NewWatcher(o.Sources, o.Config, clock.RealClock{}),
		cluster: o.Cluster, signals: o.Signals, extendEnd: o.ExtendEnd, reexecutions: o.Reexecutions,
	}
}

// leadership knows which process of the node acts.
type leadership struct{ lead *lead.Lead }

// newLeadership takes part in the leader election, in the kubelet's directory or else in the state
// directory. isBusy reports whether this process has calls into the driver or resets in progress.
func newLeadership(p *program, folder kubeletFolder, isBusy func() bool) *leadership {
	name, _ := os.Hostname() // in a pod, the pod's name
	o := lead.Options{Name: name + ", version " + version.String(), Token: kubelet.NewToken(), Busy: isBusy}
	switch {
	case folder.directory != nil:
		o.Dir = filepath.Join(folder.directory.Path(), leadFolder)
	case p.startup.StateDir != "":
		o.Dir = filepath.Join(p.startup.StateDir, leadFolder)
		_ = os.MkdirAll(p.startup.StateDir, 0o700) // the lead reports the error
	}
	return &leadership{lead.New(o)}
}

// A gpuWing reads the GPUs and judges their health.
type gpuWing struct {
	*program
	counters     *telemetry.Counters
	driver       *nvidia.Driver
	node         *simulator.Node // nil on a real node
	pci          *pciBus
	recorder     recording.Recorder
	switchFaults *feed.Feed[[]string] // fatal errors of NVSwitches
	monitor      *monitor.Monitor
}

// newGPUWing opens the driver, and returns the wing. The monitor changes its files only under the lead.
func newGPUWing(ctx context.Context, p *program, l *leadership, counters *telemetry.Counters) (*gpuWing, error) {
	w := &gpuWing{program: p, counters: counters, switchFaults: feed.New([]string(nil))}
	var err error
	if w.driver, w.node, err = OpenNode(ctx, p.startup, counters); err != nil {
		return nil, err
	}
	w.pci = &pciBus{root: nodeRoot(w.node)}
	w.recordFromStart(ctx)
	w.monitor = monitor.New(monitor.Options{
		Driver: w.recorder.Driver(driverOf{Driver: w.driver}), Policy: p.watcher.Configs().Value().Health,
		StateDir: p.startup.StateDir, BootID: BootID(w.node), Metrics: counters, Lead: l.lead.Check,
		While: func(ctx context.Context, task func(context.Context) error) error {
			return l.lead.While(ctx, "ledger", task)
		},
		Modes: &MIGModes{
			Configs: p.watcher.Configs(), DriverRoot: p.startup.Driver.ContainerRoot,
			SearchPath: p.startup.Driver.SearchPath, Node: w.node,
		},
	})
	p.watcher.JudgeOn(w.monitor.Snapshots().Value)
	return w, nil
}

func (w *gpuWing) observation() []Task {
	return []Task{
		{Name: "kernel log", Run: w.readKernelLog},
		{Name: "monitor", Run: w.monitor.Run, Alive: w.monitor.Alive},
		{Name: "first scan", Run: func(ctx context.Context) error {
			return CheckFirstLook(ctx, w.monitor, w.watcher.Configs())
		}},
		{Name: "start", Run: func(ctx context.Context) error {
			return LogStart(ctx, version.String(), w.monitor.Snapshots(), w.watcher.Configs())
		}},
		{Name: "health policy", Run: func(ctx context.Context) error {
			return FollowHealth(ctx, w.requests(), w.watcher.Configs())
		}},
		{Name: "driver", Run: func(ctx context.Context) error { return FollowDriver(ctx, w.monitor) }},
	}
}

// isDivided reports whether GPUs of the node are in MIG mode. The answer is unknown before
// the first scan.
func (w *gpuWing) isDivided() (divided, known bool) {
	s := w.monitor.Snapshots().Value()
	divided = slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return g.MIG == inventory.MIGEnabled })
	return divided, s.Driver != inventory.Driver{}
}

// A kubeletFolder is the directory with the kubelet's socket.
type kubeletFolder struct {
	folder    *kubelet.Directory
	directory *kubelet.Directory // folder, or nil if the daemon does not register
}

func newKubeletFolder(ctx context.Context, p *program) (f kubeletFolder, err error) {
	socket := p.startup.KubeletSocket
	if socket == "" {
		klog.FromContext(ctx).Info("Not registering with the kubelet: --kubelet-socket is empty")
		socket = config.DefaultKubeletSocket
	}
	if f.folder, err = kubelet.NewDirectory(socket, clock.RealClock{}); err == nil && p.startup.KubeletSocket != "" {
		f.directory = f.folder
	}
	return f, err
}

// A kubeletWing serves the kubelet, and reads its accounts.
type kubeletWing struct {
	*program
	kubeletFolder
	gpus     *gpuWing
	account  *kubelet.PodResources
	kubelets *feed.Feed[uint64]   // incarnation of the present kubelet
	sockets  *feed.Feed[[]string] // sockets beside the kubelet's
	mps      *mps.Prober          // the MPS control daemons, without which shared devices are not listed
	set      *serve.Servers
}

// newKubeletWing returns the wing with its plugin servers. mayGive returns why devices must not be
// allocated to a pod; nil if they may.
func newKubeletWing(
	p *program, f kubeletFolder, gpus *gpuWing, mayGive func([]resource.Device) error, counters *telemetry.Counters,
) *kubeletWing {
	w := &kubeletWing{
		program: p, kubeletFolder: f, gpus: gpus,
		account:  kubelet.NewPodResources(p.startup.PodResourcesSocket, clock.RealClock{}),
		kubelets: feed.New(uint64(0)), sockets: feed.New([]string(nil)),
		mps: mps.NewProber(p.startup.MPSRoot, clock.RealClock{}),
	}
	w.set = serve.NewServers(serve.Collaborators{
		Registrar: f.folder, Accountant: w.account, Connections: w.account.Connections,
		Checkpoint: f.folder.Checkpoint, CheckpointVersion: f.folder.CheckpointVersion,
		Incarnation: w.kubelets, Sockets: w.sockets, Clock: clock.RealClock{},
		Inspector: &Inspector{Configs: p.watcher.Configs(), Monitor: gpus.monitor}, Metrics: counters,
		MayGive: mayGive, ExtendEnd: p.extendEnd,
	})
	return w
}

func (w *kubeletWing) observation() []Task {
	if w.directory == nil {
		return nil
	}
	return []Task{{Name: "kubelet's directory", Run: w.watchKubelet, Alive: w.directory.Alive}}
}

// outputs returns the tasks that make the plan and serve it. The other wings withhold devices from
// the plan.
func (w *kubeletWing) outputs(c *claimsWing, m *migWing, maintenance *maintenanceWing) []Task {
	plans := &offer.Loop{
		Configs: w.watcher.Configs(), Snapshots: w.gpus.monitor.Snapshots(), Set: w.set,
		Specs: newSpecs(w.startup.CDIDir), MPS: w.mps, MIG: m.dividing, Owners: c.owners,
		Proofs: maintenance.proofs, Driver: maintenance.swaps.Status(), Pulse: supervise.NewPulse(),
	}
	if c.dra != nil {
		plans.Followed = c.dra.Offered
	}
	servers := Task{Name: "plugin servers", Run: w.set.Run, Alive: w.set.Alive}
	if w.directory != nil {
		serving := &Serving{
			Configs: w.watcher.Configs(), Monitor: w.gpus.monitor, Offered: w.set.Offered(), Servers: w.set.Status,
			Others: devicePlugins{w.account, w.directory}, Owners: c.owners,
			Leads: func() bool { return c.lead.Statuses().Value().Leads },
		}
		if c.dra != nil {
			serving.Waiting = func() []string { return c.allocation().Waiting() }
			serving.Returning = c.dra.Arbiter.Returning
		}
		servers.Ready = serving.Ready
	}
	return []Task{servers, {Name: "MPS", Run: w.mps.Run}, {Name: "plan", Run: plans.Run, Alive: plans.Pulse.Check}}
}

// watchKubelet publishes changes in the kubelet's directory.
func (w *kubeletWing) watchKubelet(ctx context.Context) error {
	if err := w.directory.Check(); err != nil {
		klog.FromContext(ctx).Info("Waiting for the kubelet", "reason", err.Error())
	}
	return w.directory.Watch(ctx, w.kubelets, w.sockets)
}

// listed returns the number of Healthy devices in the lists of the plugin servers, by resource.
func (w *kubeletWing) listed() map[string]int {
	devices := map[string]int{}
	for _, s := range w.set.Status() {
		devices[s.Resource] = s.Healthy
	}
	return devices
}

// A claimsWing serves GPUs by ResourceClaims.
type claimsWing struct {
	*program
	*leadership
	gpus           *gpuWing
	kubelet        *kubeletWing
	owners         *feed.Feed[dra.Owners] // nil until this process knows the owners
	dra            *DRA                   // nil if no GPU can be offered to claims
	driverNameKept string                 // why the driver's name differs from the configuration
}

// newClaimsWing returns the wing. inspect returns why a claim cannot have its devices now; nil if
// it can.
func newClaimsWing(
	ctx context.Context, p *program, l *leadership, gpus *gpuWing, served *kubeletWing,
	inspect func(context.Context, []resource.Device) error, counters *telemetry.Counters,
) *claimsWing {
	w := &claimsWing{program: p, leadership: l, gpus: gpus, kubelet: served, owners: feed.New(dra.Owners(nil))}
	w.dra = w.newDRA(ctx, inspect, counters)
	return w
}

// outputs returns the tasks that decide on the owner of each GPU, and maintain the devices of
// claims. The liveness probe does not judge the loop of the claims: the loop waits for the disk,
// and the device plugin serves without it.
func (w *claimsWing) outputs(shared *Shared) []Task {
	if w.dra == nil {
		return []Task{shared.Publisher(Task{Name: "owners of GPUs", Run: w.giveAll})}
	}
	return []Task{
		{Name: "claims", Run: w.dra.Claims.Run, Lead: true},
		{Name: "MIG devices of claims", Run: w.dra.Claims.Divide, Lead: true},
		shared.Publisher(Task{Name: "owners of GPUs", Run: w.dra.Arbiter.Run, Alive: w.dra.Arbiter.Alive}),
		{Name: "devices in slices", Run: w.dra.Devices.Run, Lead: true},
	}
}

// A migWing changes the MIG layouts of GPUs.
type migWing struct {
	*program
	*leadership
	gpus       *gpuWing
	kubelet    *kubeletWing
	claims     *claimsWing
	choice     *choice.Chooser                         // nil if the daemon does not change MIG layouts
	controller *mig.Controller                         // nil like choice
	dividing   *feed.Feed[map[string]resource.GPUHold] // by UUID of the GPU; its value is nil if layouts do not change
}

func newMIGWing(
	ctx context.Context, p *program, l *leadership, gpus *gpuWing, served *kubeletWing, c *claimsWing,
) *migWing {
	w := &migWing{program: p, leadership: l, gpus: gpus, kubelet: served, claims: c}
	if w.dividing = feed.New(map[string]resource.GPUHold(nil)); p.watcher.Configs().Value().MIG.Enabled {
		w.choice = choice.New(ctx, p.watcher.Configs(), p.startup.StateDir, l.lead.Check, gpus.isDivided,
			clock.RealClock{})
		w.controller = w.newController()
		w.dividing = w.controller.Holds()
	}
	return w
}

func (w *migWing) outputs(shared *Shared) []Task {
	if w.controller == nil {
		return nil
	}
	return []Task{
		{Name: "desired MIG layout", Run: w.choice.Run},
		shared.Publisher(Task{Name: "MIG", Run: w.controller.Run, Alive: w.controller.Alive}),
	}
}

// A maintenanceWing proves, resets and repairs GPUs, changes the driver, and requests restarts of the node.
type maintenanceWing struct {
	*program
	*leadership
	gpus    *gpuWing
	kubelet *kubeletWing
	claims  *claimsWing
	mig     *migWing
	proofs  *cudacheck.Proofs
	resets  *reset.Resets
	repairs *repairer.Repairs
	swaps   *driverswap.Swaps
}

func newMaintenanceWing(
	ctx context.Context, p *program, l *leadership, gpus *gpuWing, served *kubeletWing, c *claimsWing, m *migWing,
) *maintenanceWing {
	w := &maintenanceWing{program: p, leadership: l, gpus: gpus, kubelet: served, claims: c, mig: m}
	w.proofs, w.resets = w.newProofs(ctx), w.newResets()
	w.repairs, w.swaps = w.newRepairs(), w.newSwaps() // by resets and proofs
	return w
}

func (w *maintenanceWing) outputs(shared *Shared) []Task {
	return []Task{
		{Name: "CUDA results", Run: w.proofs.Follow},
		shared.Publisher(Task{Name: "CUDA checks", Run: w.proofs.Run}),
		{Name: "resets", Run: w.resets.Run, Lead: true},
		{Name: "repairs", Run: w.repairs.Run, Lead: true},
		{Name: "change of the driver", Run: w.swaps.Run, Lead: true},
		{Name: "restart request", Run: w.askForReboot, Lead: true},
	}
}

// A reportWing tells the operator what the daemon does.
type reportWing struct {
	progress       *status.Progress
	counters       *telemetry.Counters
	metricsProblem *feed.Feed[error] // why metrics are not served
	labels         *Labels           // created after the claims
	labelsProblem  *feed.Feed[error] // why the labels of the node are not as wanted
	readiness      *Readiness        // created with the tasks
	liveness       *Liveness         // created with the tasks
}

func newReportWing() *reportWing {
	return &reportWing{
		progress: status.NewProgress(time.Now()), counters: telemetry.NewCounters(serve.Causes()),
		metricsProblem: feed.New[error](nil), labelsProblem: feed.New[error](nil),
	}
}

// newLabels returns the labels of the node: of its GPUs, and of the claims that have them.
func newLabels(p *program, gpus *gpuWing, c *claimsWing) *Labels {
	l := &Labels{
		Configs: p.watcher.Configs(), Snapshots: gpus.monitor.Snapshots(), Make: labels.All, Machine: MachineName,
		Now: time.Now, Wanted: feed.New[map[string]string](nil),
	}
	if c.dra != nil {
		l.InUse = c.dra.Claims.InUse()
	}
	return l
}
