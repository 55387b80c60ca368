package driverfacts

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Limits for reading processes.
const (
	maxComm      = 15      // characters of a process's name that the kernel keeps
	maxDevices   = 64      // device nodes named for one process
	maxOpenFiles = 1 << 16 // of one process
	maxMaps      = 8 << 20 // bytes of the memory maps of one process
	readers      = 8       // processes read at the same time
)

// services are the driver's own services, by the names of their processes.
var services = []string{"nvidia-persiste", "nv-fabricmanage", "nvidia-imex", "nv-hostengine", "dcgm-exporter",
	"nvidia-cuda-mps",
	"nvidia-powerd", "nvsm_core", "nvsm"}

// A reading is what was read of a process.
type reading struct {
	process preflight.Process
	user    bool // the process uses the driver
	closed  bool // its open files could not be read
	unread  bool // the process is still being read by an earlier reading, or the time was over
}

// Readers are the reads of processes that have not returned. A process that hangs in the kernel is read
// by one goroutine only, however often its node is read. The zero value is ready.
type Readers struct {
	mu   sync.Mutex
	pids map[int]bool
}

// begin reports whether a process may be read: no earlier read is running.
func (r *Readers) begin(pid int) bool {
	if r == nil {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pids[pid] {
		return false
	}
	if r.pids == nil {
		r.pids = map[int]bool{}
	}
	r.pids[pid] = true
	return true
}

func (r *Readers) end(pid int) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pids, pid)
}

// processes returns the processes that use the driver. Reads of one process may hang, as its memory
// maps do while it hangs in the kernel; they are given up when ctx ends.
func processes(ctx context.Context, host root, running *Readers) (fact diagnosis.Fact[preflight.Processes]) {
	names, err := host.List("proc")
	if err != nil {
		fact.Missing = "Cannot read the node's processes: " + err.Error()
		return fact
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		fact.Missing = "Cannot read the node's processes: /proc has none"
		return fact
	}
	work, results := make(chan int), make(chan reading, len(pids)) // a late result blocks nobody
	go func() {
		defer close(work)
		for _, pid := range pids {
			select {
			case work <- pid:
			case <-ctx.Done():
				return
			}
		}
	}()
	for range readers {
		go func() {
			for pid := range work {
				r := reading{process: preflight.Process{PID: pid}, unread: true}
				if running.begin(pid) {
					r = readProcess(ctx, host, pid)
					r.unread = ctx.Err() != nil // its open files may not be complete
					running.end(pid)
				}
				results <- r
			}
		}()
	}
	fact.Value.Number = len(pids)
	read := map[int]bool{}
	for range pids {
		select {
		case r := <-results:
			read[r.process.PID] = !r.unread
			if r.closed {
				fact.Value.Closed++
			}
			if r.user {
				fact.Value.Users = append(fact.Value.Users, r.process)
			}
			continue
		case <-ctx.Done():
		}
		break
	}
	for _, pid := range pids {
		if !read[pid] {
			fact.Value.Unread = append(fact.Value.Unread, pid)
		}
	}
	nameContainers(host, fact.Value.Users)
	return fact
}

var (
	podInCgroup = regexp.MustCompile(
		`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})`)
	containerInCgroup = regexp.MustCompile(`[0-9a-f]{64}`)
)

func readProcess(ctx context.Context, host root, pid int) reading {
	folder := "proc/" + strconv.Itoa(pid)
	r := reading{process: preflight.Process{PID: pid}}
	devices, err := openDevices(ctx, host.FS, folder)
	r.closed = isClosed(err)
	r.process.Devices = devices
	library, err := mapsLibrary(host, folder)
	r.closed = r.closed || isClosed(err)
	r.process.Library = library
	r.user = len(devices) > 0 || library
	if !r.user && !r.closed {
		return r
	}
	name := host.Line(folder + "/comm")
	r.process.Name = name[:min(len(name), 64)]
	if !r.user && slices.ContainsFunc(services, func(s string) bool { return strings.HasPrefix(name, s) }) {
		r.user, r.process.Known = true, true // its files are closed to us; its name is enough
	}
	if r.user {
		cgroup := host.Line(folder + "/cgroup")
		if found := podInCgroup.FindStringSubmatch(cgroup); found != nil {
			r.process.PodUID = strings.ReplaceAll(found[1], "_", "-")
		}
		if all := containerInCgroup.FindAllString(cgroup, -1); len(all) > 0 {
			r.process.Container = all[len(all)-1]
		}
		for part := range strings.FieldsFuncSeq(cgroup, func(c rune) bool { return c == '/' || c == '\n' }) {
			if strings.HasSuffix(part, ".service") && r.process.PodUID == "" {
				r.process.Service = part
			}
		}
	}
	return r
}

