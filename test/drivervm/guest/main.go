// Command guest is the first process of the guest. It does what the test asks for at the second
// serial port: a line of JSON with a Request is answered by a line with a Reply.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

// A Request is something to do, with its arguments.
type Request struct {
	Do   string   `json:"do"`
	Args []string `json:"args"`
}

// A Reply is the output of a Request and its error, which is empty if there was none.
type Reply struct {
	Output string `json:"output"`
	Error  string `json:"error"`
}

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "init":
	case "systemctl":
		os.Exit(status(systemctl(os.Args[1:])))
	default:
		os.Exit(status(use(os.Args[1], os.Args[2])))
	}
	err := serve()
	fmt.Println("guest: ended:", err)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// actions are what a test can ask for.
var actions = map[string]func(args []string) (string, error){
	"mount":  mountDisk,
	"run":    run,
	"start":  start,
	"call":   call,
	"load":   load,
	"unload": func(args []string) (string, error) { return "", unix.DeleteModule(args[0], unix.O_NONBLOCK) },
	"hold":   hold,
	"let-go": letGo,
	"open":   open,
	"read":   read,
	"driver": driver,
	"begin":  begin,
	"end":    end,
	"stacks": stacks,
	"power-off": func([]string) (string, error) {
		unix.Sync()
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	},
}

func serve() error {
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
		{"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := os.Setenv("PATH", "/tools/bin:/bin"); err != nil {
		return err
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	modules, err := filepath.Glob("/modules/" + strings.TrimSpace(string(release)) + "/*.ko")
	if err != nil {
		return err
	}
	for _, name := range modules {
		if _, err := load([]string{name}); err != nil {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	port, err := os.OpenFile("/dev/ttyS1", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	mode, err := unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS)
	if err != nil {
		return err
	}
	mode.Iflag, mode.Oflag, mode.Lflag = 0, 0, 0
	if err := unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, mode); err != nil {
		return err
	}
	answer := func(r Reply) error {
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		_, err = port.Write(append(text, '\n'))
		return err
	}
	if err := answer(Reply{Output: "ready"}); err != nil {
		return err
	}
	lines := bufio.NewScanner(port)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var request Request
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			return err
		}
		// A test waits for each answer, but asks for stacks while another request hangs.
		go func() {
			if err := answer(do(request)); err != nil {
				fmt.Println("guest: answer:", err)
			}
		}()
	}
	return lines.Err()
}

func do(request Request) (r Reply) {
	act := actions[request.Do]
	if act == nil {
		return Reply{Error: "an unknown request"}
	}
	output, err := act(request.Args)
	if err != nil {
		return Reply{output, err.Error()}
	}
	return Reply{Output: output}
}

// stacks writes to the console what every thread waits for in the kernel, the stacks of this program,
// and those of gpu-driver, which ends.
func stacks([]string) (string, error) {
	threads, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	if err != nil {
		return "", err
	}
	for _, thread := range threads {
		name, _ := os.ReadFile(thread + "/comm") // the thread may have ended
		if stack, _ := os.ReadFile(thread + "/stack"); len(stack) > 0 {
			fmt.Printf("%s %s%s", thread, name, stack)
		}
	}
	_ = pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
	drivers, err := processesOf("gpu-driver")
	for _, pid := range drivers {
		if err := unix.Kill(pid, unix.SIGQUIT); err != nil {
			return "", err
		}
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if unix.Kill(pid, 0) != nil {
				break
			}
		}
	}
	return "the stacks are on the console", err
}

// processesOf returns the processes with a name.
func processesOf(name string) (pids []int, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range files {
		text, _ := os.ReadFile(file) // the process may have ended
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && strings.TrimSpace(string(text)) == name {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// mountDisk mounts a disk at a folder: read-only with a third argument.
func mountDisk(args []string) (string, error) {
	if err := os.MkdirAll(args[1], 0o755); err != nil {
		return "", err
	}
	var flags uintptr
	if len(args) > 2 {
		flags = unix.MS_RDONLY
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Mount(args[0], args[1], "ext4", flags, "")
		// The kernel finds disks beside the first process.
		if err == nil || !errors.Is(err, unix.ENOENT) || time.Now().After(end) {
			return "", err
		}
	}
}

func run(args []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	return string(out), err
}

// processes are those of start, by the first argument.
var processes = map[string]*exec.Cmd{}

// start starts a program beside the others, whose output is on the console.
func start(args []string) (string, error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return "", err
	}
	processes[filepath.Base(args[0])] = cmd
	go func() { _ = cmd.Wait() }()
	return fmt.Sprint(cmd.Process.Pid), nil
}

// call makes a call of package driverapi, and returns the Status as JSON. It waits until gpu-driver
// has its socket.
func call(args []string) (string, error) {
	var a driverapi.Arguments
	if len(args) > 1 {
		a.Digest = args[1]
	}
	if len(args) > 2 {
		a.Reason = args[2]
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for ; ; time.Sleep(10 * time.Millisecond) {
		s, err := driverapi.Call(ctx, driverapi.DefaultSocket, args[0], a)
		if errors.Is(err, control.ErrNoDaemon) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(s)
		return string(text), err
	}
}

// load loads a module file.
func load(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	return "", unix.FinitModule(int(f.Fd()), strings.Join(args[1:], " "), 0)
}

var held []*os.File

// hold opens a file and keeps it open.
func hold(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err == nil {
		held = append(held, f)
	}
	return "", err
}

// open opens a file and closes it.
func open(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err != nil {
		return "", err
	}
	return "", f.Close()
}

func letGo([]string) (string, error) {
	for _, f := range held {
		_ = f.Close() // only read
	}
	held = nil
	return "", nil
}

func read(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	text, err := io.ReadAll(io.LimitReader(f, 1<<19))
	return string(text), err
}

// driver returns the versions of the loaded modules of the driver, one a line.
func driver([]string) (string, error) {
	names, err := filepath.Glob("/sys/module/nvidia*/version")
	if err != nil {
		return "", err
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "%s %s", filepath.Base(filepath.Dir(name)), text)
	}
	return b.String(), nil
}
