package nodefacts

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// The default sockets of container runtimes.
const (
	containerdSocket = "/run/containerd/containerd.sock"
	k3sSocket        = "/run/k3s/containerd/containerd.sock"
	k0sSocket        = "/run/k0s/containerd.sock"
	microK8sSocket   = "/var/snap/microk8s/common/run/containerd.sock"
	crioSocket       = "/run/crio/crio.sock"
	dockerdSocket    = "/run/cri-dockerd.sock"
)

// An endpoint is the socket at which the kubelet calls its container runtime, with the
// source of the fact.
type endpoint struct{ socket, source string }

// A candidate is a possible container runtime of the kubelet, with its socket.
type candidate struct {
	socket  string
	runtime func() doctor.Runtime
	// unlikely is why an unknown kubelet does not use the runtime.
	unlikely string
	title    string
}

// kubeletRuntime returns the kubelet's container runtime: the runtime at the kubelet's endpoint or,
// if the endpoint is unknown, the only running runtime.
func kubeletRuntime(r root) (doctor.Runtime, error) {
	running, err := processes(r)
	var candidates []candidate
	if err == nil {
		candidates = runningRuntimes(r, running)
	} else if candidates = installedRuntimes(r); len(candidates) == 0 {
		return doctor.Runtime{}, err
	}
	called, problem := kubeletEndpoint(r, running)
	if called.socket != "" {
		for _, c := range candidates {
			if sameFile(r, c.socket, called.socket) {
				one := c.runtime()
				one.Found = called.source
				return one, nil
			}
		}
		return doctor.Runtime{}, fmt.Errorf("%s, but no container runtime listens there%s",
			called.source, titles(candidates))
	}
	likely := slices.DeleteFunc(slices.Clone(candidates), func(c candidate) bool { return c.unlikely != "" })
	switch {
	case len(likely) == 1:
		return likely[0].runtime(), nil
	case problem != "" && len(candidates) > 0:
		return doctor.Runtime{}, errors.New(problem + titles(candidates))
	case len(likely) > 1:
		return doctor.Runtime{}, fmt.Errorf("no kubelet is visible to show which runtime it uses%s", titles(likely))
	case len(candidates) > 0:
		return doctor.Runtime{}, fmt.Errorf("no kubelet is visible, and %s", candidates[0].unlikely)
	}
	return doctor.Runtime{}, errors.New("neither containerd, CRI-O nor cri-dockerd is running")
}

// titles names the runtimes.
func titles(all []candidate) string {
	if len(all) == 0 {
		return ""
	}
	var names []string
	for _, c := range all {
		names = append(names, c.title)
	}
	return "; found: " + strings.Join(names, ", ")
}

// sameFile reports whether two paths lead to the same file of the node.
func sameFile(r root, a, b string) bool { return canonical(r, a) == canonical(r, b) }

// canonical resolves the symbolic links in a path as far as possible. /var/run is a link to /run.
func canonical(r root, name string) string {
	if resolved, _, err := r.Resolve(name); err == nil {
		return "/" + resolved
	}
	name = path.Clean(name)
	if below, has := strings.CutPrefix(name, "/var/run/"); has {
		return "/run/" + below
	}
	return name
}

// kubeletEndpoint returns the kubelet's endpoint. If the socket is empty, problem may have
// the reason.
func kubeletEndpoint(r root, running []process) (at endpoint, problem string) {
	byName := func(names ...string) (process, bool) {
		i := slices.IndexFunc(running, func(p process) bool { return slices.Contains(names, p.name) })
		if i < 0 {
			return process{}, false
		}
		return running[i], true
	}
	if p, runs := byName("kubelet"); runs {
		return endpointOf(r, p)
	}
	if p, runs := byName("kubelite"); runs {
		return microK8sEndpoint(r, p), ""
	}
	if p, runs := byName("k3s-server", "k3s-agent", "k3s"); runs {
		return k3sEndpoint(r, p), ""
	}
	if p, runs := byName("k0s"); runs {
		return endpoint{}, "k0s is running (process " + p.pid +
			"), but no kubelet is visible to show which container runtime it uses"
	}
	if len(running) > 0 { // the node runs no kubelet
		return endpoint{}, ""
	}
	const usual = "/var/lib/kubelet/config.yaml"
	if socket, err := endpointInFile(r, usual); err == nil && socket != "" {
		return endpoint{socket, usual + ": containerRuntimeEndpoint: unix://" + socket}, ""
	}
	return endpoint{}, ""
}

