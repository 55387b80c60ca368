package simulator_test

import (
	"strconv"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestManyAtOnce lets the race detector see every path while faults come and go.
func TestManyAtOnce(t *testing.T) {
	n, lib := start(t, "a100-mig-mixed")
	var tasks sync.WaitGroup
	for i, d := range handles(t, lib) {
		tasks.Go(func() {
			set, ret := lib.EventSetCreate()
			if ret != nvml.SUCCESS {
				t.Errorf("EventSetCreate answered %v", ret)
				return
			}
			for range 50 {
				look(d, set) // whatever the GPU answers at this moment
				n.List()
				if _, err := n.Root().Open("dev/nvidiactl"); err != nil {
					t.Error(err)
				}
			}
			if ret := set.Free(); ret != nvml.SUCCESS {
				t.Errorf("Free answered %v", ret)
			}
		})
		tasks.Go(func() {
			gpu := strconv.Itoa(i)
			for round := range 50 {
				kind := []simulator.Kind{simulator.KindXID, simulator.KindLost, simulator.KindRestore,
					simulator.KindMIG, simulator.KindECC, simulator.KindRemove, simulator.KindAdd}[round%7]
				f := simulator.Fault{Kind: kind, GPU: gpu}
				if kind == simulator.KindXID {
					f.XID = 48
				}
				if err := n.Inject(f); err != nil {
					t.Error(err)
				}
			}
		})
	}
	tasks.Wait()
	must(t, "Shutdown", lib.Shutdown())
	if got := n.Stats(); got != (simulator.Stats{}) {
		t.Errorf("left open: %+v", got)
	}
}

// look makes calls of all kinds on a GPU.
func look(d nvml.Device, set nvml.EventSet) {
	mask, _ := d.GetSupportedEventTypes()
	_ = d.RegisterEvents(mask, set)
	_, _ = set.Wait(0)
	_, _ = d.GetNvLinkState(0)
	_ = d.GetFieldValues([]nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}})
	if m, ret := d.GetMigDeviceHandleByIndex(0); ret == nvml.SUCCESS {
		_, _ = m.GetAttributes()
	}
}
