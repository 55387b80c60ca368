package drivervm_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

// serve starts gpu-driver.
func (g *guest) serve() {
	g.t.Helper()
	g.do("start", "/tools/bin/gpu-driver", "serve", "--sources", "/tools/drivers")
}

// mustCall makes a call that must not fail.
func (g *guest) mustCall(call string, args ...string) driverapi.Status {
	g.t.Helper()
	s, err := g.call(call, args...)
	if err != nil {
		g.t.Fatalf("%s %s: %v\n%s", call, strings.Join(args, " "), err, g.tail())
	}
	return s
}

// waitLimit limits a wait for gpu-driver: 60 s for a swap, as the issue of this program has it.
const waitLimit = time.Minute

// await polls the status until it is as it should be.
func (g *guest) await(what string, is func(driverapi.Status) bool) driverapi.Status {
	g.t.Helper()
	var last driverapi.Status
	for end := time.Now().Add(waitLimit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if last = g.mustCall(driverapi.CallStatus); is(last) {
			return last
		}
	}
	g.stacks()
	g.t.Fatalf("not within %v: %s; the status is %+v, change %+v\n%s", waitLimit, what, last, last.Change,
		g.console.String())
	return last
}

func isAt(step driverapi.Step) func(driverapi.Status) bool {
	return func(s driverapi.Status) bool { return s.Change != nil && s.Change.Step == step }
}

// isLoaded reports an error unless all four modules of a driver are loaded, the driver is that of
// the next boot, and its device nodes have the numbers of the kernel.
func (g *guest) isLoaded(d *driver) {
	g.t.Helper()
	want := ""
	for _, name := range []string{"nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm"} {
		want += name + " " + d.version + "\n"
	}
	if got := g.do("driver"); got != want {
		g.t.Errorf("the loaded modules are\n%sand not\n%s", got, want)
	}
	for _, node := range []string{"nvidiactl", "nvidia0", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools",
		"nvidia-caps/nvidia-cap1"} {
		if _, err := g.try("open", "/dev/"+node); err != nil {
			g.t.Errorf("open /dev/%s: %v", node, err)
		}
	}
	if s := g.mustCall(driverapi.CallStatus); s.Current != d.digest || s.LoadedDigest != d.digest ||
		s.LoadedVersion != d.version {
		g.t.Errorf("loaded %s, version %s, next boot %s; want %s of version %s", s.LoadedDigest, s.LoadedVersion,
			s.Current, d.digest, d.version)
	}
	firmware := strings.TrimSpace(g.do("read", "/sys/module/firmware_class/parameters/path"))
	if want := driverapi.DefaultDirectory + "/" + d.digest + "/lib/firmware"; firmware != want {
		g.t.Errorf("the kernel looks for firmware in %q, not in %q", firmware, want)
	}
}

