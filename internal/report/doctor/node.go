package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Spec is a CDI spec for devices of NVIDIA's, or a file in a folder of CDI specs that cannot be
// read.
type Spec struct {
	Path    string
	Problem string // why it cannot be read
	Kind    string // vendor and class, such as "nvidia.com/gpu"
	Devices []string
	// Absent are the files of the node that it names and that do not exist.
	Absent []string
	Named  int // how many files it names
}

// SELinux is the state of SELinux.
type SELinux struct {
	Enforces bool
	// Domain is the type of this process, such as container_t or unconfined_t.
	Domain string
	// Container says that doctor runs in a container.
	Container bool
	// UseDevices is the boolean container_use_devices; nil where the policy does not have it.
	UseDevices *bool
}

// Kubelet is what the folder of kubelet's device manager shows.
type Kubelet struct {
	Socket  string // kubelet's
	Problem string // of the folder; empty if it is there
	Refused string // why kubelet's socket does not accept a connection; empty if it does
	// Listening are the names of the sockets of GPU device plugins that accept connections.
	Listening []string
	// DRADrivers are the registration sockets of the DRA driver gpu.nvidia.com that accept
	// connections; none where their folder is not seen.
	DRADrivers []string
	// Registered counts the healthy devices of kubelet's checkpoint by resource; nil if it cannot be
	// read, as Unread says.
	Registered map[string]int
	Unread     string
}

// PodResourcesAnswer is the answer of kubelet's PodResources service.
type PodResourcesAnswer struct {
	Socket  string
	Devices int // that kubelet counts
	// Offered are the IDs of the devices that kubelet holds for healthy, and Held those that pods
	// hold.
	Offered map[string][]string // by resource
	Held    []GivenDevice
	Problem string // why there is no answer
}

// A GivenDevice is a device that a pod holds by a device plugin.
type GivenDevice struct{ Resource, ID, Pod string }

// Daemon is the running daemon.
type Daemon struct{ Status status.Status }

func cdiSpecs(f *NodeFacts, r *findings) {
	if !known(r, f.Specs) {
		return
	}
	inFiles := map[string][]string{} // by qualified name
	for _, s := range f.Specs.Value {
		own := strings.HasPrefix(s.Kind, f.Settings.CDIVendor+"/")
		switch {
		case s.Problem != "":
			r.warn("A CDI spec cannot be read", []string{s.Path + ": " + s.Problem}, "ls -l "+s.Path,
				"mv "+s.Path+" /root/   # if nothing needs it")
		case len(s.Absent) > 0:
			remedy := "nvidia-ctk cdi generate --output=" + s.Path
			if own {
				remedy = "kubectl -n kube-system rollout restart ds/gpu-device-plugin   # writes it anew"
			} else if !strings.HasPrefix(s.Kind, "nvidia.com/") {
				remedy = "grep -n cdiVersion " + s.Path + "   # belongs to " + s.Kind + "; its program has to write it anew"
			}
			r.warn(fmt.Sprintf("The CDI spec of %s is out of date: of the %s that it names, %d cannot be found",
				s.Kind, status.Count(s.Named, "file"), len(s.Absent)),
				[]string{s.Path, s.Absent[0] + " does not exist"}, remedy)
		}
		for _, d := range s.Devices {
			inFiles[s.Kind+"="+d] = append(inFiles[s.Kind+"="+d], s.Path)
		}
	}
	twice := map[string]string{} // files → a name that both have
	for _, name := range slices.Sorted(maps.Keys(inFiles)) {
		for i, file := range inFiles[name] {
			for _, other := range inFiles[name][:i] {
				if pair := other + " and " + file; folder(other) == folder(file) && twice[pair] == "" {
					twice[pair] = name
				}
			}
		}
	}
	for _, pair := range slices.Sorted(maps.Keys(twice)) {
		r.fail("Two CDI specs name the same device, so that runtimes know neither: "+twice[pair], []string{pair},
			"ls -l "+strings.ReplaceAll(pair, " and ", " ")+"   # keep the newer one")
	}
	if !r.found() {
		r.ok(status.Count(len(f.Specs.Value), "CDI spec") + " of NVIDIA's devices can be used")
	}
}

