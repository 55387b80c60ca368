package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// older is a driver whose library lacks what came later: memory without the driver's part, fabric,
// clocks, system events.
var older = simulator.Fault{Kind: simulator.KindDriver, Driver: "450.80.02"}

// gpuLost is something that happens to a GPU, to show that the daemon still sees it and kubelet
// still learns of it.
var gpuLost = act{inject(xid(79)), *bad(atOnce, "3", "XID 79")}

// surroundingFaults are those of what is around the daemon: rights, the library's age, and files
// that are not what they should be.
var surroundingFaults = []fault{
	{
		name: "NVML may not be used", machine: patient, inject: []simulator.Fault{failing("Init", "NO_PERMISSION")},
		start: &outcome{none: true, hold: suspicion, says: map[string]string{"": `stale: .*privileged`}}, then: arrived,
	},
	{
		name: "events may not be had", inject: []simulator.Fault{failing("DeviceRegisterEvents", "NO_PERMISSION")},
		run: unmoved(nil), start: &stays, then: []act{{inject(asked("reset")), *bad(polled, "3", `Unhealthy \(reset\)`)},
			restoredAll},
	},
	{
		name: "readings may not be had", inject: []simulator.Fault{failing("DeviceGetFieldValues", "NO_PERMISSION")},
		run: unmoved(nil), start: &stays, then: []act{gpuLost, restoredAll},
	},
	{
		name: "memory of MIG GPUs may not be read", machine: machine{profile: "a100-mig-mixed",
			args: []string{"--mig-strategy", "mixed"}},
		inject: []simulator.Fault{failing("DeviceGetMemoryInfo", "NO_PERMISSION")},
		start: &outcome{gone: []string{"2", "3", "4", "5", "6", "7"}, hold: suspicion,
			says: map[string]string{"": `left out: .*add the capability SYS_ADMIN`}},
	},
	{
		name: "a library lacks functions", inject: []simulator.Fault{older}, start: &stays, then: []act{gpuLost},
	},
	{
		name: "a library that lacks functions is installed", inject: []simulator.Fault{older}, do: deed{"", startedAnew},
		run: &outcome{within: grace + starting, hold: suspicion}, then: []act{gpuLost},
	},
	{
		name: "nobody reads standard error", machine: machine{unread: true}, place: deed{"the pipe is full", fill},
		run: unmoved(nil), start: &stays, then: []act{gpuLost, restored},
	},
	{
		name: "the configuration is a FIFO", machine: machine{config: "health: {recovery: auto}\n"}, place: fifo("config.yaml"),
		refused: `config.yaml: is a FIFO, not a regular file`,
		run:     unmoved(map[string]string{"": `configuration: .*is a FIFO`}), then: []act{gpuLost, restored},
	},
	{
		name: "the file of faults is a FIFO", place: fifo("state/faults.json"),
		run: unmoved(nil), start: &stays, then: []act{gpuLost, restored},
	},
	{
		name: "a FIFO is at the control socket", machine: machine{mute: true}, place: fifo("control.sock"), do: deed{"",
			unmute},
		run: unmoved(nil), start: &stays, then: []act{gpuLost, restored},
	},
}

// fifo is the deed of putting a FIFO, into which nobody writes, in the place of a file.
func fifo(name string) deed {
	return deed{"a FIFO at " + name, func(_ context.Context, s *stage) error {
		path := s.Path(name)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), syscall.Mkfifo(path, 0o600))
	}}
}

// fill writes into the pipe that is the daemon's standard error what there is room for.
func fill(_ context.Context, s *stage) error {
	// Another opening of the pipe: that it does not block is not for the daemon's.
	pipe, err := syscall.Open(fmt.Sprintf("/proc/self/fd/%d", s.Stderr.Fd()), syscall.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(pipe) }()
	for n := 1 << 16; n > 0; {
		if _, err := syscall.Write(pipe, make([]byte, n)); errors.Is(err, syscall.EAGAIN) {
			n /= 2
		} else if err != nil {
			return err
		}
	}
	return nil
}

// unmute sees that kubelet goes on having all devices while nobody can call the daemon, and has the
// control socket come back.
func unmute(ctx context.Context, s *stage) error {
	const gpus = 8
	healthy := func() bool {
		n := 0
		for _, ok := range s.kubelet() {
			if ok {
				n++
			}
		}
		return n == gpus
	}
	began, cancel := context.WithTimeout(ctx, starting)
	defer cancel()
	if s.WaitFor(began, healthy) != nil {
		return fmt.Errorf("kubelet has %v, and not %d Healthy devices", s.kubelet(), gpus)
	}
	during, end := context.WithTimeout(ctx, suspicion)
	defer end()
	if s.WaitFor(during, func() bool { return !healthy() }) == nil {
		return fmt.Errorf("kubelet has %v, and not %d Healthy devices", s.kubelet(), gpus)
	}
	if err := os.Remove(s.ControlSocket()); err != nil {
		return err
	}
	return node.Poll(ctx, 15*time.Second, s.Running(), func(ctx context.Context) error {
		_, err := s.devices(ctx)
		return err
	})
}