// endpointOf returns the endpoint of a kubelet from its flag, its file, the files of its
// folder, or the default.
func endpointOf(r root, p process) (endpoint, string) {
	const flag = "--container-runtime-endpoint"
	name := "the kubelet (process " + p.pid + ")"
	if len(p.args) == 0 || p.args[0] == "" {
		return endpoint{}, "the arguments of " + name + " cannot be read"
	}
	if value := p.flag(flag); value != "" {
		return endpoint{socketOf(value), name + " has " + flag + "=" + value}, ""
	}
	at := endpoint{containerdSocket, name + " uses unix://" + containerdSocket + ", which is the default"}
	files := []string{}
	if file := p.flag("--config"); file != "" {
		files = append(files, file)
	}
	if folder := p.flag("--config-dir"); folder != "" {
		files = append(files, r.Match(path.Join(folder, "*.conf"))...)
	}
	for _, file := range files {
		socket, err := endpointInFile(r, file)
		if err != nil {
			return endpoint{}, fmt.Sprintf("the configuration of %s cannot be read: %s: %v", name, file, err)
		}
		if socket != "" {
			at = endpoint{socket, file + ": containerRuntimeEndpoint: unix://" + socket}
		}
	}
	return at, ""
}

// endpointInFile returns the endpoint in a configuration file of a kubelet; empty if unset.
func endpointInFile(r root, file string) (string, error) {
	text, err := r.Read(file)
	if err != nil {
		return "", err
	}
	var config struct {
		Endpoint string `json:"containerRuntimeEndpoint"`
	}
	err = yaml.Unmarshal(text, &config)
	return socketOf(config.Endpoint), err
}

// socketOf returns the path of a socket from its URL.
func socketOf(url string) string { return strings.TrimPrefix(url, "unix://") }

// microK8sEndpoint returns the endpoint of MicroK8s' kubelet, from a file with the
// kubelet's arguments.
func microK8sEndpoint(r root, p process) endpoint {
	file := cmp.Or(p.flag("--kubelet-args-file"), "/var/snap/microk8s/current/args/kubelet")
	value := process{args: strings.Fields(r.Line(file))}.flag("--container-runtime-endpoint")
	if value == "" {
		return endpoint{microK8sSocket, "kubelite (process " + p.pid +
			") is the kubelet of MicroK8s, which uses its own containerd"}
	}
	return endpoint{socketOf(microK8sPath(value)), file + ": --container-runtime-endpoint=" + value}
}

// microK8sPath expands the variables of MicroK8s' files.
func microK8sPath(text string) string {
	return strings.NewReplacer("${SNAP_COMMON}", "/var/snap/microk8s/common", "${SNAP_DATA}",
		"/var/snap/microk8s/current").Replace(text)
}

// k3sEndpoint returns the endpoint of the kubelet in K3s. The arguments of K3s are not
// visible in its process, but in its unit and its files.
func k3sEndpoint(r root, p process) endpoint {
	const flag = "container-runtime-endpoint"
	name := "K3s (process " + p.pid + ")"
	options := map[string]any{}
	for _, file := range append([]string{"/etc/rancher/k3s/config.yaml"},
		r.Match("/etc/rancher/k3s/config.yaml.d/*.yaml")...) {
		text, err := r.Read(file)
		if err == nil {
			_ = yaml.Unmarshal(text, &options) // K3s would not run with an unreadable file
		}
	}
	socket, _ := options[flag].(string)
	isDocker, _ := options["docker"].(bool)
	for _, unit := range []string{"k3s", "k3s-agent"} {
		text := r.Line("/etc/systemd/system/" + unit + ".service")
		_, command, _ := strings.Cut(text, "ExecStart=")
		p.args = append(p.args, strings.Fields(strings.NewReplacer("'", "", `"`, "", "\\\n", " ").Replace(command))...)
	}
	socket = cmp.Or(p.flag("--"+flag), socket)
	isDocker = isDocker || slices.Contains(p.args, "--docker") || slices.Contains(p.args, "--docker=true")
	switch {
	case isDocker:
		return endpoint{dockerdSocket, name + " uses Docker: its option docker is set"}
	case socket != "":
		return endpoint{socketOf(socket), name + " has " + flag + ": " + socket}
	}
	return endpoint{k3sSocket, name + " uses its own containerd"}
}

