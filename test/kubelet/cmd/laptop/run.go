package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// clearScreen empties a terminal and goes to its top.
const clearScreen = "\x1b[H\x1b[2J"

// run shows the node until ctx ends.
func run(ctx context.Context, s node.Setup) (err error) {
	profile, err := simulator.Load(s.Profile)
	if err != nil {
		return err
	}
	n, err := node.Open(s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.StartDaemon(); err != nil {
		return err
	}
	daemon := n.Running()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var died error
	observed := make(chan struct{})
	go func() {
		defer close(observed)
		select {
		case <-daemon.Ended():
			died = fmt.Errorf("the daemon ended by itself; its log ends with:\n%s", n.Logged())
			stop()
		case <-watching.Done():
		}
	}()

	show := &display{node: n, profile: profile, lists: map[string][]*pluginapi.Device{}, terminal: isTerminal(os.Stdout)}
	for event := range n.Follow(watching, 0) {
		show.take(event)
	}
	<-observed
	if died != nil {
		return died
	}
	fmt.Println("\nStopping the daemon and the kubelet.")
	return nil
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// A display shows the node, and again after each event that changes what there is to see.
type display struct {
	node     *node.Node
	profile  simulator.Profile
	lists    map[string][]*pluginapi.Device // by resource, as last received
	terminal bool
}

func (d *display) take(e standin.Event) {
	switch e.Kind {
	case standin.Listed:
		d.lists[e.Resource] = e.Devices
	case standin.StreamEnded, standin.Started:
	default:
		return
	}
	if d.terminal {
		fmt.Print(clearScreen)
	}
	fmt.Print(folded(d.text(), terminal.Columns(os.Stdout)))
}

// text is what the node shows now.
func (d *display) text() string {
	var b strings.Builder
	n := d.node
	fmt.Fprintf(&b, "A simulated %s, with a kubelet that follows the rules of %s\n\n", n.Profile, n.Version)
	resources := n.Resources()
	if len(resources) == 0 {
		b.WriteString("nothing is registered yet\n")
	}
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		fmt.Fprintf(&b, "%s   capacity %d   allocatable %d\n", name, resources[name].Capacity, resources[name].Allocatable)
		healthy := n.Devices(name)
		for i, device := range d.lists[name] {
			health := "Unhealthy"
			if healthy[device.GetID()] {
				health = "Healthy"
			}
			fmt.Fprintf(&b, "  %3d  %-40s  %s\n", i, device.GetID(), health)
		}
	}
	b.WriteString(d.commands())
	return b.String()
}

// folded returns a text whose sentences fit so many columns; 0 stands for the usual width. Commands
// and tables stay as they are: they begin with a space.
func folded(text string, columns int) string {
	columns = cmp.Or(columns, terminal.DefaultColumns)
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, " ") && len(line) > columns {
			lines[i] = terminal.Fold(line, columns, "")
		}
	}
	return strings.Join(lines, "\n")
}

// commands returns the commands for another terminal, in the folder of this process. They can be
// copied as they are: the first two lines set what the others need.
func (d *display) commands() string {
	program, gpu := filepath.Base(d.node.Daemon), d.gpu()
	return strings.Join([]string{
		"", "In another terminal, in this directory:",
		"  export CONTROL_SOCKET=" + d.node.ControlSocket(),
		"  export PATH=" + folderOf(d.node.Daemon) + ":$PATH",
		"Break a GPU, see why, and repair it:",
		fmt.Sprintf("  %s simulate xid --gpu %s --xid 79", program, gpu),
		fmt.Sprintf("  %s status", program),
		fmt.Sprintf("  %s simulate restore --gpu %s", program, gpu),
		"The daemon's log: " + d.node.LogPath(), endLine, "", "",
	}, "\n")
}

// endLine is the last line of a screen.
const endLine = "Ctrl-C stops everything."

// gpu returns the index of the GPU that the commands name: 3 where the machine has it, or else its
// last one.
func (d *display) gpu() string { return fmt.Sprint(min(3, len(d.profile.GPUs)-1)) }

// folderOf returns the folder of a file as one would type it here.
func folderOf(path string) string {
	folder := filepath.Dir(path)
	here, err := os.Getwd()
	if err != nil {
		return folder
	}
	if relative, err := filepath.Rel(here, folder); err == nil && !strings.HasPrefix(relative, "..") {
		return "$PWD/" + relative
	}
	return folder
}
