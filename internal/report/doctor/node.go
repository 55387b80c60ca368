package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Spec is a CDI spec for NVIDIA's devices, or an unreadable file in a folder of CDI specs.
type Spec struct {
	Path    string
	Problem string // why the file is unreadable
	Kind    string // vendor and class, such as "nvidia.com/gpu"
	Devices []string
	// Absent are the files named by the spec that do not exist on the node.
	Absent []string
	Named  int // number of files named by the spec
}

// SELinux is the state of SELinux.
type SELinux struct {
	Enforces bool
	// Domain is the type of this process, such as container_t or unconfined_t.
	Domain string
	// Container is true if doctor runs in a container.
	Container bool
	// UseDevices is the boolean container_use_devices; nil if the policy does not define it.
	UseDevices *bool
}

// Kubelet is the state of the folder of the kubelet's device manager.
type Kubelet struct {
	Socket  string // the kubelet's socket
	Problem string // problem with the folder; empty if there is none
	Refused string // why the kubelet's socket refuses connections; empty if it accepts them
	// Listening are the names of the sockets of GPU device plugins that accept connections.
	Listening []string
	// DRADrivers are the registration sockets of the DRA driver gpu.nvidia.com that accept
	// connections; empty if their folder is not visible.
	DRADrivers []string
	// Registered counts the healthy devices in the kubelet's checkpoint by resource; nil if the
	// checkpoint cannot be read. Unread is then the reason.
	Registered map[string]int
	Unread     string
}

// PodResourcesAnswer is the answer of the kubelet's PodResources service.
type PodResourcesAnswer struct {
	Socket  string
	Devices int // number of devices known to the kubelet
	// Offered are the IDs of the devices that the kubelet considers healthy, and Held the devices
	// of pods.
	Offered map[string][]string // by resource
	Held    []HeldDevice
	Problem string // why there is no answer
}

// A HeldDevice is a device that a device plugin allocated to a pod.
type HeldDevice struct{ Resource, ID, Pod string }

// Daemon is the running daemon.
type Daemon struct{ Status status.Status }

func cdiSpecs(f *NodeFacts, r *findings) {
	if !require(r, f.Specs) {
		return
	}
	inFiles := map[string][]string{} // by qualified name
	for _, s := range f.Specs.Value {
		own := strings.HasPrefix(s.Kind, f.Settings.CDIVendor+"/")
		switch {
		case s.Problem != "":
			r.warn("cdi-spec-unreadable", "A CDI spec cannot be read", []string{s.Path + ": " + s.Problem},
				"ls -l "+s.Path, "mv "+s.Path+" /root/   # if nothing needs it")
		case len(s.Absent) > 0:
			commands := "nvidia-ctk cdi generate --output=" + s.Path
			if own {
				commands = "kubectl -n kube-system rollout restart ds/gpu-device-plugin   # writes the spec again"
			} else if !strings.HasPrefix(s.Kind, "nvidia.com/") {
				commands = "grep -n cdiVersion " + s.Path + "   # belongs to " + s.Kind +
					"; its program must write the spec again"
			}
			r.warn("cdi-spec-old", fmt.Sprintf("The CDI spec of %s is out of date: of its %s, %d cannot be found",
				s.Kind, wording.Count(s.Named, "file"), len(s.Absent)),
				[]string{s.Path, s.Absent[0] + " does not exist"}, commands)
		}
		for _, d := range s.Devices {
			inFiles[s.Kind+"="+d] = append(inFiles[s.Kind+"="+d], s.Path)
		}
	}
	twice := map[string]string{} // pair of files → a name in both
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
		r.fail("cdi-device-twice",
			"Two CDI specs name the same device, so container runtimes ignore both: "+twice[pair], []string{pair},
			"ls -l "+strings.ReplaceAll(pair, " and ", " ")+"   # keep the newer one")
	}
	if !r.hasProblem() {
		r.ok(wording.Count(len(f.Specs.Value), "CDI spec") + " for NVIDIA's devices can be used")
	}
}

func folder(path string) string { return path[:strings.LastIndexByte(path, '/')+1] }

