package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// partitions returns how many MIG devices are in slices that are made for claims.
func (c *claimable) partitions() (count int) {
	for _, s := range c.api.Slices() {
		for _, d := range s.Spec.Devices {
			if len(d.ConsumesCounters) > 0 && len(d.Taints) == 0 {
				count++
			}
		}
	}
	return count
}

// TestDynamicMIG: two pods with small MIG devices and one with half a GPU run on a GPU in MIG mode,
// each with device nodes of its own; a killed daemon goes on with them; what was made ends with the
// claims, and a layout may have the GPU then, which it may not before.
func TestDynamicMIG(t *testing.T) {
	t.Parallel()
	const layouts = "\nmig: {enabled: true, layout: %s}"
	c := newClaimable(t, "plugin}"+strings.TrimSuffix(fmt.Sprintf(layouts, "all-enabled"), "}"))
	c.becomesReady("")
	c.eventually("all GPUs are in MIG mode", func() bool { return strings.Contains(c.command("mig", "status"), ": success") })
	c.mode("{mode: dra, dynamicMIG: true}" + fmt.Sprintf(layouts, "all-enabled"))
	c.eventually("the MIG devices that can be made are in slices", func() bool { return c.partitions() == 8*25 })

	devices := []string{"gpu-2-mig-1g10gb-19-6", "gpu-2-mig-1g10gb-19-4", "gpu-2-mig-3g40gb-9-0"}
	uids, nodes := map[string]string{}, map[string]string{}
	for _, device := range devices {
		uids[device] = c.claim(device, device)
		for _, id := range c.prepared(device, uids[device]) {
			nodes[id] = device
		}
	}
	if len(nodes) != 3 {
		t.Errorf("the CDI devices %v", nodes)
	}
	overlapping := c.claim("overlapping", "gpu-2-mig-4g40gb-5-0")
	if _, err := c.prepare(t.Context(), "overlapping", overlapping); err == nil ||
		!strings.Contains(err.Error(), "is in use by the claim default/"+devices[2]) {
		t.Errorf("a claim for a part that is taken: %v", err)
	}
	if n := c.partitions(); n != 8*25 {
		t.Errorf("%d MIG devices in slices", n)
	}
	c.mode("{mode: dra, dynamicMIG: true}" + fmt.Sprintf(layouts, "all-balanced"))
	c.eventually("the layout waits", func() bool {
		return strings.Contains(c.command("mig", "status"), "MIG devices of this GPU are created for claims")
	})

	c.release(t.Context(), devices[0], uids[devices[0]])
	c.prepared(devices[1], uids[devices[1]])
	c.mode("{mode: plugin}" + fmt.Sprintf(layouts, "all-balanced"))
	c.release(t.Context(), devices[1], uids[devices[1]])
	c.release(t.Context(), devices[2], uids[devices[2]])
	c.release(t.Context(), "overlapping", overlapping)
	var shown string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("mig status:\n%s", shown)
		}
	})
	c.eventually("the layout is made", func() bool {
		shown = c.command("mig", "status")
		return strings.Contains(shown, "all-balanced of configuration file: success")
	})
}

// TestSwitchedMIG: a Hopper GPU is given as a whole or in parts, with no write of slices. Nothing
// is changed while a process uses it: a claim waits for that, and a pod ends without. The device
// plugin gets the GPU once MIG mode is off.
func TestSwitchedMIG(t *testing.T) {
	t.Parallel()
	const half, other = "gpu-2-mig-3g40gb-9-0", "gpu-2-mig-1g10gb-19-6"
	c := newClaimable(t, "dra, dynamicMIG: true, switchMIG: true")
	c.eventually("all GPUs and their parts are in slices", func() bool { return c.partitions() == 8*26 })
	written := c.sliceWrites()
	process := func(count uint64) { // so many use GPU 2
		c.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "2", Count: count})
	}
	process(1)
	uid := c.claim("half", half)
	limited, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := c.prepare(limited, "half", uid); err == nil {
		t.Error("MIG mode was switched on while a process used the GPU")
	}
	process(0)
	otherUID, parts := c.claim("other", other), map[string]bool{}
	for _, id := range append(c.prepared("half", uid), c.prepared("other", otherUID)...) {
		parts[id] = true
	}
	whole := c.claim("whole", "gpu-3")
	if c.prepared("whole", whole); len(parts) != 2 {
		t.Errorf("the parts are %v", parts)
	}
	specs, err := filepath.Glob(filepath.Join(c.Path("cdi"), "*claim*"+uid+"*"))
	if err != nil || len(specs) != 1 {
		t.Fatalf("specs %q and %v", specs, err)
	}
	if text, err := os.ReadFile(specs[0]); err != nil || !strings.Contains(string(text), "/dev/nvidia-caps/") {
		t.Errorf("the CDI spec of a part (%v): %s", err, text)
	}
	if now := c.sliceWrites(); now != written {
		t.Errorf("slices: %s, then %s", written, now)
	}

	c.mode("{mode: plugin}")
	c.allocatable(6)
	c.release(t.Context(), "other", otherUID)
	process(1)
	c.release(t.Context(), "half", uid)
	c.eventually("status says that MIG mode is on still", func() bool {
		return strings.Contains(c.command("status", "-o", "wide"),
			"default/half was released, and its MIG devices ("+half+") are destroyed, but MIG mode is still on: ")
	})
	c.release(t.Context(), "whole", whole)
	c.allocatable(7)
	process(0)
	c.allocatable(8)
}

