package monitor_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestRepartition divides a GPU. The Snapshot has its MIG device within a second, while a mode that
// takes 20 s keeps nobody waiting.
func TestRepartition(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		gpus := s.Snapshots().Value().GPUs
		s.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "3", Call: "DeviceSetMigMode", Delay: "20s"})
		began := time.Now()
		mode := make(chan error, 1)
		go func() {
			_, err := s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGEnable})
			mode <- err
		}()
		time.Sleep(5 * time.Second)
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 48})
		s.until("the XID of another GPU counts", func(s inventory.Snapshot) bool {
			return s.GPUs[5].Health.State == inventory.Unhealthy
		})
		if took := time.Since(began); took > 8*time.Second {
			t.Errorf("the XID of another GPU counts after %v, which is after the mode", took)
		}
		if err := <-mode; err != nil || time.Since(began) != 20*time.Second {
			t.Errorf("the mode: %v after %v", err, time.Since(began))
		}
		s.until("the GPU is in multi-instance mode, and Healthy", func(s inventory.Snapshot) bool {
			return s.GPUs[3].MIG == inventory.MIGEnabled && s.GPUs[3].Health.State == inventory.Healthy
		})
		gi, err := s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGCreateInstance,
			Profile: 9, Start: 4, Size: 4})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGCreateCompute,
			GI:   gi,
			Size: 3}); err != nil {
			t.Fatal(err)
		}
		began = time.Now()
		s.until("the Snapshot has the MIG device",
			func(s inventory.Snapshot) bool { return len(s.GPUs[3].MIGDevices) == 1 })
		if took := time.Since(began); took > time.Second {
			t.Errorf("the MIG device is there after %v", took)
		}
		p, err := s.Partitions(t.Context(), gpus[3].UUID)
		if err != nil || len(p.Instances) != 1 || p.Instances[0].ID != gi {
			t.Errorf("Partitions: %+v, %v", p, err)
		}
	})
}

// A process sets MIG modes in sessions of its own.
type process struct {
	node    *simulator.Node
	refuses error
	sets    int
}

func (p *process) Check() error { return p.refuses }

func (p *process) Set(_ context.Context, uuid string, mode inventory.MIGMode) error {
	p.sets++
	return nvidia.SetMIGMode(nvidia.Options{Library: p.node.NVML(), Root: p.node.Root()}, uuid, mode)
}

// TestModeWithoutASession: for the MIG mode of an A100 the session is closed, another process sets
// the mode, and another session is opened. It stays while a call hangs, and where a GPU would lose
// settings with it.
func TestModeWithoutASession(t *testing.T) {
	t.Parallel()
	enable := inventory.MIGStep{Action: inventory.MIGEnable}
	for name, tt := range map[string]struct {
		refuses error
		faults  []simulator.Fault
		sets    int
		want    string // in the error
	}{
		"":         {sets: 1},
		"not here": {refuses: errors.New("not in a virtual machine"), want: "not in a virtual machine"},
		"a failure": {faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 1}}, sets: 1,
			want: "has the GPU open"},
		"settings that are lost": {faults: []simulator.Fault{
			{Kind: simulator.KindPersistence, GPU: "5", State: "off"},
			{Kind: simulator.KindAnswer, GPU: "5", Call: "DeviceGetPowerManagementLimit", Value: "250000"},
		}, want: "GPU 5 would lose its power limit of 250 W"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				other := &process{refuses: tt.refuses}
				s := simulate(t, "dgx-a100", func(o *monitor.Options, node *simulator.Node) {
					other.node, o.Modes = node, other
				})
				for _, f := range tt.faults {
					s.inject(f)
				}
				uuid := s.Snapshots().Value().GPUs[3].UUID
				_, err := s.Repartition(t.Context(), uuid, enable)
				if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) ||
					other.sets != tt.sets {
					t.Errorf("set %d times by another process: %v", other.sets, err)
				}
				if _, err := s.Look(t.Context()); err != nil {
					t.Error(err)
				}
				if now := s.Snapshots().Value(); now.Stale != "" ||
					(now.GPUs[3].MIG == inventory.MIGEnabled) != (tt.want == "") {
					t.Errorf("afterwards: %q, %v", now.Stale, now.GPUs[3].MIG)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-a100")
		uuid := s.Snapshots().Value().GPUs[3].UUID
		if _, err := s.Repartition(t.Context(), uuid, enable); !errors.Is(err, inventory.ErrSessionInUse) {
			t.Errorf("without another process: %v", err)
		}
	})
}

// TestModeWhileACallHangs: the session cannot be closed.
func TestModeWhileACallHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		other := &process{}
		s := simulate(t, "dgx-a100", func(o *monitor.Options, node *simulator.Node) {
			other.node, o.Modes = node, other
		})
		gpus := s.Snapshots().Value().GPUs
		s.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "6", Call: "DeviceGetFieldValues"})
		s.until("hangs", func(s inventory.Snapshot) bool { return s.GPUs[6].Health.State == inventory.Unhealthy })
		_, err := s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGEnable})
		if !errors.Is(err, inventory.ErrNoAnswer) || other.sets > 0 {
			t.Errorf("set %d times: %v", other.sets, err)
		}
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
	})
}

func TestRepartitionWithoutTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		gpu := s.Snapshots().Value().GPUs[0].UUID
		if _, err := s.Repartition(t.Context(),
			"GPU-none", inventory.MIGStep{Action: inventory.MIGEnable}); err == nil {
			t.Error("a GPU that is not there got another mode")
		}
		if _, err := s.Partitions(t.Context(), "GPU-none"); err == nil {
			t.Error("a GPU that is not there is divided")
		}
		if err := s.Quiesce(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Repartition(t.Context(), gpu, inventory.MIGStep{Action: inventory.MIGEnable}); !errors.Is(err,
			monitor.ErrQuiesced) {
			t.Errorf("Repartition without a session: %v", err)
		}
		if _, err := s.Partitions(t.Context(), gpu); !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Partitions without a session: %v", err)
		}
	})
}
