package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errNoUnit is the error for a unit that does not exist.
var errNoUnit = errors.New("no such unit")

// status prints the error of a program, and returns its exit status.
func status(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errNoUnit):
		return 5
	}
	return 1
}

// use is a program that uses the driver until it is killed: it opens a file, or maps it.
func use(how, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	if how == "map" {
		if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	fmt.Println(uses)
	for {
		time.Sleep(time.Hour)
	}
}

const uses = "uses the file"

// startUser starts a program that uses the driver, and returns when it does.
func startUser(cmd *exec.Cmd) error {
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	// A service that kept the output of systemctl would keep gpu-driver waiting for its end.
	console, err := os.OpenFile("/dev/console", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = console.Close() }() // the program has its own
	cmd.Stderr = console
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := io.ReadFull(out, make([]byte, len(uses))); err != nil {
		return fmt.Errorf("%s ended: %w", cmd, err)
	}
	return nil
}

// begin starts a program that uses the driver, and returns its PID.
func begin(args []string) (string, error) {
	cmd := exec.Command(args[0], args[1:]...)
	if err := startUser(cmd); err != nil {
		return "", err
	}
	go func() { _ = cmd.Wait() }() // it is killed
	return strconv.Itoa(cmd.Process.Pid), nil
}

// end kills a process, and returns when its files are closed.
func end(args []string) (string, error) {
	pid, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return "", err
	}
	return "", await("the end of process "+args[0], func() bool { return unix.Kill(pid, 0) != nil })
}

func await(what string, is func() bool) error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if is() {
			return nil
		}
	}
	return errors.New("not within 10 s: " + what)
}

// units are the services of the guest, with their programs.
var units = map[string]string{
	"nvidia-persistenced.service":  "nvidia-persistenced",
	"nvidia-fabricmanager.service": "nv-fabricmanager",
}

// systemctl is a stand-in for systemd's program, because systemd has 40 packages: `start UNIT` and
// `stop UNIT`, which gpu-driver calls. As with systemd, a process of a service is in the cgroup
// system.slice/UNIT, start returns when the service is ready and stop when it has ended, the status is
// 5 for a unit that does not exist, and a unit that runs or does not run already is no error.
func systemctl(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("systemctl: %q is not known here", args)
	}
	unit := args[1]
	program, ok := units[unit]
	if !ok {
		fmt.Fprintf(os.Stderr, "Failed to %s %s: Unit %s not found.\n", args[0], unit, unit)
		return errNoUnit
	}
	cgroup := "/sys/fs/cgroup/system.slice/" + unit
	runs := func() bool {
		text, err := os.ReadFile(cgroup + "/cgroup.events")
		return err == nil && strings.Contains(string(text), "populated 1")
	}
	switch args[0] {
	case "start":
		if runs() {
			return nil
		}
		if err := os.MkdirAll(cgroup, 0o755); err != nil {
			return err
		}
		folder, err := os.Open(cgroup)
		if err != nil {
			return err
		}
		cmd := exec.Command("/bin/"+program, "open", "/dev/nvidiactl")
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(folder.Fd()), Setsid: true}
		return startUser(cmd)
	case "stop":
		if !runs() {
			return nil
		}
		if err := os.WriteFile(filepath.Join(cgroup, "cgroup.kill"), []byte("1"), 0); err != nil {
			return err
		}
		// systemd removes the folder of a service that has ended.
		return await("the end of "+unit, func() bool { return unix.Rmdir(cgroup) == nil })
	}
	return fmt.Errorf("systemctl: %q is not known here", args)
}
