package daemon

import (
	"context"
	"os"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repair"
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

// A program has what the process was started with, and its configuration.
type program struct {
	startup      config.Startup
	watcher      *config.Watcher
	cluster      Cluster // nil in a program without a client of the API server
	signals      <-chan os.Signal
	extendEnd    func(time.Duration)
	reexecutions int
}

func newProgram(o Options) program {
	return program{
		startup: o.Config.Startup, watcher: config.NewWatcher(o.Sources, o.Config, clock.RealClock{}),
		cluster: o.Cluster, signals: o.Signals, extendEnd: o.ExtendEnd, reexecutions: o.Reexecutions,
	}
}

// A gpuWing reads the GPUs and judges their health.
type gpuWing struct {
	driver       *nvidia.Driver
	node         *simulator.Node // nil on a real node
	pci          *pciBus
	recorder     recording.Recorder
	switchFaults *feed.Feed[[]string] // fatal errors of NVSwitches
	monitor      *monitor.Monitor
}

// open creates the wing without its monitor, which needs the lead.
func (w *gpuWing) open(ctx context.Context, c config.Startup, counters *telemetry.Counters) (err error) {
	w.switchFaults = feed.New([]string(nil))
	if w.driver, w.node, err = OpenNode(ctx, c, counters); err != nil {
		return err
	}
	w.pci = &pciBus{root: nodeRoot(w.node)}
	return nil
}

func (d *daemon) newMonitor() *monitor.Monitor {
	return monitor.New(monitor.Options{
		Driver: d.recorder.Driver(driverOf{Driver: d.driver}), Policy: d.watcher.Configs().Value().Health,
		StateDir: d.startup.StateDir, BootID: BootID(d.node), Metrics: d.counters, Lead: d.lead.Check,
		While: func(ctx context.Context, task func(context.Context) error) error {
			return d.lead.While(ctx, "ledger", task)
		},
		Modes: &MIGModes{
			Configs: d.watcher.Configs(), DriverRoot: d.startup.Driver.ContainerRoot,
			SearchPath: d.startup.Driver.SearchPath, Node: d.node,
		},
	})
}

// A kubeletWing serves the kubelet, and reads its accounts.
type kubeletWing struct {
	folder    *kubelet.Directory
	directory *kubelet.Directory // folder, or nil if the daemon does not register
	account   *kubelet.PodResources
	kubelets  *feed.Feed[uint64]   // incarnation of the present kubelet
	sockets   *feed.Feed[[]string] // sockets beside the kubelet's
	set       *serve.Servers
	mps       *mps.Prober // the MPS control daemons, without which shared devices are not listed
}

// newKubeletWing returns the wing without its servers, which need the monitor.
func newKubeletWing(ctx context.Context, c config.Startup) (kubeletWing, error) {
	socket := c.KubeletSocket
	if socket == "" {
		klog.FromContext(ctx).Info("Not registering with the kubelet: --kubelet-socket is empty")
		socket = config.DefaultKubeletSocket
	}
	folder, err := kubelet.NewDirectory(socket, clock.RealClock{})
	if err != nil {
		return kubeletWing{}, err
	}
	w := kubeletWing{
		folder: folder, account: kubelet.NewPodResources(c.PodResourcesSocket, clock.RealClock{}),
		kubelets: feed.New(uint64(0)), sockets: feed.New([]string(nil)),
		mps: mps.NewProber(c.MPSRoot, clock.RealClock{}),
	}
	if c.KubeletSocket != "" {
		w.directory = folder
	}
	return w, nil
}

// newSet returns the plugin servers.
func (d *daemon) newSet() *serve.Servers {
	return serve.NewServers(serve.Collaborators{
		Registrar: d.folder, Accountant: d.account, Connections: d.account.Connections,
		Checkpoint: d.folder.Checkpoint, CheckpointVersion: d.folder.CheckpointVersion,
		Incarnation: d.kubelets, Sockets: d.sockets, Clock: clock.RealClock{},
		Inspector: &Inspector{Configs: d.watcher.Configs(), Monitor: d.monitor}, Metrics: d.counters,
		MayGive: d.mayGive, ExtendEnd: d.extendEnd,
	})
}

// A leadership decides which process of the node acts, and sends its decisions to the others.
type leadership struct {
	lead   *lead.Lead
	shared *Shared
}

// A migWing changes the MIG layouts of GPUs.
type migWing struct {
	migChoice *choice.Chooser                         // nil if the daemon does not change MIG layouts; mig also
	mig       *mig.Controller                         // created after the claims, which divide GPUs as well
	dividing  *feed.Feed[map[string]resource.GPUHold] // by UUID of the GPU; nil if no process changes layouts
}

// newMIGChoice returns the wing without its controller.
func (d *daemon) newMIGChoice(ctx context.Context) migWing {
	w := migWing{dividing: feed.New(map[string]resource.GPUHold(nil))}
	if d.watcher.Configs().Value().MIG.Enabled {
		w.migChoice = choice.New(ctx, d.watcher.Configs(), d.startup.StateDir, d.lead.Check, d.isDivided,
			clock.RealClock{})
	}
	return w
}

// A claimsWing serves GPUs by ResourceClaims.
type claimsWing struct {
	owners         *feed.Feed[dra.Owners] // nil until this process knows the owners
	dra            *DRA                   // nil if no GPU can be offered to claims
	driverNameKept string                 // why the driver's name differs from the configuration
}

func newClaimsWing() claimsWing {
	return claimsWing{owners: feed.New(dra.Owners(nil))}
}

// A maintenanceWing proves, resets and repairs GPUs.
type maintenanceWing struct {
	proofs  *cudacheck.Proofs
	resets  *reset.Resets
	repairs *repair.Repairs
}

// A reportWing tells the operator what the daemon does.
type reportWing struct {
	progress       *status.Progress
	counters       *telemetry.Counters
	metricsProblem *feed.Feed[error] // why metrics are not served
	labels         *Labels
	labelsProblem  *feed.Feed[error] // why the labels of the node are not as wanted
	readiness      *Readiness        // created with the tasks
	liveness       *Liveness         // created with the tasks
}

// newReportWing returns the wing without its labels, which need the monitor.
func newReportWing() reportWing {
	return reportWing{
		progress: status.NewProgress(time.Now()), counters: telemetry.NewCounters(serve.Causes()),
		metricsProblem: feed.New[error](nil), labelsProblem: feed.New[error](nil),
	}
}

func newLabels(configs *feed.Feed[config.Config], snapshots *feed.Feed[inventory.Snapshot]) *Labels {
	return &Labels{
		Configs: configs, Snapshots: snapshots, Make: labels.All, Machine: MachineName, Now: time.Now,
		Wanted: feed.New[map[string]string](nil),
	}
}
