package drivervm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

// A node is a machine whose power is cut again and again while its driver is changed.
type node struct {
	t      *testing.T
	m      *machine
	random *rand.Rand
	// allowed are the drivers of which one must be loaded: the confirmed one, and that of a change that
	// the node may or may not have ended.
	allowed []*driver
	doing   string   // the last step or call
	history []string // calls, what was loaded, and power cuts, for the report of a failure
	// calls is how many calls are made before the power is cut during the next one or after it.
	calls int
}

// drivers between which a node changes. One more than a node keeps, so that folders are copied and
// removed.
var drivers = []*driver{&oldDriver, &newDriver, &thirdDriver}

func driverOf(digest string) *driver {
	i := slices.IndexFunc(drivers, func(d *driver) bool { return d.digest == digest })
	if i < 0 {
		return &driver{version: "none", digest: digest}
	}
	return drivers[i]
}

// After a power cut at any write, the next boot loads the old driver or the new one, whole. What
// gpu-driver has answered stays.
func TestPowerCuts(t *testing.T) {
	n := &node{t: t, m: newMachine(t), random: newRandom(t)}
	g := n.m.mustBoot(t)
	g.serve()
	g.mustCall(driverapi.CallStatus)
	g.do("run", "gpu-driver", "swap", oldDriver.version, "--confirm")
	g.powerOff()
	n.allowed = []*driver{&oldDriver}
	where := map[string]int{} // the last step or call before the power was cut → power cuts
	begin := time.Now()
	for i := range *cutsFlag {
		// A boot has about 50 writes and flushes before the driver is loaded.
		cutAt := 1 + n.random.IntN(80)
		if n.calls = n.random.IntN(3); n.calls > 0 {
			cutAt = 0
		}
		n.doing = "boot"
		g, err := n.m.boot(t, cutAt)
		if err == nil {
			err = n.work(g)
		}
		if err != nil && !errors.Is(err, errOff) {
			t.Fatalf("power cut %d: at write %d of %d, after %s: %v\n%s\n%s", i, cutAt, n.m.disk.written(), n.doing, err,
				strings.Join(n.history, "\n"), g.console.String())
		}
		if strings.Contains(g.console.String(), "EXT4-fs error") {
			t.Fatalf("the file system is damaged\n%s", g.console.String())
		}
		g.cutPower()
		n.m.disk.powerCut(n.random)
		where[n.doing]++
		n.history = append(n.history, "power cut after "+n.doing)
	}
	t.Logf("%d power cuts in %v; after: %v", *cutsFlag, time.Since(begin).Round(time.Second), where)

	// At the end the node changes its driver as any other.
	n.calls = 0 // no more power cuts
	g = n.m.mustBoot(t)
	for {
		n.doing = "the end"
		s, err := n.settled(g)
		if err != nil {
			t.Fatalf("%v\n%s", err, g.tail())
		}
		if s.Change == nil {
			break
		}
		switch err := n.next(g, s); {
		case errors.Is(err, errOff) && s.Change.Step == driverapi.StepNextBoot: // it was restarted for the change
			g = n.m.mustBoot(t)
		case err != nil:
			t.Fatalf("%v\n%s", err, g.tail())
		}
	}
	for _, d := range drivers {
		g.do("run", "gpu-driver", "swap", d.version, "--confirm")
		g.isLoaded(d)
	}
	g.powerOff()
}

// work changes the driver of a guest until the power is cut.
func (n *node) work(g *guest) error {
	const most = 20 // calls
	for range most {
		s, err := n.settled(g)
		if err != nil {
			return err
		}
		if err := n.next(g, s); err != nil {
			return err
		}
	}
	return nil
}

