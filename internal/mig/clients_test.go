package mig_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

const (
	dcgm     = "0f3e9d52-1c1b-4f0a-9c8e-5d1f6a7b8c9d"
	exporter = "11111111-2222-3333-4444-555555555555"
)

// A cluster simulates DaemonSets that can be paused: one pod of DCGM and one of its exporter.
type cluster struct {
	*rig
	mu      sync.Mutex
	asked   [][]string
	refuses error
	stays   bool // pods do not end
}

// Pause implements mig.Pauser. A pod takes three seconds to end.
func (c *cluster) Pause(_ context.Context, pods []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = append(c.asked, pods)
	if c.refuses == nil && !c.stays {
		time.AfterFunc(3*time.Second, func() { c.clients() })
	}
	return c.refuses
}

// times returns the number of pause requests.
func (c *cluster) times() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.asked)
}

// clients sets the pods that have GPU 1 open.
func (c *cluster) clients(pods ...string) {
	c.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "1", Clients: pods})
}

// run starts a Controller that pauses DaemonSets.
func (c *cluster) run() { c.runWith(nil) }

// runWith starts a Controller; problem is the error for clients that cannot be read.
func (c *cluster) runWith(problem error) {
	c.start(func(o *mig.Options) {
		o.Pauser = c
		o.Clients = func(minor int) ([]inventory.DriverClient, error) {
			clients, err := nvidia.Clients(c.node.Root(), minor)
			return clients, errors.Join(err, problem)
		}
	})
}

// request requests a layout for GPU 1.
func (c *cluster) request(pause bool) {
	c.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"1"}, Pause: pause})
}

func onCluster(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	onNode(t, func(t *testing.T, r *rig) { test(t, &cluster{rig: r}) })
}

func resume(s mig.Status) bool { return s.Resume }

// If the driver says that a GPU is in use, the DaemonSet of the pod that has this GPU open is
// paused, and resumed when the layout is applied. DaemonSets whose pods have another GPU open keep
// running.
func TestPauseOfClients(t *testing.T) {
	onCluster(t, func(t *testing.T, c *cluster) {
		c.clients(dcgm, "host")
		c.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "2", Clients: []string{exporter}})
		c.run()
		c.until("nothing needs a pause", resume)
		c.request(false)
		c.until("is in use", func(s mig.Status) bool { return strings.Contains(s.Reason, "in use") })
		c.passes(10 * time.Minute)
		if c.times() > 0 {
			t.Errorf("paused without being told to: %v", c.asked)
		}
		c.clients("host", dcgm, dcgm) // two processes of one pod, and one of none
		c.request(true)
		s := c.until("names the clients", func(s mig.Status) bool {
			return s.Reason == "GPU 1: in use by process 300100 (nv-hostengine), process 300101 (nv-hostengine), process "+
				"300102 (nv-hostengine)"
		})
		if s.Resume || s.State != mig.StatePending {
			t.Errorf("%s while a client is waited for, resume %v", s.State, s.Resume)
		}
		began := time.Now()
		c.until("goes on", func(s mig.Status) bool { return s.Resume && s.State == mig.StateSuccess })
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("success %v after the pause", took)
		}
		if diff := cmp.Diff([][]string{{dcgm}}, c.asked); diff != "" {
			t.Errorf("paused (-want +got):\n%s", diff)
		}
	})
}

