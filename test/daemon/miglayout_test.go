package daemon

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestOtherGPUsServeThroughout divides four of eight GPUs under pods. PodResources, asked every 20 ms, shows all devices of the other four
// GPUs allocatable throughout; and a device that is ended was Unhealthy in kubelet's list before.
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

// TestLayoutIsThereAfterARestart kills the daemon, and with it the simulated node: its GPUs are whole again, as after a restart. None of them is
// on offer before the layout stands, which takes seconds.
func TestLayoutIsThereAfterARestart(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Args: []string{"--mig-strategy", "mixed"}})
	file := s.write("config.yaml", "mig: {enabled: true, layout: all-balanced}\n")
	s.Args = append(s.Args, "--config-file", file)
	s.start()
	s.until("divided GPUs", func() bool { return s.Allocatable(third) == 8 })
	mark := s.Mark()
	s.signal(s.Running(), syscall.SIGKILL)
	<-s.Running().Ended()
	s.until("nothing on offer", func() bool { return s.Allocatable(third) == 0 })
	began := time.Now()
	s.start()
	s.until("divided GPUs", func() bool { return s.Allocatable(third) == 8 })
	t.Logf("divided %v after the start", time.Since(began).Round(time.Millisecond))
	for _, e := range s.Events(mark) {
		for _, d := range e.Devices {
			if e.Kind == standin.Listed && e.Resource == gpu && d.GetHealth() == "Healthy" {
				t.Errorf("GPU %s was on offer before its layout stood", d.GetID())
			}
		}
	}
}
