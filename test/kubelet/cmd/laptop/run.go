package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// clearScreen empties a terminal and goes to its top.
const clearScreen = "\x1b[H\x1b[2J"

// run shows the node until ctx ends.
func run(ctx context.Context, s node.Setup) (err error) {
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

	show := &display{node: n, lists: map[string][]*pluginapi.Device{}, terminal: isTerminal(os.Stdout)}
	for event := range n.Follow(watching, 0) {
		show.take(event)
	}
	<-observed
	if died != nil {
		return died
	}
	fmt.Println("\nEnding the daemon and the kubelet.")
	return nil
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// A display shows the node, anew after each event that changes what there is to see.
type display struct {
	node     *node.Node
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
	fmt.Print(d.text())
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
			fmt.Fprintf(&b, "  %3d  %-50s %s\n", i, device.GetID(), health)
		}
	}
	binary, socket := shortest(n.Daemon), "--control-socket "+n.ControlSocket()
	fmt.Fprintf(&b, "\nFrom another terminal:  %s simulate xid --gpu 3 --xid 79 %s\n", binary, socket)
	fmt.Fprintf(&b, "Undo it:                %s simulate restore --gpu 3 %s\n", binary, socket)
	fmt.Fprintf(&b, "See why:                %s status %s\n", binary, socket)
	fmt.Fprintf(&b, "The daemon's log:       %s\nCtrl-C ends all of it.\n\n", n.LogPath())
	return b.String()
}

// shortest returns a path as one would type it here.
func shortest(path string) string {
	here, err := os.Getwd()
	if err != nil {
		return path
	}
	relative, err := filepath.Rel(here, path)
	if err != nil || len(relative) > len(path) {
		return path
	}
	return relative
}
