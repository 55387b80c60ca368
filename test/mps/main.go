// Command mps stands in for the driver's nvidia-cuda-mps-control, under whose name it is called:
// with -f it is a control daemon, with start_server the parent of servers, and without arguments it
// commands the daemon of the same pipe directory. It keeps to what the manual page and the logs of
// the real one show:
//
//   - one daemon a pipe directory, held by a lock, and a daemon finds nothing wrong with the sockets
//     of one that was killed;
//   - the exit status of a command says whether there is a daemon, not whether it does as it is
//     told: what it refuses it says on stdout;
//   - values are rounded when they are read back ("33.0", "20G"), and servers outlive a daemon that is killed.
//
// Tests find its process in nvidia-cuda-mps-control.pid, and what it was told in log/control.log.
// The environment variable MPS_STAND_IN makes it misbehave: "stubborn" does not quit, "lax" takes
// no limits, "old" does not know how to serve several users, "endless" prints answers that have no
// end, "mute" answers nothing, "busy" takes every second command alone, as the real one does for a
// moment when a client comes or goes.
//
// MPS_STAND_IN_GPUS is a folder in which a daemon locks a file for each of its GPUs, as long as it
// lives. A daemon that finds a GPU locked adds a line to the file "shared" there.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	var err error
	switch {
	case filepath.Base(os.Args[0]) == "nvidia-cuda-mps-server":
		select {} // until it is killed
	case len(os.Args) == 1:
		err = command()
	case slices.Equal(os.Args[1:], []string{"-f", "-multiuser-server"}) && mood() != "old":
		err = serve("several users")
	case slices.Equal(os.Args[1:], []string{"-f"}):
		err = serve("one user")
	case os.Args[1] == "server":
		select {} // until it is killed
	default:
		err = fmt.Errorf("unknown arguments %q", os.Args[1:])
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func mood() string { return os.Getenv("MPS_STAND_IN") }

func pipe(name string) string { return filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), name) }

// command hands commands from stdin to the daemon.
func command() error {
	c, err := net.Dial("unix", pipe("control"))
	if err != nil {
		return fmt.Errorf("Cannot find MPS control daemon process") //nolint:staticcheck // the real one's words
	}
	defer c.Close()
	if mood() == "busy" && os.Remove(pipe("busy")) != nil {
		if err := os.WriteFile(pipe("busy"), nil, 0o600); err != nil {
			return err
		}
		return fmt.Errorf("Cannot send command to MPS control daemon process") //nolint:staticcheck // the real one's words
	}
	for mood() == "endless" {
		if _, err := fmt.Println("nvidia-cuda-mps-control has much to say"); err != nil {
			return err
		}
	}
	commands := bufio.NewScanner(os.Stdin)
	answers := bufio.NewReader(c)
	for commands.Scan() {
		if _, err := fmt.Fprintln(c, commands.Text()); err != nil {
			return err
		}
		answer, err := answers.ReadString('\n')
		if strings.HasPrefix(commands.Text(), "quit") && err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if answer = strings.TrimSpace(answer); answer != "" {
			fmt.Println(answer)
		}
	}
	return commands.Err()
}

// A daemon is the control daemon.
type daemon struct {
	mood    string
	log     *os.File
	threads float64
	memory  map[string]int // MiB, by device
	servers []*exec.Cmd
}