func folder(path string) string { return path[:strings.LastIndexByte(path, '/')+1] }

func selinux(f *NodeFacts, r *findings) {
	if !known(r, f.SELinux) {
		return
	}
	s := f.SELinux.Value
	if !s.Enforces {
		r.ok("SELinux does not enforce")
		return
	}
	evidence := []string{"/sys/fs/selinux/enforce: 1", "type of this process: " + cmp.Or(s.Domain, "none")}
	if s.Container && s.Domain == "container_t" {
		r.fail("SELinux enforces, and this container has the type container_t: it may not connect to kubelet's socket",
			evidence,
			"kubectl -n kube-system patch ds/gpu-device-plugin -p "+
				`'{"spec":{"template":{"spec":{"securityContext":{"seLinuxOptions":{"type":"spc_t"}}}}}}'`)
	}
	if s.UseDevices != nil && !*s.UseDevices {
		r.warn("SELinux enforces, and container_use_devices is off: containers may not open /dev/nvidia*, unless "+
			"these have the label container_file_t", append(evidence, "/sys/fs/selinux/booleans/container_use_devices: 0"),
			"setsebool -P container_use_devices on")
	}
	if !r.found() {
		r.ok("SELinux enforces, and was seen to forbid nothing", evidence...)
	}
}

func kubelet(f *NodeFacts, r *findings) {
	if !known(r, f.Kubelet) {
		return
	}
	k := f.Kubelet.Value
	if k.Problem != "" {
		r.fail("Kubelet's folder cannot be used: "+k.Problem, []string{k.Socket}, "systemctl status kubelet",
			"ls -l /var/lib/kubelet/device-plugins")
		return
	}
	if k.Refused != "" {
		r.fail("Kubelet does not answer: it does not run, or its socket is elsewhere", []string{k.Refused},
			"systemctl status kubelet", "journalctl -u kubelet -n 50")
	}
	var foreign []string
	for _, name := range k.Listening {
		if !strings.HasPrefix(name, "gpu-device-plugin-") {
			foreign = append(foreign, folder(k.Socket)+name)
		}
	}
	const pods = "kubectl get pods -A -o wide --field-selector spec.nodeName=NODE | grep -iE 'nvidia|gpu'"
	if len(foreign) > 0 {
		r.warn("Another device plugin for GPUs runs on this node: two plugins must not serve one resource", foreign, pods)
	}
	if len(k.DRADrivers) > 0 {
		r.fail("The DRA driver gpu.nvidia.com runs on this node, too: it and a device plugin can give one GPU to two pods",
			k.DRADrivers, pods, "kubectl get resourceslices --field-selector spec.driver=gpu.nvidia.com,spec.nodeName=NODE",
			"# let one of the two have no GPUs of this node: keep its DaemonSet off by a label of the node")
	}
	if k.Unread != "" {
		r.skip("Kubelet's checkpoint cannot be read: " + k.Unread)
	}
	for _, name := range slices.Sorted(maps.Keys(k.Registered)) {
		serves := func(s status.Resource) bool { return s.Name == name }
		if f.Daemon.Missing == "" && k.Registered[name] > 0 && strings.HasPrefix(name, "nvidia.com/") &&
			!slices.ContainsFunc(f.Daemon.Value.Status.Resources, serves) {
			r.warn("Kubelet counts "+status.Count(k.Registered[name], "healthy device")+" of "+name+
				", which this daemon does not serve",
				[]string{folder(k.Socket) + "kubelet_internal_checkpoint"}, pods)
		}
	}
	if !r.found() {
		r.ok("Kubelet answers, and no other device plugin for GPUs listens", k.Socket)
	}
}

