package daemon_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestStartIsOneLine: the line comes with the first successful scan, and never again.
func TestStartIsOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		ctx := klog.NewContext(t.Context(), logger)
		snapshots := feed.New(inventory.Snapshot{})
		configs := feed.New(config.Config{Live: config.Live{
			Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}},
			Resource: resource.Options{Units: resource.Units{Name: "volcano.sh/gpu-mem.1Gi", ReserveMiB: 1 << 10},
				Selectors: []resource.Selector{{Where: "selectors[0]", Devices: []resource.Ref{"1"}, Units: true}}},
		}})
		ended := make(chan error, 1)
		go func() { ended <- daemon.LogStart(ctx, "v1", snapshots, configs) }()
		for _, waiting := range []inventory.Snapshot{{}, {Generation: 1, Stale: "no driver"}} {
			snapshots.Publish(waiting)
			synctest.Wait()
			if len(ended) > 0 {
				t.Fatalf("it ended at %+v", waiting)
			}
		}
		snapshots.Publish(inventory.Snapshot{Generation: 2, Driver: inventory.Driver{Version: "580"}, GPUs: []inventory.GPU{
			{UUID: "GPU-0"}, {Index: 1, UUID: "GPU-1", MemoryBytes: 8 << 30,
				ComputeCapability: inventory.ComputeCapability{Major: 9}},
		}})
		if err := <-ended; err != nil {
			t.Error(err)
		}
		buffered, ok := logger.GetSink().(ktesting.Underlier)
		if !ok {
			t.Fatal("the logger has no buffer")
		}
		const want = `Started version="v1" driver="580" gpus=2 migDevices=0 leftOut=0 resources=["nvidia.com/gpu: 1","volcano.sh/gpu-mem.1Gi: 7"] deviceListStrategy=["envvar"] ` +
			`migStrategy="none" sharing="none"` + "\n"
		if text := buffered.GetBuffer().String(); strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, want) {
			t.Errorf("logged %q, want %q", text, want)
		}
	})
}