func serve(users string) error {
	lock, err := os.OpenFile(pipe("control_lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("An instance of this daemon is already running") //nolint:staticcheck // the real one's words
	}
	log := filepath.Join(os.Getenv("CUDA_MPS_LOG_DIRECTORY"), "control.log")
	d := &daemon{mood: mood(), threads: 100, memory: map[string]int{}}
	if d.log, err = os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	_ = os.Remove(pipe("control")) // of one that was killed
	listener, err := net.Listen("unix", pipe("control"))
	if err != nil {
		return err
	}
	d.say("Starting control daemon of " + os.Getenv("CUDA_VISIBLE_DEVICES") + " for " + users)
	if err := takeGPUs(os.Getenv("MPS_STAND_IN_GPUS")); err != nil {
		return err
	}
	if err := leavePID(); err != nil {
		return err
	}
	for {
		c, err := listener.Accept()
		if err != nil {
			return err
		}
		d.say("Accepting connection...")
		if d.converse(c) {
			return nil // which closes the connection
		}
	}
}

// takeGPUs locks the files of this daemon's GPUs in a folder.
func takeGPUs(folder string) error {
	if folder == "" {
		return nil
	}
	for uuid := range strings.SplitSeq(os.Getenv("CUDA_VISIBLE_DEVICES"), ",") {
		// It stays open, and so locked, until the process has ended.
		fd, err := syscall.Open(filepath.Join(folder, uuid), syscall.O_CREAT|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		if syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			continue
		}
		shared, err := os.OpenFile(filepath.Join(folder, "shared"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(shared, uuid, "in", pipe("")); err != nil {
			return err
		}
		_ = shared.Close()
	}
	return nil
}

// leavePID writes the file in which tests find this process: whole, or not at all.
func leavePID() error {
	unfinished := pipe("nvidia-cuda-mps-control.pid.unfinished")
	if err := os.WriteFile(unfinished, []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	return os.Rename(unfinished, pipe("nvidia-cuda-mps-control.pid"))
}

// say logs a line, where the real one does: in its log, and in the foreground on stdout.
func (d *daemon) say(line string) {
	line = fmt.Sprintf("[2026-01-01 00:00:00.000 Control %d] %s\n", os.Getpid(), line)
	_, _ = d.log.WriteString(line)
	_, _ = os.Stdout.WriteString(line)
}

// converse answers commands until the other side has no more, and reports whether it was told to
// quit.
func (d *daemon) converse(c net.Conn) (quit bool) {
	defer c.Close()
	d.say("NEW UI")
	for commands := bufio.NewScanner(c); commands.Scan(); {
		d.say("Cmd:" + commands.Text())
		if d.mood == "mute" {
			continue
		}
		words := strings.Fields(commands.Text())
		if len(words) > 0 && words[0] == "quit" && d.mood != "stubborn" {
			for _, s := range d.servers {
				_ = s.Process.Kill()
				_ = s.Wait()
			}
			return true
		}
		if len(words) == 0 {
			words = []string{""}
		}
		answer := d.answer(words[0], words[1:])
		if answer != "" {
			d.say(answer)
		}
		if _, err := fmt.Fprintln(c, answer); err != nil {
			return false
		}
	}
	d.say("UI closed")
	return false
}

func (d *daemon) answer(command string, arguments []string) string {
	switch {
	case command == "get_default_active_thread_percentage":
		return strconv.FormatFloat(d.threads, 'f', 1, 64)
	case command == "set_default_active_thread_percentage" && len(arguments) == 1:
		threads, err := strconv.ParseFloat(arguments[0], 64)
		if err != nil || threads <= 0 || threads > 100 || d.mood == "lax" {
			return "Invalid active thread percentage"
		}
		d.threads = threads
		return strconv.FormatFloat(d.threads, 'f', 1, 64)
	case command == "get_default_device_pinned_mem_limit" && len(arguments) == 1:
		switch limit := d.memory[arguments[0]]; {
		case limit == 0:
			return ""
		case limit < 1024:
			return fmt.Sprintf("%dM", limit)
		default:
			return fmt.Sprintf("%dG", limit/1024)
		}
	case command == "set_default_device_pinned_mem_limit" && len(arguments) == 2:
		limit, err := strconv.Atoi(strings.TrimSuffix(arguments[1], "M"))
		if err != nil || limit <= 0 {
			return "Invalid memory limit"
		}
		d.memory[arguments[0]] = limit
		return ""
	case command == "get_server_list":
		var all []string
		for _, s := range d.servers {
			all = append(all, strconv.Itoa(s.Process.Pid))
		}
		return strings.Join(all, " ")
	case command == "get_client_list" && len(arguments) == 1:
		return strconv.Itoa(os.Getppid()) // the test, as the client of each server
	case command == "terminate_client" && len(arguments) == 2:
		return ""
	case command == "start_server":
		server := exec.Command("/proc/self/exe", "server")
		server.Stdout = os.Stdout
		if err := server.Start(); err != nil {
			return err.Error()
		}
		d.servers = append(d.servers, server)
		return strconv.Itoa(server.Process.Pid)
	}
	return "Unknown command"
}
