package daemon

import (
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestOtherGPUsServeThroughout divides four of eight GPUs under pods. PodResources, asked every 20
// ms, shows all devices of the other four GPUs allocatable throughout; and a device that is ended
// was Unhealthy in kubelet's list before.
func TestOtherGPUsServeThroughout(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	layouts := s.write("layouts.yaml", `version: v1
mig-configs:
  half:
  - {devices: [0, 1, 2, 3], mig-enabled: true, mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}}
`)
	file := s.write("config.yaml", "mig: {enabled: true, configFile: "+layouts+"}\n")
	s.Args = []string{"--mig-strategy", "mixed", "--config-file", file}
	s.start()
	s.shows(8, 8)
	s.admit("train", 1)
	profile, err := simulator.Load(s.Profile)
	if err != nil {
		t.Fatal(err)
	}
	var others []string
	simulated := simulator.New(profile)
	defer simulated.Close()
	for _, g := range simulated.List()[4:] {
		others = append(others, g.UUID)
	}
	asked, missing := make(chan int), make(chan struct{})
	accounts := kubelet.NewPodResources(s.PodResourcesSocket(), nil)
	t.Cleanup(func() { _ = accounts.Close() })
	go func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		answers := 0
		for {
			select {
			case <-missing:
				asked <- answers
				return
			case <-tick.C:
			}
			all, err := accounts.Allocatable(t.Context())
			if err != nil {
				continue // kubelet refuses more than a hundred questions a second
			}
			answers++
			for _, uuid := range others {
				if !slices.Contains(all[gpu], uuid) {
					t.Errorf("GPU %s is not allocatable: %v", uuid, all[gpu])
				}
			}
		}
	}()
	held := ""
	for id := range s.PodStatus("train")[gpu] {
		held = id
	}
	s.write("config.yaml", "mig: {enabled: true, configFile: "+layouts+", layout: half}\n")
	divided := 4
	if !slices.Contains(others, held) {
		divided = 3
		s.until("three divided GPUs", func() bool { return s.Allocatable(third) == divided })
		s.Remove("train")
	}
	s.until("four divided GPUs", func() bool { return s.Allocatable(third) == 4 && s.Allocatable(gpu) == 4 })
	close(missing)
	if n := <-asked; n < 20 {
		t.Errorf("PodResources answered %d times", n)
	}
	last := map[string]string{}
	for _, e := range s.Events(0) {
		if e.Kind != standin.Listed || e.Resource != gpu {
			continue
		}
		now := map[string]string{}
		for _, d := range e.Devices {
			now[d.GetID()] = d.GetHealth()
		}
		for id, health := range last {
			if _, there := now[id]; !there && health != "Unhealthy" {
				t.Errorf("%s left the list when it was %s", id, health)
			}
		}
		last = now
	}
}

// TestLayoutIsThereAfterARestart kills the daemon, and with it the simulated node: its GPUs are
// whole again, as after a restart. None of them is offered before the layout stands, which takes
// seconds.
func TestLayoutIsThereAfterARestart(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Args: []string{"--mig-strategy", "mixed"}})
	file := s.write("config.yaml", "mig: {enabled: true, layout: all-balanced}\n")
	s.Args = append(s.Args, "--config-file", file)
	s.start()
	s.until("divided GPUs", func() bool { return s.Allocatable(third) == 8 })
	mark := s.Mark()
	s.kill()
	began := time.Now()
	s.start()
	s.until("divided GPUs", func() bool { return s.Allocatable(third) == 8 })
	t.Logf("divided %v after the start", time.Since(began).Round(time.Millisecond))
	for _, e := range s.Events(mark) {
		for _, d := range e.Devices {
			if e.Kind == standin.Listed && e.Resource == gpu && d.GetHealth() == "Healthy" {
				t.Errorf("GPU %s was offered before its layout stood", d.GetID())
			}
		}
	}
}

// TestLayoutsInARollOut has the next version beside a daemon: it leads, and kubelet has all GPUs
// Healthy as long as the earlier daemon runs, because layouts are changed when that has ended. The
// earlier one refuses orders.
func TestLayoutsInARollOut(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := s.write("config.yaml", "mig: {enabled: true}\n")
	s.Args = []string{"--mig-strategy", "mixed", "--config-file", file}
	s.start()
	s.shows(8, 8)
	first, mark := s.Running(), s.Mark()
	t.Cleanup(func() { _ = first.Kill() }) // if the test does not get to its end
	next := s.Path("second.sock")
	s.Args = append(s.Args, "--control-socket", next)
	s.start()
	s.next(mark, standin.Listed)
	s.write("config.yaml", "mig: {enabled: true, layout: all-balanced}\n")
	says := func(socket, text string) {
		t.Helper()
		s.eventually(text, func() bool {
			out, _ := exec.CommandContext(t.Context(), binary, "mig", "status", "--control-socket", socket).CombinedOutput()
			return strings.Contains(string(out), text)
		})
	}
	says(next, "another process of this program is running on the node")
	for socket, want := range map[string]string{s.ControlSocket(): "another process of this program leads", next: ""} {
		out, err := exec.CommandContext(t.Context(), binary, "mig", "apply", "--layout", "all-1g.10gb", "--wait", "1ms",
			"--control-socket",
			socket).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("mig apply at %s: %v, %s", socket, err, out)
		}
	}
	says(next, "Layout all-1g.10gb of mig apply: pending")
	for _, e := range s.Events(mark) {
		if e.Kind != standin.Listed {
			continue
		}
		for _, d := range e.Devices {
			if d.GetHealth() != "Healthy" {
				t.Errorf("%s was listed as %s during the roll-out", d.GetID(), d.GetHealth())
			}
		}
	}
	s.signal(first, syscall.SIGTERM)
	s.ends(first)
	s.until("the layout of the order", func() bool { return s.Allocatable("nvidia.com/mig-1g.10gb") == 56 })
	for _, e := range s.Events(mark) {
		if e.Resource == third && len(e.Devices) > 0 {
			t.Errorf("the layout of the configuration was made first: %v", e.Devices)
		}
	}
	says(next, "Layout all-1g.10gb of mig apply: success")
}