func podResources(f *NodeFacts, r *findings) {
	if !known(r, f.PodResources) {
		return
	}
	switch p := f.PodResources.Value; {
	case p.Problem == "":
		r.ok("PodResources answers; kubelet counts " + status.Count(p.Devices, "device"))
	case f.Kubelet.Missing == "" && f.Kubelet.Value.Refused == "":
		r.warn("PodResources does not answer, and the end of a pod may be noticed late: "+p.Problem, []string{p.Socket},
			"ls -l "+p.Socket+"   # in a container: mount its folder")
	default:
		r.skip("PodResources does not answer, and neither does kubelet: " + p.Problem)
	}
}

// cures are the commands that end a fault, by what the daemon calls the cure. %s is the GPU's
// index.
var cures = map[inventory.Cure][]string{
	inventory.CureReset:     {"gpu-device-plugin quiesce", "nvidia-smi --gpu-reset -i %s", "gpu-device-plugin resume"},
	inventory.CureDrain:     {"gpu-device-plugin quiesce", "nvidia-smi --gpu-reset -i %s", "gpu-device-plugin resume"},
	inventory.CureDrainP2P:  {"gpu-device-plugin quiesce", "nvidia-smi --gpu-reset -i %s", "gpu-device-plugin resume"},
	inventory.CureReboot:    {"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", "systemctl reboot"},
	inventory.CureFabric:    {"systemctl restart nvidia-fabricmanager", "journalctl -u nvidia-fabricmanager -n 50"},
	inventory.CureIMEX:      {"systemctl restart nvidia-imex", "nvidia-imex-ctl -N"},
	inventory.CureReconnect: {"lspci -d 10de:", kernelMessages},
}

// withoutNodes are the remedies of a daemon whose container lacks device nodes of GPUs.
var withoutNodes = []string{
	"helm upgrade gpu-device-plugin … --reset-then-reuse-values --set hostDev=true",
	"kubectl get runtimeclass nvidia   # without hostDev: the daemon's pod needs runtimeClassName: nvidia",
}

// ill finds the GPUs and MIG devices that are not Healthy. Those that are so for one cause with one
// remedy are one finding.
func ill(s status.Status, r *findings) {
	type cause struct{ state, reason, cure, remedy string }
	var causes []cause
	devices := map[cause][]status.Device{}
	remedies := map[cause][]string{}
	for _, g := range s.GPUs {
		if g.State == inventory.Healthy.String() {
			continue
		}
		var remedy []string
		for _, command := range cures[inventory.Cure(g.Cure)] {
			remedy = append(remedy, strings.ReplaceAll(command, "%s", g.Index))
		}
		switch {
		case slices.ContainsFunc(s.Calls, func(c status.Call) bool { return c.GPU != nil && fmt.Sprint(*c.GPU) == g.Index }):
			remedy = []string{"gpu-device-plugin status   # shows whether the call has returned; before, the GPU " +
				"cannot be reset"}
		case strings.Contains(g.Reason, inventory.LacksDeviceNodes):
			remedy = withoutNodes
		case remedy == nil:
			remedy = []string{"gpu-device-plugin health clear --gpu " + g.UUID + "   # after the repair"}
		}
		c := cause{g.State, g.Reason, g.Cure, strings.Join(remedy, "\n")}
		if devices[c] == nil {
			causes, remedies[c] = append(causes, c), remedy
		}
		devices[c] = append(devices[c], g)
	}
	for _, c := range causes {
		var indices, evidence []string
		for _, g := range devices[c] {
			indices, evidence = append(indices, g.Index), append(evidence, g.UUID)
		}
		are := " is "
		if len(indices) > 1 {
			are = " are "
		}
		r.fail(status.GPUList(indices)+are+c.state+": "+cmp.Or(c.reason, "none"),
			append(evidence, "remedy: "+cmp.Or(c.cure, "none")), remedies[c]...)
	}
}

