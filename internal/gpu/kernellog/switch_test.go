package kernellog_test

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/kernellog"
)

// TestErrorsOfNVSwitches are logged, each once, and are no events of a GPU. What a process wrote is
// not the driver's.
func TestErrorsOfNVSwitches(t *testing.T) {
	t.Parallel()
	const text = "3,1,2,-;nvidia-nvswitch0: SXid (PCI:0000:C4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n" +
		"3,2,2,-;nvidia-nvswitch0: SXid (PCI:0000:C4:00.0): 20034, Fatal, Link 31 LTSSM Fault Up\n" +
		"3,3,2,-;nvidia-nvswitch3: SXid (PCI:0000:8b:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error " +
		"(First)\n" +
		"3,4,2,-;nvidia-nvswitch3: SXid (PCI:0000:8b:00.0): 12028, Severity 0 Engine instance 32 Sub-engine " +
		"instance 00\n" + "12,5,2,-;nvidia-nvswitch1: SXid (PCI:0000:c5:00.0): 1, Fatal, x\n" +
		"3,6,2,-;python: nvidia-nvswitch1: SXid (PCI:0000:c5:00.0): 1, Fatal, x\n" +
		"3,7,2,-;nvidia-nvswitch1: SXid (PCI:): x, Fatal\n"
	var said []string
	log := funcr.New(func(_, args string) { said = append(said, args) }, funcr.Options{})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
	defer cancel()
	var xids, sxids []uint64
	r := kernellog.Reader{
		Open: func() (io.ReadCloser, error) {
			return io.NopCloser(io.MultiReader(bytes.NewReader([]byte(text)), strings.NewReader(record(lastXID)))), nil
		},
		Clock:  clocktesting.NewFakeClock(time.Now()), // within one minute
		Switch: func(_ string, sxid uint64, _ bool, _ time.Time) { sxids = append(sxids, sxid) },
		Deliver: func(_ context.Context, e inventory.Event) error {
			xids = append(xids, e.XID)
			cancel()
			return nil
		},
	}
	_ = r.Run(ctx)
	if len(xids) != 1 || xids[0] != lastXID {
		t.Errorf("XIDs %v, want the last alone", xids)
	}
	if !slices.Equal(sxids, []uint64{20034, 20034, 12028}) {
		t.Errorf("told of SXids %v", sxids)
	}
	if len(said) != 2 || !strings.Contains(said[0], `"nvswitch"="0000:c4:00.0" "sxid"=20034 "fatal"=true`) ||
		!strings.Contains(said[1], `"nvswitch"="0000:8b:00.0" "sxid"=12028 "fatal"=false`) {
		t.Errorf("logged: %q", said)
	}
}