func selinux(f *NodeFacts, r *findings) {
	if !require(r, f.SELinux) {
		return
	}
	s := f.SELinux.Value
	if !s.Enforces {
		r.ok("SELinux does not enforce")
		return
	}
	evidence := []string{"/sys/fs/selinux/enforce: 1", "type of this process: " + cmp.Or(s.Domain, "none")}
	if s.Container && s.Domain == "container_t" {
		r.fail("selinux-domain",
			"SELinux enforces, and this container has the type container_t: it cannot connect to the kubelet's socket",
			evidence,
			"kubectl -n kube-system patch ds/gpu-device-plugin -p "+
				`'{"spec":{"template":{"spec":{"securityContext":{"seLinuxOptions":{"type":"spc_t"}}}}}}'`)
	}
	if s.UseDevices != nil && !*s.UseDevices {
		r.warn("selinux-devices",
			"SELinux enforces, and container_use_devices is off: containers cannot open /dev/nvidia*, unless "+
				"the device nodes have the label container_file_t",
			append(evidence, "/sys/fs/selinux/booleans/container_use_devices: 0"),
			"setsebool -P container_use_devices on")
	}
	if !r.hasProblem() {
		r.ok("SELinux enforces, but blocks nothing that doctor checks", evidence...)
	}
}

