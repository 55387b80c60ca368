package drivervm_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// A user of the driver is named with what makes it let go, and the old driver stays whole. When the
// user is gone, the change goes on.
func TestUsers(t *testing.T) {
	m := newMachine(t)
	g := m.mustBoot(t)
	g.serve()
	g.mustCall(driverapi.CallStatus)
	g.do("run", "gpu-driver", "swap", oldDriver.version, "--confirm")
	present, other := &oldDriver, &newDriver
	begin := func(how, file string) func() (preflight.Holder, func()) {
		return func() (preflight.Holder, func()) {
			pid := g.do("begin", "/bin/train", how, file)
			return preflight.Holder{Kind: preflight.KindProcess, Name: "train (" + pid + ")",
				Release: "end the process: kill " + pid}, func() { g.do("end", pid) }
		}
	}
	for _, c := range []struct {
		use   string
		begin func() (preflight.Holder, func())
	}{
		{"module nvidia", func() (preflight.Holder, func()) {
			g.do("load", "/tools/gdrdrv.ko")
			return preflight.Holder{Kind: preflight.KindModule, Name: "gdrdrv",
				Release: "unload the module: modprobe -r gdrdrv"}, func() { g.do("unload", "gdrdrv") }
		}},
		{"/dev/nvidia0", begin("open", "/dev/nvidia0")},
		{"/dev/nvidiactl", begin("open", "/dev/nvidiactl")},
		{"libcuda", begin("map", driverapi.DefaultDirectory+"/"+driverapi.Current+
			"/usr/lib/x86_64-linux-gnu/libcuda.so.1")},
	} {
		want, end := c.begin()
		g.mustCall(driverapi.CallSwap, other.digest)
		g.await(want.Name+" is named", func(s driverapi.Status) bool {
			return s.Change != nil && s.Change.Step == driverapi.StepUnloading &&
				s.Change.Reason == "the driver is in use by "+want.Kind+" "+want.Name &&
				slices.ContainsFunc(s.Change.Holders, func(h preflight.Holder) bool {
					return h.Kind == want.Kind && h.Name == want.Name && h.Release == want.Release &&
						slices.Contains(h.Uses, c.use)
				})
		})
		g.isLoaded(present)
		end()
		g.await("the change goes on without "+want.Name, isAt(driverapi.StepUnproven))
		g.isLoaded(other)
		g.mustCall(driverapi.CallConfirm)
		present, other = other, present
	}

	// Services are stopped, and run again with the new driver.
	services := []string{"nvidia-persistenced.service", "nvidia-fabricmanager.service"}
	pids := func(service string) string {
		text, _ := g.try("read", "/sys/fs/cgroup/system.slice/"+service+"/cgroup.procs") // none while it is stopped
		return strings.TrimSpace(text)
	}
	before := map[string]string{}
	for _, service := range services {
		g.do("run", "/usr/bin/systemctl", "start", service)
		before[service] = pids(service)
	}
	g.mustCall(driverapi.CallSwap, other.digest)
	g.await("the other driver is loaded beside services", isAt(driverapi.StepUnproven))
	g.isLoaded(other)
	for _, service := range services {
		if now := pids(service); now == "" || now == before[service] {
			t.Errorf("%s had the processes %q, and has %q\n%s", service, before[service], now, g.tail())
		}
	}
	g.mustCall(driverapi.CallConfirm)
	present, other = other, present

	// Beside a process that stays, a service is stopped as well, and runs again when the change is left
	// to the next boot.
	_, _ = begin("open", "/dev/nvidia0")()
	g.mustCall(driverapi.CallSwap, other.digest)
	g.await("the services have ended, and the process is named", func(s driverapi.Status) bool {
		return isAt(driverapi.StepUnloading)(s) && len(s.Change.Holders) == 1 &&
			pids(services[0]) == "" && pids(services[1]) == ""
	})
	g.mustCall(driverapi.CallNextBoot, other.digest)
	g.await("the change is left to the next boot", isAt(driverapi.StepNextBoot))
	g.isLoaded(present)
	for _, service := range services {
		if pids(service) == "" {
			t.Errorf("%s does not run until the next boot", service)
		}
	}
	g.powerOff()
	g = m.mustBoot(t)
	g.serve()
	g.await("the other driver is loaded", isAt(driverapi.StepUnproven))
	g.isLoaded(other)
	g.powerOff()
}
