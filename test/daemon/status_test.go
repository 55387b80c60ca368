package daemon

import (
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestStatusTellsOfTheDriver: of calls that do not return, and of GPUs that give no events.
func TestStatusTellsOfTheDriver(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.broken(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceRegisterEvents", Return: "NO_PERMISSION"})
	s.start()
	s.shows(8, 8)
	tells := func(what string, holds func(hanging int, unwatched []string) bool) {
		s.eventually(what, func() bool {
			var now struct {
				Hanging   int      `json:"hanging"`
				Unwatched []string `json:"unwatched"`
			}
			err := control.Call(t.Context(), s.ControlSocket(), "status", nil, &now)
			return err == nil && holds(now.Hanging, now.Unwatched)
		})
	}
	tells("GPU 3 is without events", func(hanging int, unwatched []string) bool {
		return hanging == 0 && len(unwatched) == 1 && strings.HasPrefix(unwatched[0], noEvents("GPU 3", "nvmlDeviceRegisterEvents: "))
	})
	s.inject(simulator.Fault{Kind: simulator.KindHang})
	s.signal(s.Running(), syscall.SIGHUP)
	tells("a look and the wait for events hang", func(hanging int, unwatched []string) bool {
		return hanging == 2 && len(unwatched) == 2 && unwatched[1] == noEvents("all GPUs", "nvmlEventSetWait does not return)")
	})
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	tells("nothing hangs, and the other GPUs give events", func(hanging int, unwatched []string) bool {
		return hanging == 0 && len(unwatched) == 1
	})
}

// noEvents is how status names GPUs without driver events.
func noEvents(gpus, reason string) string {
	return gpus + ": no driver events; faults are found by polling only (" + reason
}

// TestGPUThatHangsFromTheStart: the others are served, also by a second process, and status names
// the call. `make bench` prints how soon.
func TestGPUThatHangsFromTheStart(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.broken(simulator.Fault{Kind: simulator.KindHang, GPU: "3", Call: "DeviceGetHandleByIndex"})
	for range 2 {
		s.start()
		s.shows(7, 7)
		s.eventually("status names the call and its GPU", func() bool {
			var now told.Status
			err := control.Call(t.Context(), s.ControlSocket(), "status", nil, &now)
			return err == nil && len(now.Calls) == 1 && now.Calls[0].Function == "nvmlDeviceGetHandleByIndex" &&
				*now.Calls[0].GPU == 3 &&
				len(now.Retries) == 1 && now.Retries[0].Index == 3 && !now.Retries[0].Next.IsZero()
		})
		daemon := s.Running()
		s.signal(daemon, syscall.SIGTERM)
		s.ends(daemon)
	}
}
