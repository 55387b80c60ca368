package offer_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestDevicesWaitForUVM: nvidia-uvm may come seconds after the nodes of GPUs. A container that is
// made before cannot use CUDA as long as it lives, unless NVIDIA's runtime loads the module for it.
func TestDevicesWaitForUVM(t *testing.T) {
	t.Parallel()
	const both = "GPU-0 GPU-1 | "
	held := func(p resource.Plan) bool { return len(p.LeftOut) == 2 }
	warned := func(p resource.Plan) bool {
		return len(p.LeftOut) == 0 && slices.ContainsFunc(p.Warnings, func(w string) bool {
			return strings.Contains(w, "/dev/nvidia-uvm is not there") && strings.Contains(w, "nvidia-modprobe")
		})
	}
	for name, tt := range map[string]struct {
		edits   containeredits.Options
		control inventory.ControlNodes
		majors  inventory.Majors
		waits   bool
	}{
		"CDI":                      {edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}}, control: inventory.NodeControl, waits: true},
		"CDI, its number is known": {edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}}, control: inventory.NodeControl, majors: inventory.Majors{UVM: 510}},
		"CDI, no node can be seen": {edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}}},
		"device nodes": {edits: containeredits.Options{DeviceNodes: true}, control: inventory.NodeControl,
			majors: inventory.Majors{UVM: 510}, waits: true},
		"device nodes, it is there": {edits: containeredits.Options{DeviceNodes: true},
			control: inventory.NodeControl | inventory.NodeUVM},
		"by the environment, and alone": {control: inventory.NodeControl},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, true)
			n.specs = &slowDisk{written: map[string]bool{"GPU-0": true, "GPU-1": true}, release: closed()}
			c := whole()
			if c.Edits = tt.edits; c.Edits.Strategies == nil {
				c.Edits.Strategies = []containeredits.Strategy{containeredits.EnvVar}
			}
			n.configs.Publish(c)
			s := gpus()
			s.Control, s.Majors = tt.control, tt.majors
			n.snapshots.Publish(s)
			n.start(t)
			if !tt.waits {
				n.await(t, both, gpu)
				return
			}
			n.offers(t, held)
			s.Generation, s.Control = 2, s.Control|inventory.NodeUVM
			n.snapshots.Publish(s)
			n.await(t, both, gpu)
			s.Generation, s.Control = 3, inventory.NodeControl
			n.snapshots.Publish(s)
			n.offers(t, held)
			n.clock.Step(inventory.UVMPatience - time.Second)
			if warned(n.daemon.Offered().Value()) {
				t.Error("offered before it was waited for long enough")
			}
			n.clock.Step(time.Second)
			n.offers(t, warned)
		})
	}
}

// offers waits until the plan that is offered is as it should be.
func (n *node) offers(t *testing.T, right func(resource.Plan) bool) {
	t.Helper()
	poll.Latest(t, "offered", n.daemon.Offered(), right)
}

// closed is what releases a disk that does not wait.
func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