// runningRuntimes returns the running container runtimes.
func runningRuntimes(r root, running []process) []candidate {
	runs := func(names ...string) bool {
		return slices.ContainsFunc(running, func(p process) bool { return slices.Contains(names, p.name) })
	}
	var all []candidate
	for _, p := range running {
		switch p.name {
		case "containerd":
			all = append(all, containerdCandidate(r, p, runs))
		case "crio":
			section, _, _, _ := crioFiles(r, p)
			listen, _ := section.table("api")["listen"].(string)
			all = append(all, candidate{
				socket:  socketOf(cmp.Or(p.flag("--listen"), listen, crioSocket)),
				title:   "CRI-O (process " + p.pid + ")",
				runtime: func() doctor.Runtime { return crio(r, p) },
			})
		case "cri-dockerd":
			all = append(all, dockerCandidate(r, running, p))
		}
	}
	// K3s includes cri-dockerd, which listens at the usual socket.
	if runs("k3s", "k3s-server", "k3s-agent") && runs("dockerd") && !runs("cri-dockerd") {
		c := dockerCandidate(r, running, process{})
		c.unlikely = "K3s uses Docker only if its option docker is set"
		all = append(all, c)
	}
	return all
}

func dockerCandidate(r root, running []process, adapter process) candidate {
	var engine process
	if i := slices.IndexFunc(running, func(p process) bool { return p.name == "dockerd" }); i >= 0 {
		engine = running[i]
	}
	socket := adapter.flag("--container-runtime-endpoint")
	if !strings.HasPrefix(socket, "unix://") && !strings.HasPrefix(socket, "/") { // systemd opened the socket
		socket = dockerdSocket
	}
	return candidate{socket: socketOf(socket), title: "Docker by cri-dockerd",
		runtime: func() doctor.Runtime { return docker(r, engine) }}
}

