package drivervm_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// A report is what the command prints.
type report struct {
	Verdict, Summary string
	Holders          []preflight.Holder
	Findings         []struct{ Check, Severity, Message string }
}

// preflight runs the command of the device plugin in the guest.
func (g *guest) preflight(args ...string) (r report) {
	g.t.Helper()
	out, err := g.try("run", append([]string{"/tools/" + loader, "--library-path", "/tools/lib",
		"/tools/bin/gpu-device-plugin", "driver", "preflight", "-o", "json"}, args...)...)
	// The status is 2 for a warning, and 3 for an error.
	if err != nil && err.Error() != "exit status 2" && err.Error() != "exit status 3" {
		g.t.Fatalf("driver preflight: %v: %s", err, out)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		g.t.Fatalf("driver preflight: %v: %s", err, out)
	}
	return r
}

// plugGPU gives the guest the files of a GPU, an H200, on the PCI bus. QEMU has no device with the
// number of NVIDIA.
func (g *guest) plugGPU() {
	g.t.Helper()
	g.do("run", "/bin/busybox", "mount", "-t", "tmpfs", "none", "/sys/bus/pci/devices")
	const folder = "/sys/bus/pci/devices/0000:00:1f.0"
	g.do("run", "/bin/busybox", "mkdir", folder)
	for name, text := range map[string]string{"vendor": "0x10de", "device": "0x2335", "class": "0x030200"} {
		g.do("run", "/bin/busybox", "sh", "-c", "echo "+text+" >"+folder+"/"+name)
	}
}

// Preflight says before a change what gpu-driver says when it is asked for it.
func TestPreflight(t *testing.T) {
	m := newMachine(t)
	boot := func() *guest {
		g := m.mustBoot(t)
		g.plugGPU()
		g.serve()
		g.mustCall(driverapi.CallStatus)
		return g
	}
	g := boot()
	g.do("run", "gpu-driver", "swap", oldDriver.version, "--confirm")
	for _, c := range []struct {
		name    string
		append  string // words of the kernel's command line
		to      *driver
		holds   bool // a process has /dev/nvidia0 open
		verdict string
		says    string // by both programs
	}{
		{"a driver that fits", "", &newDriver, false, preflight.Ready, ""},
		{"a process", "", &oldDriver, true, preflight.InUse, "train"},
		{"a driver for another kernel", "", &otherDriver, false, preflight.Blocked, "kernel " + m.kernel},
		{"a kernel that demands signatures", "module.sig_enforce=1", &newDriver, false, preflight.Blocked,
			"not signed, and the kernel refuses them"},
	} {
		if c.append != m.append {
			g.powerOff()
			m.append = c.append
			g = boot()
		}
		pid := ""
		if c.holds {
			pid = g.do("begin", "/bin/train", "open", "/dev/nvidia0")
		}
		r := g.preflight("--to", "/tools/drivers/"+c.to.version)
		t.Logf("%s: %s", c.name, r.Summary)
		if r.Verdict != c.verdict || !strings.Contains(fmt.Sprintf("%+v", r), c.says) {
			t.Errorf("%s: preflight says %s: %s", c.name, r.Verdict, r.Summary)
		}
		_, err := g.call(driverapi.CallSwap, c.to.digest)
		switch {
		case c.verdict == preflight.Blocked:
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: gpu-driver says %v", c.name, err)
			}
			continue
		case err != nil:
			t.Fatalf("%s: gpu-driver says %v", c.name, err)
		case c.holds:
			s := g.await("the process is named", func(s driverapi.Status) bool {
				return s.Change != nil && len(s.Change.Holders) > 0
			})
			for _, r := range []report{r, g.preflight()} { // without a wanted driver, it judges the present one
				if r.Verdict != c.verdict || !reflect.DeepEqual(s.Change.Holders, r.Holders) {
					t.Errorf("%s: preflight says %s and names %+v, and gpu-driver names %+v", c.name, r.Summary,
						r.Holders, s.Change.Holders)
				}
			}
			g.do("end", pid)
		}
		g.await("the driver is loaded", isAt(driverapi.StepUnproven))
		g.mustCall(driverapi.CallConfirm)
	}
	g.powerOff()
}