// settled waits until nothing is to be done but a call, and returns the status. The error says what
// is wrong with the driver that is loaded.
func (n *node) settled(g *guest) (s driverapi.Status, err error) {
	if !g.isServing {
		g.isServing = true
		if _, err := g.try("start", "/tools/bin/gpu-driver", "serve", "--sources", "/tools/drivers"); err != nil {
			return s, err
		}
	}
	for end := time.Now().Add(waitLimit); ; time.Sleep(20 * time.Millisecond) {
		if s, err = g.call(driverapi.CallStatus); err != nil {
			return s, err
		}
		rests := s.Change == nil && s.LoadedVersion != ""
		if c := s.Change; c != nil {
			n.doing = string(c.Step)
			rests = c.Step == driverapi.StepUnproven || c.Step == driverapi.StepFailed || c.Step == driverapi.StepNextBoot
		}
		if rests && s.LoadedVersion != "" {
			if _, err := g.try("open", "/dev/nvidia-uvm-tools"); err == nil { // the last act of loading
				break
			} else if errors.Is(err, errOff) {
				return s, err
			}
		}
		if time.Now().After(end) {
			g.stacks()
			return s, fmt.Errorf("nothing is loaded after %v: %+v, change %+v", waitLimit, s, s.Change)
		}
	}
	loaded := driverOf(s.LoadedDigest)
	n.history = append(n.history, fmt.Sprintf("loaded %s, change %+v", loaded.version, s.Change))
	if !slices.Contains(n.allowed, loaded) {
		return s, fmt.Errorf("driver %s is loaded, and may not be: %+v, change %+v", loaded.version, s, s.Change)
	}
	want := ""
	for _, name := range []string{"nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm"} {
		want += name + " " + loaded.version + "\n"
	}
	if got, err := g.try("driver"); err != nil || got != want {
		return s, orOff(err, fmt.Errorf("the loaded modules are\n%s", got))
	}
	if s.Current != s.LoadedDigest {
		return s, fmt.Errorf("driver %s is loaded, and the next boot loads %s", loaded.version, driverOf(s.Current).version)
	}
	if out, err := g.try("run", "gpu-driver", "verify", driverapi.DefaultDirectory+"/"+driverapi.Current+"/"); err != nil {
		return s, orOff(err, fmt.Errorf("the folder of driver %s: %w: %s", loaded.version, err, out))
	}
	switch c := s.Change; {
	case c == nil:
		n.allowed = []*driver{loaded}
	case c.Step == driverapi.StepFailed || c.Step == driverapi.StepNextBoot:
		if c.From != s.LoadedDigest {
			return s, fmt.Errorf("driver %s is loaded, and the change has %+v", loaded.version, c)
		}
	}
	return s, nil
}

// orOff returns errOff if the power is off, and else the other error.
func orOff(err, other error) error {
	if errors.Is(err, errOff) {
		return err
	}
	return other
}

// next does what can be done next.
func (n *node) next(g *guest, s driverapi.Status) error {
	present := driverOf(s.LoadedDigest)
	call := func(name string, digest string) error {
		n.doing = name
		n.arm(g)
		_, err := g.call(name, digest)
		n.history = append(n.history, fmt.Sprintf("%s %s: %v", name, driverOf(digest).version, err))
		return err
	}
	even := n.random.IntN(2) == 0
	c := s.Change
	switch {
	case c == nil:
		others := slices.DeleteFunc(slices.Clone(drivers), func(d *driver) bool { return d == present })
		to := others[n.random.IntN(len(others))]
		name := driverapi.CallSwap
		if n.random.IntN(4) == 0 {
			name = driverapi.CallNextBoot
		}
		n.allowed = []*driver{present, to}
		return call(name, to.digest)
	case c.Step == driverapi.StepUnproven && even:
		if err := call(driverapi.CallConfirm, c.To); err != nil {
			return err
		}
		n.allowed = []*driver{present}
	case c.Step == driverapi.StepUnproven:
		return call(driverapi.CallRevert, c.To)
	case c.Step == driverapi.StepNextBoot && even:
		n.doing = "restart"
		n.arm(g)
		g.powerOff()
		return errOff
	default:
		if err := call(driverapi.CallCancel, ""); err != nil {
			return err
		}
		n.allowed = []*driver{present}
	}
	return nil
}

// arm lets the power be cut soon if enough calls were made: at a write of the guest, or after a time,
// because loading and unloading modules writes nothing.
func (n *node) arm(g *guest) {
	if n.calls--; n.calls != 0 {
		return
	}
	const writes = 170 // of a change whose folder is copied
	if n.random.IntN(3) > 0 {
		n.m.disk.arm(1 + n.random.IntN(writes))
		return
	}
	const most = 800 * time.Millisecond
	time.AfterFunc(time.Duration(n.random.Int64N(int64(most))), func() { _ = g.cmd.Process.Kill() })
}
