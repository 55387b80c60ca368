package monitor_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

// TestRepartition divides a GPU. The Snapshot has its MIG device within a second, while a mode that takes 20 s keeps nobody waiting.
func TestRepartition(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-a100")
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
		gi, err := s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: 9, Start: 4, Size: 4})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = s.Repartition(t.Context(), gpus[3].UUID, inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: gi, Size: 3}); err != nil {
			t.Fatal(err)
		}
		began = time.Now()
		s.until("the Snapshot has the MIG device", func(s inventory.Snapshot) bool { return len(s.GPUs[3].MIGDevices) == 1 })
		if took := time.Since(began); took > time.Second {
			t.Errorf("the MIG device is there after %v", took)
		}
		p, err := s.Partitions(t.Context(), gpus[3].UUID)
		if err != nil || len(p.Instances) != 1 || p.Instances[0].ID != gi {
			t.Errorf("Partitions: %+v, %v", p, err)
		}
	})
}

func TestRepartitionWithoutTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		gpu := s.Snapshots().Value().GPUs[0].UUID
		if _, err := s.Repartition(t.Context(), "GPU-none", inventory.MIGStep{Action: inventory.MIGEnable}); err == nil {
			t.Error("a GPU that is not there got another mode")
		}
		if _, err := s.Partitions(t.Context(), "GPU-none"); err == nil {
			t.Error("a GPU that is not there is divided")
		}
		if err := s.Quiesce(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Repartition(t.Context(), gpu, inventory.MIGStep{Action: inventory.MIGEnable}); !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Repartition without a session: %v", err)
		}
		if _, err := s.Partitions(t.Context(), gpu); !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Partitions without a session: %v", err)
		}
	})
}