func kubelet(f *NodeFacts, r *findings) {
	if !require(r, f.Kubelet) {
		return
	}
	k := f.Kubelet.Value
	if k.Problem != "" {
		r.fail("kubelet-folder",
			"The kubelet's folder cannot be used: "+k.Problem, []string{k.Socket}, "systemctl status kubelet",
			"ls -l /var/lib/kubelet/device-plugins")
		return
	}
	if k.Refused != "" {
		r.fail("kubelet-silent",
			"The kubelet does not answer: it is not running, or its socket is elsewhere", []string{k.Refused},
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
		r.warn("other-plugin",
			"Another device plugin for GPUs is running on this node: two plugins must not serve the same resource",
			foreign, pods)
	}
	if len(k.DRADrivers) > 0 {
		r.fail("other-dra-driver",
			"The DRA driver gpu.nvidia.com is also running on this node: the driver and a device plugin can "+
				"allocate one GPU to two pods",
			k.DRADrivers, pods, "kubectl get resourceslices --field-selector "+
				"spec.driver=gpu.nvidia.com,spec.nodeName=NODE",
			"# let only one of them have the GPUs of this node: keep the other's DaemonSet away by a node label")
	}
	if k.Unread != "" {
		r.skip("The kubelet's checkpoint cannot be read: " + k.Unread)
	}
	for _, name := range slices.Sorted(maps.Keys(k.Registered)) {
		serves := func(s status.Resource) bool { return s.Name == name }
		if f.Daemon.Missing == "" && k.Registered[name] > 0 && strings.HasPrefix(name, "nvidia.com/") &&
			!slices.ContainsFunc(f.Daemon.Value.Status.Resources, serves) {
			r.warn("kubelet-counts-differ",
				"The kubelet counts "+wording.Count(k.Registered[name], "healthy device")+" of "+name+
					", which this daemon does not serve",
				[]string{folder(k.Socket) + "kubelet_internal_checkpoint"}, pods)
		}
	}
	if !r.hasProblem() {
		r.ok("The kubelet answers, and no other device plugin for GPUs is running", k.Socket)
	}
}

func podResources(f *NodeFacts, r *findings) {
	if !require(r, f.PodResources) {
		return
	}
	switch p := f.PodResources.Value; {
	case p.Problem == "":
		r.ok("PodResources answers; the kubelet counts " + wording.Count(p.Devices, "device"))
	case f.Kubelet.Missing == "" && f.Kubelet.Value.Refused == "":
		r.warn("pod-resources-silent",
			"PodResources does not answer, so the end of a pod may be noticed late: "+p.Problem, []string{p.Socket},
			"ls -l "+p.Socket+"   # in a container: mount its folder")
	default:
		r.skip("Neither PodResources nor the kubelet answers: " + p.Problem)
	}
}

// resetCommand resets the GPU with the index %s.
const resetCommand = "gpu-device-plugin reset --gpu %s"

// remedyCommands are the commands for each remedy. %s is the GPU's
// index.
var remedyCommands = map[inventory.Remedy][]string{
	inventory.RemedyReset: {resetCommand},
	inventory.RemedyDrain: {resetCommand},
	inventory.RemedyDrainP2P: {"kubectl gpu list NODE   # delete the pods that use GPU %s together with other GPUs; " +
		"no reset is needed"},
	inventory.RemedyReboot:    {"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", "systemctl reboot"},
	inventory.RemedyFabric:    {"systemctl restart nvidia-fabricmanager", "journalctl -u nvidia-fabricmanager -n 50"},
	inventory.RemedyIMEX:      {"systemctl restart nvidia-imex", "nvidia-imex-ctl -N"},
	inventory.RemedyReconnect: {"lspci -d 10de:", kernelMessages},
}

// withoutNodes are the remedies for a daemon whose container lacks device nodes of GPUs.
var withoutNodes = []string{
	"helm upgrade gpu-device-plugin … --reset-then-reuse-values --set hostDev=true",
	"kubectl get runtimeclass nvidia   # without hostDev: the daemon's pod needs runtimeClassName: nvidia",
}

// unhealthyDevices finds the GPUs and MIG devices that are not Healthy. Devices with the same cause
// and remedy share a finding.
func unhealthyDevices(s status.Status, r *findings) {
	type cause struct{ state, reason, remedy, commands string }
	var causes []cause
	devices := map[cause][]status.Device{}
	commandsFor := map[cause][]string{}
	for _, g := range s.GPUs {
		if g.State == inventory.Healthy.String() || g.Reason != "" && g.Reason == s.Stale {
			continue // the reason of all GPUs is a finding of its own
		}
		var commands []string
		for _, command := range remedyCommands[inventory.Remedy(g.Remedy)] {
			commands = append(commands, strings.ReplaceAll(command, "%s", g.Index))
		}
		switch {
		case slices.ContainsFunc(s.Calls,
			func(c status.Call) bool { return c.GPU != nil && fmt.Sprint(*c.GPU) == g.Index }):
			commands = []string{"gpu-device-plugin status   # shows whether the call has returned; until then, the " +
				"GPU cannot be reset"}
		case strings.Contains(g.Reason, inventory.LacksDeviceNodes):
			commands = withoutNodes
		case commands == nil:
			commands = []string{"gpu-device-plugin health clear --gpu " + g.UUID + "   # after the repair"}
		}
		c := cause{g.State, g.Reason, g.Remedy, strings.Join(commands, "\n")}
		if devices[c] == nil {
			causes, commandsFor[c] = append(causes, c), commands
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
		r.fail("gpu-not-healthy", status.GPUList(indices)+are+c.state+": "+cmp.Or(c.reason, "none"),
			append(evidence, "remedy: "+cmp.Or(c.remedy, "none")), commandsFor[c]...)
	}
}

func daemon(f *NodeFacts, r *findings) {
	if !require(r, f.Daemon) {
		return
	}
	s := f.Daemon.Value.Status
	if s.Simulated != "" {
		r.info("gpus-simulated",
			"The GPUs of this node are simulated: pods cannot use them", []string{"status: simulated: " + s.Simulated})
	}
	if s.Stale != "" && !s.Quiet {
		r.fail("scan-failed", "The last scan of the GPUs failed: "+s.Stale, nil, "gpu-device-plugin status",
			kernelMessages)
	}
	if s.ConfigError != "" {
		r.fail("config-not-in-use",
			"The configuration file as it is now is not in use: "+s.ConfigError, []string{s.ConfigFile},
			"gpu-device-plugin config check "+s.ConfigFile)
	}
	if s.Readiness.Reason != "" && !s.Readiness.Ready {
		r.fail("daemon-not-ready",
			"The daemon is not ready: "+s.Readiness.Reason, nil, "gpu-device-plugin ready --wait=20s")
	}
	if s.Quiet && !s.IsChangingDriver() {
		r.warn("quiesced", "the driver is released: new pods may get no GPU, and faults of GPUs are not found",
			[]string{"status: quiet: true"}, "gpu-device-plugin resume")
	}
	for _, c := range s.Calls {
		call := c.Function
		if c.GPU != nil {
			call += fmt.Sprintf(" of GPU %d", *c.GPU)
		}
		r.fail("driver-call-hangs",
			"A driver call has not returned since "+status.Stamp(c.Since)+": "+call, nil, kernelMessages,
			"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data   # if the call does not return",
			"systemctl reboot")
	}
	unhealthyDevices(s, r)
	for _, served := range s.Resources {
		if served.Problem != "" {
			r.warn("resource-not-served", served.Name+": "+served.Problem, []string{"server: " + served.Server},
				"journalctl -u kubelet -n 50 | grep -i device")
		}
	}
	reportedProblems(s, r)
	layout(s.MIG, r)
	if state := s.Summary.State; !r.hasWarning() && state != "" && state != status.AllServed &&
		state != status.Starting {
		r.warn("daemon-degraded", "The daemon is "+state+": "+s.Summary.Text, nil, "gpu-device-plugin status")
	}
	if !r.hasProblem() {
		resources, gpus := wording.Count(len(s.Resources), "resource"), wording.Count(len(s.GPUs), "GPU")
		r.ok(fmt.Sprintf("The daemon serves %s of %s", resources, gpus), "version "+s.Version)
	}
}

// reportedProblems finds the daemon's reports of failures outside of GPUs, and of missing devices,
// events and metrics.
func reportedProblems(s status.Status, r *findings) {
	for _, line := range s.NVSwitches {
		r.fail("nvswitch-fatal",
			line+", a fatal error: NVLinks of the node's GPUs have failed", []string{"status: nvswitches"},
			"journalctl -k | grep SXid",
			"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", "systemctl reboot")
	}
	for _, line := range slices.Concat(s.LeftOut, s.Unwatched, s.Warnings) {
		r.warn("daemon-warning", line, nil, "gpu-device-plugin status")
	}
	for _, line := range status.Held(s.Holds) {
		r.warn("not-offered-yet", "Not offered to pods yet: "+line, []string{"status: holds"},
			"gpu-device-plugin status")
	}
	for _, output := range []struct{ what, problem string }{
		{"Metrics are not served", s.MetricsError}, {"The labels of the node are not written", s.LabelsError},
		{"The API server is not reached", s.APIServerError},
	} {
		if output.problem != "" {
			r.warn("output-failed", output.what+": "+output.problem, nil, "gpu-device-plugin status")
		}
	}
	for _, line := range s.MetricsAbsent {
		r.info("metrics-absent", line, []string{"status: metricsAbsent"},
			"hostDev: true in the chart's values, or kubectl apply -k deployments/host-dev   # makes the container "+
				"privileged")
	}
}

// layout finds a MIG layout that the node does not have.
func layout(m *status.MIGLayout, r *findings) {
	if m == nil || m.Layout == "" || m.State == "success" {
		return
	}
	evidence := []string{"layout named by " + m.From, "status: mig.state: " + m.State}
	text := "The MIG layout " + m.Layout + " is " + m.State
	if m.Reason != "" {
		text += ": " + m.Reason
	}
	if m.State == "failed" {
		r.fail("mig-layout-failed", text, evidence, "gpu-device-plugin mig status")
		return
	}
	r.info("mig-layout-pending", text, evidence, "gpu-device-plugin mig status")
}

func mps(f *NodeFacts, r *findings) {
	const control = "nvidia-cuda-mps-control"
	const start = "kubectl -n kube-system get pods -l app.kubernetes.io/name=gpu-device-plugin-mps-control-daemon"
	runs := f.runs(control)
	for _, reason := range f.Daemon.Value.Status.MPS {
		r.fail("mps-daemon-silent", reason, nil, start)
	}
	switch {
	case r.hasProblem():
	case f.Settings.MPS && f.Daemon.Missing == "":
		r.ok("The MPS control daemons of all resources that are shared by MPS answer", "status: mps")
	case f.Settings.MPS && runs:
		r.ok("An MPS control daemon is running", "process "+control)
	case f.Settings.MPS:
		if require(r, f.Processes) {
			r.fail("mps-daemon-off",
				"GPUs are shared by MPS, but no MPS control daemon is running",
				[]string{"no process " + control}, start)
		}
	case runs:
		r.info("mps-daemon-unused",
			"An MPS control daemon is running, but the configuration does not share GPUs by MPS: GPUs in the "+
				"compute mode EXCLUSIVE_PROCESS refuse other work", []string{"process " + control},
			"nvidia-smi --query-gpu=index,compute_mode --format=csv")
	default:
		r.ok("GPUs are not shared by MPS")
	}
}