// A node gets its first driver, and other ones.
func TestSwap(t *testing.T) {
	m := newMachine(t)
	g := m.mustBoot(t)
	ready := since(g)
	g.serve()
	s := g.await("gpu-driver answers", func(driverapi.Status) bool { return true })
	t.Logf("the guest was ready after %v, gpu-driver after %v", ready, since(g))
	if s.LoadedVersion != "" || s.Current != "" || len(s.Refusals) > 0 {
		t.Errorf("a node without a driver: %+v", s)
	}

	// The first driver, by hand.
	begin := time.Now()
	out := g.do("run", "gpu-driver", "swap", oldDriver.version, "--confirm")
	t.Logf("first driver after %v", time.Since(begin).Round(100*time.Millisecond))
	if !strings.Contains(out, "loaded     "+oldDriver.version) {
		t.Errorf("gpu-driver swap prints:\n%s", out)
	}
	g.isLoaded(&oldDriver)

	// While a process has the driver open, the old driver stays whole.
	g.do("hold", "/dev/nvidia-uvm")
	g.mustCall(driverapi.CallSwap, newDriver.digest)
	s = g.await("the process is named", func(s driverapi.Status) bool {
		return s.Change != nil && s.Change.Step == driverapi.StepUnloading && len(s.Change.Holders) > 0
	})
	if h := s.Change.Holders[0]; !strings.Contains(fmt.Sprint(h), "nvidia-uvm") || !strings.Contains(s.Change.Reason, h.Name) {
		t.Errorf("in use by %+v; reason %q", h, s.Change.Reason)
	}
	g.isLoaded(&oldDriver)
	g.mustCall(driverapi.CallCancel)
	g.do("let-go")
	begin = time.Now()
	g.mustCall(driverapi.CallSwap, newDriver.digest)
	g.await("the new driver is loaded", isAt(driverapi.StepUnproven))
	took := time.Since(begin)
	t.Logf("the swap took %v", took.Round(100*time.Millisecond))
	g.isLoaded(&newDriver)
	g.mustCall(driverapi.CallConfirm)

	// A driver that does not prove CUDA is taken back.
	g.mustCall(driverapi.CallSwap, oldDriver.digest)
	g.await("the other driver is loaded", isAt(driverapi.StepUnproven))
	g.mustCall(driverapi.CallRevert, "", "CUDA does not work")
	s = g.await("the driver is taken back", isAt(driverapi.StepFailed))
	if s.Change.Reason != "CUDA does not work" {
		t.Errorf("failed with %q", s.Change.Reason)
	}
	g.isLoaded(&newDriver)
	g.mustCall(driverapi.CallCancel)

	// So is one of whose modules the second is refused.
	g.mustCall(driverapi.CallSwap, failsDriver.digest)
	s = g.await("the refused driver is taken back", isAt(driverapi.StepFailed))
	if !strings.Contains(s.Change.Reason, "refuses the module nvidia_uvm") ||
		!strings.Contains(s.Change.Reason, "input/output error") {
		t.Errorf("failed with %q", s.Change.Reason)
	}
	g.isLoaded(&newDriver)
	g.mustCall(driverapi.CallCancel)

	// A restart loads the current driver, before anybody asks.
	g.powerOff()
	g = m.mustBoot(t)
	g.serve()
	g.await("the driver is loaded", func(s driverapi.Status) bool { return s.LoadedVersion == newDriver.version })
	t.Logf("after a restart the driver was loaded %v after the power was on", since(g))
	g.await("the device nodes are there", func(driverapi.Status) bool {
		_, err := g.try("open", "/dev/nvidia-uvm-tools")
		return err == nil
	})
	g.isLoaded(&newDriver)

	// The next boot loads the other one.
	g.do("hold", "/dev/nvidiactl")
	g.mustCall(driverapi.CallNextBoot, oldDriver.digest)
	g.await("the driver of the next boot is placed", isAt(driverapi.StepNextBoot))
	if got := g.do("driver"); strings.Contains(got, oldDriver.version) {
		t.Errorf("next-boot has changed the loaded driver:\n%s", got)
	}
	g.powerOff()
	g = m.mustBoot(t)
	g.serve()
	g.await("the other driver is loaded", isAt(driverapi.StepUnproven))
	g.isLoaded(&oldDriver)
	g.mustCall(driverapi.CallConfirm)
	g.powerOff()
}