// containerdCandidate returns a running containerd.
func containerdCandidate(r root, p process, runs func(...string) bool) candidate {
	config := cmp.Or(p.flag("--config", "-c"), "/etc/containerd/config.toml")
	files, _ := containerdFilesOf(r, config)
	socket := p.flag("--address", "-a")
	for _, file := range files {
		grpc, _ := file.content.table("grpc")["address"].(string)
		server, _ := file.content.table("plugins").table("io.containerd.server.v1.grpc")["address"].(string)
		if address := cmp.Or(server, grpc); address != "" && p.flag("--address", "-a") == "" {
			socket = address
		}
	}
	c := candidate{socket: cmp.Or(socket, containerdSocket),
		title: "containerd with " + config + " (process " + p.pid + ")"}
	c.runtime = func() doctor.Runtime { return containerd(r, p, config, c.socket, runs) }
	one := c.runtime()
	off := len(one.Readings) > 0 && !slices.ContainsFunc(one.Readings,
		func(reading doctor.Reading) bool { return !reading.Disabled })
	switch {
	case strings.Contains(config, "/docker/") || strings.Contains(c.socket, "/docker/"):
		c.unlikely = c.title + " is Docker's own"
	case off && runs("dockerd", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s", "kubelite"):
		c.unlikely = "the CRI plugin of " + c.title + " is disabled"
	case strings.HasPrefix(canonical(r, c.socket), "/system/run/"), strings.Contains(c.socket, "/host-containerd/"):
		c.unlikely = c.title + " is for the system's own containers"
	}
	return c
}

// installed are the paths of containerd's configuration and socket, by distribution.
var installed = []struct{ config, socket string }{
	{"/etc/containerd/config.toml", containerdSocket},
	{"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", k3sSocket},
	{"/var/lib/rancher/rke2/agent/etc/containerd/config.toml", k3sSocket},
	{"/etc/k0s/containerd.toml", k0sSocket},
	{"/var/snap/microk8s/current/args/containerd.toml", microK8sSocket},
	{"/etc/cri/containerd.toml", containerdSocket},
}

// installedRuntimes returns the installed container runtimes, for nodes without visible processes.
func installedRuntimes(r root) []candidate {
	nobody := func(...string) bool { return false }
	var all []candidate
	sockets := map[string]bool{}
	for _, at := range installed {
		if r.Exists(at.config) || r.Exists(at.socket) && !sockets[at.socket] {
			sockets[at.socket] = true
			all = append(all, candidate{socket: at.socket, title: "containerd with " + at.config,
				runtime: func() doctor.Runtime {
					return containerd(r, process{}, at.config, at.socket, nobody)
				}})
		}
	}
	if slices.ContainsFunc([]string{"/etc/crio/crio.conf", "/etc/crio/crio.conf.d", crioSocket}, r.Exists) {
		all = append(all, candidate{socket: crioSocket, title: "CRI-O",
			runtime: func() doctor.Runtime { return crio(r, process{}) }})
	}
	return all
}

// containerd returns a containerd with its configuration.
func containerd(r root, p process, config, socket string, runs func(...string) bool) doctor.Runtime {
	c := doctor.Runtime{Name: doctor.Containerd, Config: config, Service: "containerd"}
	c.Distribution = distributionOf(r, config, socket, runs)
	switch c.Distribution {
	case doctor.K3s:
		c.Service = serviceOf(r, "k3s", "k3s-agent", runs("k3s-agent"))
	case doctor.RKE2:
		c.Service = serviceOf(r, "rke2-server", "rke2-agent", false)
	case doctor.K0s:
		c.Service = serviceOf(r, "k0scontroller", "k0sworker", false)
	default:
	}
	var files []configFile
	if p.flag("--config", "-c") != "" || r.Exists(config) {
		files, c.Problems = containerdFilesOf(r, config)
	}
	for _, file := range files {
		c.Files = append(c.Files, file.path)
	}
	c.Readings = readings(r, files, containerdVersionOf(r, p, c.Distribution))
	return c
}

// serviceOf returns the unit of a distribution with separate units for servers and agents.
func serviceOf(r root, server, agent string, isAgent bool) string {
	for _, folder := range []string{"/etc/systemd/system/", "/usr/local/lib/systemd/system/",
		"/usr/lib/systemd/system/"} {
		if r.Exists(folder+agent+".service") && !r.Exists(folder+server+".service") {
			isAgent = true
		}
	}
	if isAgent {
		return agent
	}
	return server
}

// distributionOf returns the distribution of a containerd with this configuration file and socket.
func distributionOf(r root, config, socket string, runs func(...string) bool) doctor.Distribution {
	name := r.Line("etc/os-release")
	if name == "" {
		name = r.Line("usr/lib/os-release")
	}
	system := ""
	for line := range strings.Lines(name) {
		if id, is := strings.CutPrefix(strings.TrimSpace(line), "ID="); is {
			system = strings.Trim(id, `"'`)
		}
	}
	switch socket = canonical(r, socket); {
	case strings.Contains(config, "/rke2/"), socket == k3sSocket && runs("rke2"):
		return doctor.RKE2
	case strings.Contains(config, "/k3s/"), socket == k3sSocket:
		return doctor.K3s
	case strings.Contains(config, "/k0s/"), socket == k0sSocket:
		return doctor.K0s
	case strings.HasPrefix(config, "/var/snap/microk8s/"):
		return doctor.MicroK8s
	case system == "talos", config == "/etc/cri/containerd.toml":
		return doctor.Talos
	case system == "bottlerocket":
		return doctor.Bottlerocket
	case system == "nixos", strings.HasPrefix(config, "/nix/store/"):
		return doctor.NixOS
	case system == "flatcar":
		return doctor.Flatcar
	case system == "cos":
		return doctor.COS
	}
	return doctor.Packages
}

// containerdPrograms are the paths of containerd, or of a program that includes
// containerd. Distributions in the map do not use the containerd of packages.
var containerdPrograms = map[doctor.Distribution][]string{
	doctor.Packages: {"/usr/bin/containerd", "/usr/local/bin/containerd", "/bin/containerd", "/opt/bin/containerd"},
	doctor.K3s:      {"/var/lib/rancher/k3s/data/current/bin/containerd"},
	doctor.RKE2:     {"/var/lib/rancher/rke2/bin/containerd"},
	doctor.K0s:      {"/var/lib/k0s/bin/containerd"},
	doctor.MicroK8s: {"/snap/microk8s/current/bin/containerd"},
	doctor.NixOS:    {"/run/current-system/sw/bin/containerd"},
}

// containerdVersionOf returns the version in containerd's program.
func containerdVersionOf(r root, p process, d doctor.Distribution) containerdVersion {
	var files []string
	if p.pid != "" {
		if program, err := r.Link("proc/" + p.pid + "/exe"); err == nil {
			files = append(files, program)
		}
	}
	if len(p.args) > 0 && path.IsAbs(p.args[0]) {
		files = append(files, p.args[0])
	}
	programs, own := containerdPrograms[d]
	if !own {
		programs = containerdPrograms[doctor.Packages]
	}
	for _, file := range append(files, programs...) {
		if v := containerdVersionAt(r, file); v.major > 0 {
			return v
		}
	}
	return containerdVersion{}
}