// TestKilledWhileTheModeIsSwitched: the daemon is killed in a Prepare that switches MIG mode. The
// next process refuses no claim at its first call, goes on with that one, and leaves all devices in
// slices; the mode is off after the last claim.
func TestKilledWhileTheModeIsSwitched(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra, dynamicMIG: true, switchMIG: true")
	all := func() bool { return c.partitions() == 8*26 }
	c.eventually("all GPUs and their parts are in slices", all)
	ctx, cancel := context.WithCancel(t.Context())
	var watched sync.WaitGroup
	watched.Go(func() {
		for ; ctx.Err() == nil; pause(ctx, 5*time.Millisecond) {
			if !all() {
				t.Errorf("%d devices in slices", c.partitions())
				return
			}
		}
	})
	defer watched.Wait()
	defer cancel()
	c.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "2", Call: "DeviceSetMigMode", Delay: "1h", Count: 1})
	half, other := c.claim("half", "gpu-2-mig-3g40gb-9-0"), c.claim("other", "gpu-3-mig-3g40gb-9-0")
	watched.Go(func() { _, _ = c.prepare(ctx, "half", half) }) // until the daemon is killed
	c.eventually("the claim has a record", func() bool {
		_, err := os.Stat(c.Path("state/claims/" + half + ".json"))
		return err == nil
	})
	c.crash() // the simulated driver forgets with it what it has changed: here nothing
	for name, uid := range map[string]string{"half": half, "other": other} {
		c.eventually("claim "+name+" is prepared", func() bool {
			_, err := c.prepare(ctx, name, uid)
			if err != nil && !strings.Contains(err.Error(), "rpc error") && !strings.Contains(err.Error(), "not registered") {
				t.Fatalf("the next process refuses claim %s: %v", name, err)
			}
			return err == nil
		})
	}
	c.release(ctx, "half", half)
	c.release(ctx, "other", other)
	cancel()
	c.mode("{mode: plugin}")
	c.allocatable(8)
}

// dividedProfile returns the path of the profile of a machine with two GPUs, of which the second is
// in MIG mode and has no MIG devices.
func dividedProfile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.yaml")
	node := "description: two A100\ndriver: 580.95.05\ncuda: \"13.0\"\nmodel: a100-sxm4-40gb\ngpus:\n" +
		"- {bdf: \"0000:1b:00.0\", pcie: 0/0/0}\n- {bdf: \"0000:43:00.0\", pcie: 0/1/0, mig: []}\n"
	if err := os.WriteFile(path, []byte(node), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPlanIsWhatIsPublished: plan --dra prints the objects that the daemon writes to the API
// server, with counters and devices that take them.
func TestPlanIsWhatIsPublished(t *testing.T) {
	t.Parallel()
	profile := dividedProfile(t)
	c := newClaimable(t, "dra, dynamicMIG: true", "--simulate", profile)
	c.eventually("all devices are in slices", func() bool { return c.partitions() == 25 && len(c.api.Slices()) == 3 })
	plan := exec.CommandContext(t.Context(), c.Daemon, "plan", "--dra", "--simulate", profile, "--node-name", nodeName,
		"--dra-dynamic-mig", "-o", "json")
	text, err := plan.Output()
	var list resourceapi.ResourceSliceList
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		t.Fatal(err)
	}
	published, planned := map[string]string{}, map[string]string{}
	note := func(all map[string]string, s *resourceapi.ResourceSlice) {
		spec, err := json.MarshalIndent(s.Spec, "", " ")
		if err != nil {
			t.Error(err)
		}
		all[s.Name] = string(spec)
	}
	for _, s := range c.api.Slices() {
		note(published, s)
	}
	for i := range list.Items {
		note(planned, &list.Items[i])
	}
	if diff := cmp.Diff(published, planned); diff != "" {
		t.Errorf("published, and planned (-published +planned):\n%s", diff)
	}
}

// TestDynamicMIGByMPS: a MIG device that is made for a claim is shared by MPS. While its control
// daemon cannot be ended, it stays, and status says so; the pod ends all the same.
func TestDynamicMIGByMPS(t *testing.T) {
	t.Parallel()
	const device = "gpu-1-mig-3g20gb-9-0"
	c := newWithMPSAs(t, "dra, dynamicMIG: true", "--simulate", dividedProfile(t))
	c.eventually("all devices are in slices", func() bool { return c.partitions() == 25 })
	kill := c.mpsControlDaemon()
	uid := c.claimByMPS("one", device)
	c.prepared("one", uid)
	told, err := os.ReadFile(c.Path("mps/claims/" + uid + "-0/log/control.log"))
	if err != nil || !strings.Contains(string(told), "Starting control daemon of MIG-") ||
		!strings.Contains(string(told), "percentage 25\n") {
		t.Errorf("the control daemon was told (%v): %s", err, told)
	}
	kill(syscall.SIGKILL)
	c.release(t.Context(), "one", uid)
	const shown = "claim: default/one was released, but its devices at " + device + " still exist: "
	c.eventually("status has the claim that was given back",
		func() bool { return strings.Contains(c.command("status", "-o", "wide"), shown) })
	c.mpsControlDaemon()
	c.eventually("all is gone", func() bool {
		left, err := filepath.Glob(c.Path("mps/claims/*"))
		return err == nil && len(left) == 0 && !strings.Contains(c.command("status"), "default/one")
	})
	c.prepared("two", c.claim("two", device))
}