// What the kernel refuses is refused before anything is unloaded, and the kernel's own words are
// explained.
func TestRefusals(t *testing.T) {
	m := newMachine(t)
	g := m.mustBoot(t)
	g.serve()
	g.mustCall(driverapi.CallSwap, oldDriver.digest)
	g.await("the driver is loaded", isAt(driverapi.StepUnproven))
	g.mustCall(driverapi.CallConfirm)

	// A driver for another kernel.
	_, err := g.call(driverapi.CallSwap, otherDriver.digest)
	if err == nil || !strings.Contains(err.Error(), "has no modules for the kernel "+m.kernel) {
		t.Errorf("a driver for another kernel: %v", err)
	}
	g.isLoaded(&oldDriver)
	g.powerOff()
	g = m.mustBoot(t)
	booted, other := releases(t)
	_, err = g.try("load", "/tools/drivers/"+otherDriver.version+"/lib/modules/"+other+"/nvidia.ko")
	// The version of a symbol is compared before the release.
	log := g.log()
	if err == nil || err.Error() != "exec format error" ||
		!strings.Contains(log, "version magic") && !strings.Contains(log, "disagrees about version of symbol") {
		t.Errorf("the kernel says %v about a module for another kernel\n%s", err, log)
	}
	g.powerOff()

	// A kernel that demands signed modules.
	m.append = "module.sig_enforce=1"
	g = m.mustBoot(t)
	g.serve()
	s := g.await("the refusal is explained", func(s driverapi.Status) bool {
		return slices.ContainsFunc(s.Folders, func(f driverapi.Folder) bool {
			return f.Digest == oldDriver.digest && strings.Contains(f.Problem, "sign")
		})
	})
	for _, f := range s.Folders {
		t.Logf("driver %s: %s", f.Version, f.Problem)
	}
	if s.LoadedVersion != "" || s.Current != oldDriver.digest {
		t.Errorf("loaded %q, next boot %q", s.LoadedVersion, s.Current)
	}
	if !strings.Contains(g.console.String(), "key was rejected by service") {
		t.Errorf("the kernel's own words are not in the log\n%s", g.tail())
	}
	g.powerOff()
	m.append = ""

	// A kernel for which the driver has no modules.
	m.kernel = other
	g = m.mustBoot(t)
	g.serve()
	g.await("the missing modules are named", func(s driverapi.Status) bool {
		return s.LoadedVersion == "" && slices.ContainsFunc(s.Folders, func(f driverapi.Folder) bool {
			return f.Digest == oldDriver.digest && strings.Contains(f.Problem, "has no modules for the kernel "+other)
		})
	})
	// There is one that has.
	g.mustCall(driverapi.CallSwap, otherDriver.digest)
	g.await("the driver for this kernel is loaded", isAt(driverapi.StepUnproven))
	g.isLoaded(&otherDriver)
	g.mustCall(driverapi.CallRevert, "", "the node goes back to the other kernel")
	s = g.await("the change has failed", isAt(driverapi.StepFailed))
	if !strings.Contains(s.Change.Reason, "the former driver cannot be loaded either") {
		t.Errorf("failed with %q", s.Change.Reason)
	}
	g.mustCall(driverapi.CallCancel)
	g.powerOff()
	m.kernel = booted
	g = m.mustBoot(t)
	g.serve()
	g.await("the driver is back", func(s driverapi.Status) bool { return s.LoadedDigest == oldDriver.digest })
	g.powerOff()
}

// A node that the new driver restarts for ever comes back with the old driver.
func TestDriverThatPanics(t *testing.T) {
	m := newMachine(t)
	g := m.mustBoot(t)
	g.serve()
	g.mustCall(driverapi.CallSwap, oldDriver.digest)
	g.await("the driver is loaded", isAt(driverapi.StepUnproven))
	g.mustCall(driverapi.CallConfirm)
	g.mustCall(driverapi.CallSwap, panicDriver.digest)
	const most = 5
	for boots := 0; ; boots++ {
		if boots > most {
			t.Fatalf("after %d restarts the node still loads the driver that panics\n%s", boots, g.tail())
		}
		hasPanicked := false
		for end := time.Now().Add(waitLimit); time.Now().Before(end) && !hasPanicked; time.Sleep(50 * time.Millisecond) {
			s, err := g.call(driverapi.CallStatus)
			if hasPanicked = err != nil; !hasPanicked && isAt(driverapi.StepFailed)(s) {
				t.Logf("after %d restarts: %s", boots, s.Change.Reason)
				g.isLoaded(&oldDriver)
				g.powerOff()
				return
			}
		}
		if !hasPanicked {
			t.Fatalf("the node neither panics nor comes back\n%s", g.tail())
		}
		if !strings.Contains(g.console.String(), "a driver that panics") {
			t.Fatalf("the guest ended without the panic\n%s", g.tail())
		}
		g.cutPower()
		g = m.mustBoot(t)
		g.serve()
	}
}
