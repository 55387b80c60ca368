package nodefacts

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// cdiFolders are the runtimes' folders of CDI specs. Later folders have precedence.
var cdiFolders = []string{"/etc/cdi", "/var/run/cdi"}

// A cdiSpec is the part of a CDI spec that doctor reads.
type cdiSpec struct {
	Kind    string    `json:"kind"`
	Devices []cdiPart `json:"devices"`
	cdiPart
}

type cdiPart struct {
	Name  string `json:"name"`
	Edits struct {
		DeviceNodes []cdiFile `json:"deviceNodes"`
		Mounts      []cdiFile `json:"mounts"`
	} `json:"containerEdits"`
}

type cdiFile struct {
	Path     string `json:"path"`
	HostPath string `json:"hostPath"`
}

// specs returns the CDI specs for NVIDIA's devices, and unreadable files.
func specs(r root) ([]doctor.Spec, error) {
	if !r.Exists("etc") {
		return nil, errors.New("/etc does not exist")
	}
	var all []doctor.Spec
	for _, folder := range cdiFolders {
		names, err := r.List(folder)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a missing folder is no problem for runtimes
			all = append(all, doctor.Spec{Path: folder, Problem: err.Error()})
		}
		for _, name := range names {
			if ext := path.Ext(name); ext != ".json" && ext != ".yaml" {
				continue
			}
			if s := readSpec(r, path.Join(folder, name)); s.Problem != "" || strings.Contains(s.Kind, "nvidia.com/") {
				all = append(all, s)
			}
		}
	}
	return all, nil
}

func readSpec(r root, file string) doctor.Spec {
	s := doctor.Spec{Path: file}
	text, err := r.Read(file)
	var spec cdiSpec
	if err == nil {
		err = yaml.Unmarshal(text, &spec)
	}
	if err == nil && spec.Kind == "" {
		err = errors.New("has no kind")
	}
	if err != nil {
		s.Problem = err.Error()
		return s
	}
	s.Kind = spec.Kind
	var named []string
	for _, part := range append(spec.Devices, spec.cdiPart) {
		if part.Name != "" {
			s.Devices = append(s.Devices, part.Name)
		}
		for _, n := range part.Edits.DeviceNodes {
			n.HostPath = cmp.Or(n.HostPath, n.Path)
			named = append(named, n.HostPath)
		}
		for _, m := range part.Edits.Mounts {
			named = append(named, m.HostPath)
		}
	}
	slices.Sort(named)
	named = slices.Compact(named)
	s.Named = len(named)
	for _, file := range named {
		if !r.Exists(file) {
			s.Absent = append(s.Absent, file)
		}
	}
	return s
}

// selinux returns the state of SELinux, and the type of this process.
func (p Places) selinux(kernel root) (doctor.SELinux, error) {
	if !kernel.Exists("sys") {
		return doctor.SELinux{}, errors.New("/sys does not exist")
	}
	if p.Host == nil && !kernel.Exists("sys/fs/selinux/enforce") {
		return doctor.SELinux{}, errors.New("this container has no /sys/fs/selinux. " + p.Hidden)
	}
	s := doctor.SELinux{Enforces: kernel.Line("sys/fs/selinux/enforce") == "1", Container: p.Container != nil}
	if label := strings.Split(strings.Trim(kernel.Line("proc/self/attr/current"), "\x00"), ":"); len(label) > 2 {
		s.Domain = label[2]
	}
	if boolean := kernel.Line("sys/fs/selinux/booleans/container_use_devices"); boolean != "" {
		on := strings.HasPrefix(boolean, "1")
		s.UseDevices = &on
	}
	return s, nil
}

// dialTimeout limits a connection to the kubelet.
const dialTimeout = time.Second

// kubeletFolder reads the folder of the kubelet's socket.
func kubeletFolder(ctx context.Context, socket string) (doctor.Kubelet, error) {
	k := doctor.Kubelet{Socket: socket}
	directory, err := kubelet.NewDirectory(socket, clock.RealClock{})
	if err != nil {
		return k, err
	}
	if err := directory.Check(); err != nil {
		k.Problem = err.Error()
		return k, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err == nil {
		_ = conn.Close() // nothing was sent
	} else {
		k.Refused = err.Error()
	}
	k.Listening = directory.Listening(ctx)
	k.DRADrivers = draDrivers(ctx, path.Join(path.Dir(path.Dir(socket)), "plugins_registry"))
	saved, err := directory.Checkpoint()
	if err != nil {
		k.Unread = err.Error()
		return k, nil
	}
	k.Registered = map[string]int{}
	for name, ids := range saved.Healthy {
		k.Registered[name] = len(ids)
	}
	return k, nil
}

// draDrivers returns the registration sockets that accept connections, of all instances of the DRA
// driver for GPUs. A killed driver leaves its socket behind.
func draDrivers(ctx context.Context, registry string) []string {
	sockets, _ := filepath.Glob(path.Join(registry, "gpu.nvidia.com*.sock")) // the pattern is well-formed
	return slices.DeleteFunc(sockets, func(socket string) bool {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err == nil {
			_ = conn.Close() // nothing was sent
		}
		return err != nil
	})
}

// podResources asks the kubelet's PodResources service for its devices.
func podResources(ctx context.Context, socket string, host fs.FS) (doctor.PodResourcesAnswer, error) {
	client := kubelet.NewPodResources(socket, clock.RealClock{})
	defer func() { _ = client.Close() }() // used for reading only
	p := doctor.PodResourcesAnswer{Socket: socket}
	all, err := client.Allocatable(ctx)
	if err != nil {
		p.Problem = cmp.Or(client.Missing(host), err.Error())
	}
	p.Offered = all
	for _, ids := range all {
		p.Devices += len(ids)
	}
	held, err := client.Held(ctx)
	if err != nil && p.Problem == "" {
		p.Problem = err.Error()
	}
	for _, d := range held {
		p.Held = append(p.Held, doctor.HeldDevice{Resource: d.Resource, ID: d.ID, Pod: d.Pod})
	}
	return p, nil
}