func daemon(f *NodeFacts, r *findings) {
	if !known(r, f.Daemon) {
		return
	}
	s := f.Daemon.Value.Status
	if s.Simulated != "" {
		r.info("The GPUs of this node are simulated: pods cannot use them", []string{"status: simulated: " + s.Simulated})
	}
	if s.Stale != "" {
		r.fail("The last look at the GPUs failed: "+s.Stale, nil, "gpu-device-plugin status", kernelMessages)
	}
	if s.ConfigError != "" {
		r.fail("The configuration file is not used as it is now: "+s.ConfigError, []string{s.ConfigFile},
			"gpu-device-plugin config check "+s.ConfigFile)
	}
	if s.Readiness.Reason != "" && !s.Readiness.Ready {
		r.fail("The daemon is not ready: "+s.Readiness.Reason, nil, "gpu-device-plugin ready --wait=20s")
	}
	if s.Quiet {
		r.warn("NVML is released by quiesce: new pods may get no GPU, and the faults of GPUs are not found",
			[]string{"status: quiet: true"}, "gpu-device-plugin resume")
	}
	for _, c := range s.Calls {
		call := c.Function
		if c.GPU != nil {
			call += fmt.Sprintf(" of GPU %d", *c.GPU)
		}
		r.fail("A call into the driver has not returned since "+status.Stamp(c.Since)+": "+call, nil, kernelMessages,
			"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data   # if the call does not return", "systemctl reboot")
	}
	ill(s, r)
	for _, served := range s.Resources {
		if served.Problem != "" {
			r.warn(served.Name+": "+served.Problem, []string{"server: " + served.Server},
				"journalctl -u kubelet -n 50 | grep -i device")
		}
	}
	lacking(s, r)
	if !r.found() {
		resources, gpus := status.Count(len(s.Resources), "resource"), status.Count(len(s.GPUs), "GPU")
		r.ok(fmt.Sprintf("The daemon serves %s of %s", resources, gpus), "version "+s.Version)
	}
}

// lacking has what the daemon says that has failed beside GPUs, and what it cannot offer, see or
// measure.
func lacking(s status.Status, r *findings) {
	for _, line := range s.NVSwitches {
		r.fail(line+", a fatal error: links of the node's GPUs have failed", []string{"status: nvswitches"},
			"journalctl -k | grep SXid",
			"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", "systemctl reboot")
	}
	for _, line := range slices.Concat(s.LeftOut, s.Unwatched, s.Warnings) {
		r.warn(line, nil, "gpu-device-plugin status")
	}
	for _, line := range s.MetricsAbsent {
		r.info(line, []string{"status: metricsAbsent"},
			"hostDev: true in the chart's values, or kubectl apply -k deployments/host-dev   # the container is privileged then")
	}
}

func mps(f *NodeFacts, r *findings) {
	const control = "nvidia-cuda-mps-control"
	const start = "kubectl -n kube-system get pods -l app.kubernetes.io/name=gpu-device-plugin-mps-control-daemon"
	runs := f.runs(control)
	for _, reason := range f.Daemon.Value.Status.MPS {
		r.fail(reason, nil, start)
	}
	switch {
	case r.found():
	case f.Settings.MPS && f.Daemon.Missing == "":
		r.ok("The MPS control daemons of all resources that are shared by MPS answer", "status: mps")
	case f.Settings.MPS && runs:
		r.ok("An MPS control daemon runs", "process "+control)
	case f.Settings.MPS:
		if known(r, f.Processes) {
			r.fail("GPUs are shared by MPS, and no MPS control daemon runs", []string{"no process " + control}, start)
		}
	case runs:
		r.info("An MPS control daemon runs, and the configuration does not share GPUs by MPS: GPUs in the compute "+
			"mode EXCLUSIVE_PROCESS refuse other work", []string{"process " + control}, "nvidia-smi --query-gpu=index,compute_mode --format=csv")
	default:
		r.ok("GPUs are not shared by MPS")
	}
}