// isClosed reports whether an error means that this process may not see the files of another one.
func isClosed(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM)
}

// openDevices returns the driver's device nodes that a process has open, in order.
func openDevices(ctx context.Context, host fs.FS, folder string) ([]string, error) {
	f, err := host.Open(folder + "/fd")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, ok := f.(fs.ReadDirFile)
	if !ok {
		return nil, nil
	}
	var devices []string
	for read := 0; read < maxOpenFiles && ctx.Err() == nil; {
		entries, err := list.ReadDir(1024)
		for _, e := range entries {
			file := folder + "/fd/" + e.Name()
			target, err := fs.ReadLink(host, file)
			if err != nil || !isDevice(target) {
				continue
			}
			if info, err := fs.Stat(host, file); err == nil && info.Mode()&fs.ModeCharDevice == 0 {
				continue // a file with the name of a device
			}
			target = target[strings.LastIndex(target, "/dev/"):]
			if !slices.Contains(devices, target) && len(devices) < maxDevices {
				devices = append(devices, target)
			}
		}
		read += len(entries)
		if err != nil || len(entries) == 0 {
			break // the end, or the process has ended
		}
	}
	slices.Sort(devices)
	return devices, nil
}

// isDevice reports whether a path is that of a device node of the driver, in any container.
func isDevice(target string) bool {
	at := strings.LastIndex(target, "/dev/nvidia")
	return at >= 0 && len(target) < 4096
}

// mapsLibrary reports whether a process has libcuda mapped.
func mapsLibrary(host root, folder string) (bool, error) {
	f, err := host.Open(folder + "/maps")
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewReaderSize(io.LimitReader(f, maxMaps), 64<<10)
	for {
		line, err := lines.ReadSlice('\n')
		// A line begins with addresses, and ends with a path.
		if at := strings.LastIndexByte(string(line), '/'); at >= 0 && strings.HasPrefix(string(line[at:]),
			"/libcuda.so") {
			return true, nil
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return false, err
		}
	}
}

// nameContainers adds the names of pods and containers, by the names of the kubelet's log folders.
func nameContainers(host root, all []preflight.Process) {
	if !slices.ContainsFunc(all, func(p preflight.Process) bool { return p.PodUID != "" }) {
		return
	}
	pods := map[string][2]string{}
	folders, _ := host.List("var/log/pods")
	for _, folder := range folders {
		if parts := strings.Split(folder, "_"); len(parts) == 3 { // NAMESPACE_NAME_UID: names have no _
			pods[parts[2]] = [2]string{parts[0], parts[1]}
		}
	}
	containers := map[string]string{}
	logs, _ := host.List("var/log/containers")
	for _, file := range logs {
		// POD_NAMESPACE_CONTAINER-ID.log
		parts := strings.Split(strings.TrimSuffix(file, ".log"), "_")
		if at := strings.LastIndex(parts[len(parts)-1], "-"); len(parts) == 3 && at > 0 {
			containers[parts[2][at+1:]] = parts[2][:at]
		}
	}
	for i := range all {
		p := &all[i]
		name, known := pods[p.PodUID]
		if !known { // the UID of a static pod has no dashes
			name = pods[strings.ReplaceAll(p.PodUID, "-", "")]
		}
		p.Namespace, p.Pod, p.ContainerName = name[0], name[1], containers[p.Container]
	}
}