// The driver shows a computing process of a DaemonSet's pod. The DaemonSet is paused until the
// process ends.
func TestPauseOfDaemonSetProcesses(t *testing.T) {
	onCluster(t, func(t *testing.T, c *cluster) {
		c.clients(dcgm)
		c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1", Count: 1})
		time.AfterFunc(time.Minute, func() { c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1"}) })
		c.run()
		c.request(true)
		c.passes(30 * time.Second)
		if c.times() != 1 {
			t.Errorf("paused while the process computes: %v", c.asked)
		}
		c.reaches(mig.StateSuccess)
		if c.times() != 1 {
			t.Errorf("paused: %v", c.asked)
		}
	})
}

// DaemonSets are not paused while a pod holds the GPU.
func TestPodsEndBeforePause(t *testing.T) {
	for name, processes := range map[string]uint64{"that compute": 1, "that do not compute": 0} {
		t.Run(name, func(t *testing.T) {
			onCluster(t, func(t *testing.T, c *cluster) {
				c.clients(dcgm)
				gpu := c.Snapshots().Value().GPUs[1].UUID
				c.hold(gpu, "ns/work")
				c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1", Count: processes})
				c.run()
				c.request(true)
				s := c.until("waits for the pod", func(s mig.Status) bool { return strings.Contains(s.Reason, "pod ns/work") })
				c.passes(10 * time.Minute)
				if c.times() > 0 || !s.Resume {
					t.Errorf("paused while a pod holds the GPU: %v", c.asked)
				}
				c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1"})
				c.hold(gpu, "")
				c.reaches(mig.StateSuccess)
			})
		})
	}
}

// A pause without effect ends after some minutes: the GPU is advertised unchanged, and DaemonSets
// are not paused again for an hour.
func TestIneffectivePause(t *testing.T) {
	for name, prepare := range map[string]func(*cluster){
		"pods that stay":      func(c *cluster) { c.stays = true; c.clients(dcgm) },
		"the API server away": func(c *cluster) { c.refuses = errors.New("there is no API server"); c.clients(dcgm) },
		"pods that compute": func(c *cluster) {
			c.stays = true
			c.clients(dcgm)
			c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1", Count: 1})
		},
		"a program of the host": func(c *cluster) {
			c.clients(dcgm)
			c.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceSetMigMode", Value: "IN_USE"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			onCluster(t, func(t *testing.T, c *cluster) {
				prepare(c)
				c.run()
				c.request(true)
				began := time.Now()
				c.until("pauses", func(mig.Status) bool { return c.times() > 0 })
				if c.refuses != nil {
					c.until("says why not", func(s mig.Status) bool { return strings.HasSuffix(s.Reason, ": there is no API server") })
				}
				c.until("goes on", func(s mig.Status) bool { return s.Resume })
				if took := time.Since(began); took < 4*time.Minute || took > 6*time.Minute {
					t.Errorf("given up after %v", took)
				}
				s := c.reaches(mig.StateFailed)
				if !strings.Contains(s.Reason, "though DaemonSets were paused for 5m0s") ||
					!slices.Equal(c.devices()[1], []string{"GPU"}) {
					t.Errorf("%s; offered: %v", s.Reason, c.devices()[1])
				}
				c.clients(dcgm) // the DaemonSet has a pod again
				before := c.times()
				c.passes(10 * time.Minute)
				c.until("still goes on", resume)
				if c.times() != before {
					t.Error("paused again at once")
				}
				if c.stays { // the others would be the same
					c.passes(time.Hour)
					if c.times() == before {
						t.Error("never paused again")
					}
				}
				c.mu.Lock()
				c.stays, c.refuses = false, nil
				c.mu.Unlock()
				c.clients()
				c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "1"})
				c.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceSetMigMode"})
				c.until("is made", func(s mig.Status) bool { return s.State == mig.StateSuccess && s.Resume })
			})
		})
	}
}

// After a kill, the next process resumes DaemonSets, also if the layout is no longer wanted, but
// only when it knows that no change needs the pause.
func TestKillDuringPause(t *testing.T) {
	for name, wanted := range map[string]bool{"and wanted still": true, "and not wanted any more": false} {
		t.Run(name, func(t *testing.T) {
			onCluster(t, func(t *testing.T, c *cluster) {
				c.stays = true
				c.clients(dcgm)
				c.run()
				c.request(true)
				c.until("pauses", func(s mig.Status) bool { return c.times() > 0 && !s.Resume })
				c.stop()
				c.clients() // the pod ends
				if !wanted {
					c.desired.Publish(mig.DesiredLayout{})
				}
				c.built = func(o *mig.Controller) {
					if o.Status().Value().Resume {
						t.Error("DaemonSets go on before the owner has looked")
					}
				}
				c.run()
				s := c.until("goes on", resume)
				if want := map[bool]mig.ConfigState{true: mig.StateSuccess, false: mig.StateNone}[wanted]; s.State != want {
					t.Errorf("they go on at %q, want %q", s.State, want)
				}
			})
		})
	}
}

// The process that does not change GPUs resumes nothing.
func TestPauseByAnotherProcess(t *testing.T) {
	onCluster(t, func(t *testing.T, c *cluster) {
		c.run()
		c.until("goes on", resume)
		end := c.second(mig.DesiredLayout{})
		c.until("has decided", func(s mig.Status) bool { return len(s.GPUs) == 3 })
		c.passes(time.Minute)
		if c.controller.Status().Value().Resume {
			t.Error("a process without the lock has DaemonSets go on")
		}
		end()
		c.until("goes on", resume)
	})
}
