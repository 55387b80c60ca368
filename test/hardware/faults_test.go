package hardware_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// faultLimit is how soon a fault has to be counted after CUDA told the program of it.
const faultLimit = 2 * time.Second

// TestFaultsOfPrograms: a fault of a program is counted once and soon, and the GPU stays Healthy.
func TestFaultsOfPrograms(t *testing.T) {
	for name, args := range map[string][]string{"events": nil, "events and kernel log": {"--kernel-log"}} {
		t.Run(name, func(t *testing.T) {
			m := start(t, args...)
			gpu, mark := m.gpu(), m.Mark()
			if len(args) > 0 {
				if f, err := os.Open("/dev/kmsg"); err != nil {
					t.Skipf("the kernel's log cannot be read: %v", err)
				} else {
					_ = f.Close()
				}
			}
			for _, fault := range []struct {
				name string
				xids []string // of which the driver reports one: it depends on the model
			}{{"misaligned", []string{"XID 13"}}, {"address", []string{"XID 31"}}, {"trap", []string{"XID 43", "XID 13"}}} {
				m.strike(gpu, fault.name, fault.xids, len(args) > 0)
			}
			for xid, n := range m.xids() {
				if n != 1 {
					t.Errorf("%s was counted %d times, and came once", xid, n)
				}
			}
			m.stayedHealthy(mark)
		})
	}
}

// strike has a program make a mistake and waits until the daemon has counted it, and has heard of
// it in each way.
func (m *machine) strike(gpu, fault string, wanted []string, both bool) {
	m.Helper()
	before, heard := m.xids(), m.heard()
	p := compute(m.T, gpu, "fault", fault)
	a := p.next(m.T)
	if a.Error == "" || strings.Contains(a.Error, ":") {
		m.Fatalf("%s: %s", fault, a.Error)
	}
	told := time.Now()
	var xid string
	poll.Until(m, fault+" is counted", func() bool {
		for x, n := range m.xids() {
			if n > before[x] {
				xid = x
			}
		}
		return xid != ""
	})
	took := time.Since(told)
	p.end(m.T)
	m.Logf("%s: CUDA says %s; %s was counted %v after that", fault, a.Error, xid, took.Round(time.Millisecond))
	if !slices.Contains(wanted, xid) {
		m.Errorf("%s is %s, want one of %s", fault, xid, wanted)
	}
	if took > faultLimit {
		m.Errorf("%s was counted %v after the program knew of it, want at most %v", xid, took, faultLimit)
	}
	if both {
		poll.Until(m, fault+" came as an event and in the kernel's log", func() bool {
			now := m.heard()
			return now[0] > heard[0] && now[1] > heard[1]
		})
		now := m.heard()
		m.Logf("%s: %d events of the driver, %d lines of the kernel's log", fault, now[0]-heard[0], now[1]-heard[1])
	}
}

// xids returns how often each XID was counted on all GPUs, as "XID 31".
func (m *machine) xids() map[string]int {
	m.Helper()
	counts := map[string]int{}
	for _, g := range m.status().GPUs {
		for _, e := range g.Events {
			what, rest, _ := strings.Cut(e, " × ")
			var n int
			if _, err := fmt.Sscan(rest, &n); err == nil && strings.HasPrefix(what, "XID") {
				counts[what] += n
			}
		}
	}
	return counts
}

// heard returns how many XIDs the daemon's log has that the driver told and that the kernel's log
// told.
func (m *machine) heard() (n [2]int) {
	m.Helper()
	log, err := os.ReadFile(m.LogPath())
	if err != nil {
		m.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		switch {
		case !strings.Contains(line, `"Event"`) || !strings.Contains(line, `kind="xid"`):
		case strings.Contains(line, `gpu=""`):
			n[1]++
		default:
			n[0]++
		}
	}
	return n
}
