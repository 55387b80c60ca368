package claims_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestTheLeadChanges: kubelet calls while the lead goes from one process to another and back, also
// for claims whose pods were deleted by force and made again. No two claims have a device node at a
// time, as their containers see it, and each process gives back what the other has prepared. A call
// that reaches the one that does not lead waits.
func TestTheLeadChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	both := []*claims.Claims{claims.New(r.options), claims.New(r.options)}
	var leads atomic.Int32
	stop := r.run(both[0])
	devices := [][]string{{gpuA}, {gpuA, migB0}, {migB0, gpuC}, {migB1}, {gpuC, gpuA}, {migB1, migB0}}
	var owners sync.Map // claims by the device node
	var kubelet sync.WaitGroup
	var ended atomic.Int32
	prepare := func(wanted dra.Claim) error {
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			_, err := ask(ctx, both[leads.Load()], wanted)
			late := errors.Is(err, context.DeadlineExceeded)
			cancel()
			if !late {
				return err
			}
		}
	}
	for n, wanted := range devices {
		kubelet.Go(func() {
			for i := range 40 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				err := prepare(claim(uid, wanted...))
				for err != nil && strings.Contains(err.Error(), "is in use by the claim") {
					<-time.After(time.Millisecond)
					err = prepare(claim(uid, wanted...))
				}
				if err != nil {
					t.Errorf("%s: %v", uid, err)
				} else {
					var nodes []string
					for _, d := range r.spec(uid).Devices {
						for _, node := range d.ContainerEdits.DeviceNodes {
							if node.Path != "/dev/nvidia1" { // both MIG devices need that of their GPU
								nodes = append(nodes, node.Path)
							}
						}
					}
					if len(nodes) < len(wanted) {
						t.Errorf("%s has the device nodes %v for %v", uid, nodes, wanted)
					}
					for _, node := range nodes {
						if other, taken := owners.Swap(node, uid); taken {
							t.Errorf("%s has %s, and so has %s", uid, node, other)
						}
					}
					if err := prepare(claim(uid, wanted...)); err != nil {
						t.Errorf("%s, once more: %v", uid, err)
					}
					for _, node := range nodes {
						owners.Delete(node)
					}
				}
				for back := false; !back; {
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					err := both[leads.Load()].Unprepare(ctx, uid, "default", "claim-"+uid)
					if back = err == nil; !back && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("%s: %v", uid, err)
						back = true
					}
					cancel()
				}
				ended.Add(1)
			}
		})
	}
	all := make(chan struct{})
	go func() {
		kubelet.Wait()
		close(all)
	}()
	for changes := 0; ; changes++ {
		for before := ended.Load(); ended.Load() < before+10 && ended.Load() < int32(40*len(devices)); {
			<-time.After(time.Millisecond)
		}
		select {
		case <-all:
			if changes < 4 {
				t.Errorf("the lead changed %d times", changes)
			}
			if left := files(t, r.options.CDIDir); len(left) != 0 {
				t.Errorf("left specs: %v", left)
			}
			stop()
			return
		default:
		}
		stop() // which waits for the calls that are being answered
		next := 1 - leads.Load()
		stop = r.run(both[next])
		leads.Store(next)
	}
}

// TestALateWriteOfAnEarlierLead: a process that was stopped in the middle of a write may finish it
// when another one leads. What the lead has stays; a claim that it does not know is taken over.
func TestALateWriteOfAnEarlierLead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		earlier, stopEarlier := r.start()
		defer stopEarlier()
		for uid, device := range map[string]string{"uid-1": gpuA, "uid-2": gpuC} {
			r.prepare(earlier, claim(uid, device))
		}
		late := map[string]string{"uid-1": r.record("uid-1"), "uid-2": r.record("uid-2")}
		stopEarlier()
		lead, stop := r.start()
		defer stop()
		r.unprepare(lead, "uid-2")
		r.prepare(lead, claim("uid-3", migB0))
		kept := r.record("uid-3")
		path := func(uid string) string { return filepath.Join(r.options.StateDir, "claims", uid+".json") }
		if err := errors.Join(
			os.WriteFile(path("uid-2"), []byte(late["uid-2"]), 0o600), // Prepare
			os.Remove(path("uid-1")),                                  // Unprepare
			os.WriteFile(path("uid-3"), []byte(strings.Replace(kept, "MIG-b0", "MIG-b1", 1)), 0o600),
		); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.RefreshInterval + time.Second)
		synctest.Wait()
		if r.record("uid-1") != late["uid-1"] || r.record("uid-3") != kept {
			t.Errorf("records: %s and %s", r.record("uid-1"), r.record("uid-3"))
		}
		if in := lead.InUse().Value(); len(in["GPU-a"]) != 1 || len(in["GPU-b"]) != 1 || len(in["GPU-c"]) != 1 {
			t.Errorf("in use: %v", in)
		}
		r.unprepare(lead, "uid-2")
		r.prepare(lead, claim("uid-4", gpuC))
	})
}

// TestAProcessThatDoesNotLead writes nothing, and changes no hardware as long as an earlier lead
// may.
func TestAProcessThatDoesNotLead(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var lost, beside atomic.Bool
	when := func(flag *atomic.Bool, text string) func() error {
		return func() error {
			if flag.Load() {
				return errors.New(text)
			}
			return nil
		}
	}
	r.options.Lead, r.options.Alone = when(&lost, "another process leads"), when(&beside, "an earlier lead is there still")
	c, _ := r.start()
	beside.Store(true)
	for _, wanted := range []dra.Claim{sliced("uid-1", gpuC), shared("uid-2", migB0)} {
		if _, err := ask(t.Context(), c, wanted); err == nil ||
			!strings.Contains(err.Error(), "an earlier lead is there still") || r.slice("GPU-c") != "0" || len(r.mps()) > 0 {
			t.Errorf("%s: %v, time slice %s, daemons %v", wanted.UID, err, r.slice("GPU-c"), r.mps())
		}
	}
	r.prepare(c, claim("uid-3", gpuA)) // which changes no hardware
	lost.Store(true)
	if err := c.Unprepare(t.Context(), "uid-3", "default", "claim-uid-3"); !errors.Is(err, dra.ErrEnded) ||
		r.record("uid-3") == "" || r.spec("uid-3") == nil {
		t.Errorf("Unprepare() = %v, record %q", err, r.record("uid-3"))
	}
	// the process that leads is asked then
	for _, wanted := range []dra.Claim{claim("uid-4", migB1), sliced("uid-1", gpuC), shared("uid-2", migB0)} {
		if _, err := ask(t.Context(), c, wanted); !errors.Is(err, dra.ErrEnded) || r.record("uid-4") != "" {
			t.Errorf("Prepare(%s) = %v, record %q", wanted.UID, err, r.record("uid-4"))
		}
	}
}

// TestADiskThatHangs: a claim that is prepared is answered once more without the disk, also while
// what compares its files hangs there with the lock of the claim.
func TestADiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := claims.New(r.options)
		var hangs atomic.Bool
		disk := make(chan struct{})
		c.AtEachStep(func() {
			if hangs.Load() {
				<-disk
			}
		})
		defer r.run(c)()
		r.prepare(c, claim("uid-1", gpuA))
		hangs.Store(true)
		if err := errors.Join(os.RemoveAll(r.options.StateDir), os.RemoveAll(r.options.CDIDir)); err != nil {
			t.Fatal(err)
		}
		r.prepare(c, claim("uid-1", gpuA))
		if left := files(t, r.dir); !slices.Equal(left, []string{"root"}) {
			t.Errorf("the disk was used: %v", left)
		}
		time.Sleep(claims.RefreshInterval + time.Second)
		synctest.Wait()
		r.prepare(c, claim("uid-1", gpuA))
		close(disk)
		time.Sleep(claims.RefreshInterval + time.Second)
		synctest.Wait()
		if r.record("uid-1") == "" || r.spec("uid-1") == nil {
			t.Error("the files are not there again")
		}
	})
}

// TestLatePrepare: a Prepare that began before the claim was given back does not bring it back; one
// that begins later does.
func TestLatePrepare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		answers := make(chan struct{})
		r.mu.Lock()
		r.asked = func() { <-answers }
		r.mu.Unlock()
		first, late, back := make(chan error, 1), make(chan error, 1), make(chan error, 1)
		prepare := func(answer chan error) {
			_, err := ask(t.Context(), c, claim("uid-1", gpuA))
			answer <- err
		}
		go prepare(first)
		synctest.Wait() // it waits for kubelet, and the others wait for it
		go func() { back <- c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") }()
		synctest.Wait()
		go prepare(late)
		synctest.Wait()
		close(answers)
		if err := errors.Join(<-first, <-back); err != nil {
			t.Fatal(err)
		}
		if err := <-late; err == nil || !strings.Contains(err.Error(),
			"the claim was unprepared while it was being prepared") {
			t.Errorf("the late Prepare() = %v", err)
		}
		if r.record("uid-1") != "" || r.spec("uid-1") != nil {
			t.Errorf("a late Prepare has left %s", r.record("uid-1"))
		}
		if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err != nil {
			t.Errorf("the next Prepare() = %v", err)
		}
	})
}

// TestNobodyWaits: a call that kubelet has given up does not prepare anything.
func TestNobodyWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	ctx, cancel := context.WithCancel(t.Context())
	r.mu.Lock()
	r.asked = cancel
	r.mu.Unlock()
	if _, err := ask(ctx, c, claim("uid-1", gpuA)); !errors.Is(err, context.Canceled) || r.record("uid-1") != "" {
		t.Errorf("Prepare() = %v, record %q", err, r.record("uid-1"))
	}
}

// TestRestartOfTheNode: claims of another boot block nobody, are prepared again, and can be given
// back.
func TestRestartOfTheNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	for uid, device := range map[string]string{"uid-1": gpuA, "uid-2": gpuC} {
		r.prepare(c, claim(uid, device))
	}
	stop()
	if err := os.RemoveAll(r.options.CDIDir); err != nil {
		t.Fatal(err)
	}
	r.options.BootID = "two"
	c, _ = r.start()
	if got := files(t, r.options.CDIDir); len(got) != 0 {
		t.Errorf("specs of claims without containers: %v", got)
	}
	if s := c.Status().Value(); len(s) != 2 || !s[0].Restarted || len(c.InUse().Value()) != 2 {
		t.Errorf("status %s, in use %v", text(t, s), c.InUse().Value())
	}
	answer, err := ask(t.Context(), c, claim("uid-1", gpuA))
	if err != nil {
		t.Fatal(err)
	}
	r.nodes(ids(answer)...)
	if s := c.Status().Value(); s[0].Restarted || !s[1].Restarted {
		t.Errorf("status %s", text(t, s))
	}
	if _, err := ask(t.Context(), c, claim("uid-3", gpuC)); err != nil {
		t.Errorf("a record of before the restart blocks another claim: %v", err)
	}
	if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || r.record("uid-2") != "" {
		t.Errorf("Unprepare() = %v, record %q", err, r.record("uid-2"))
	}
}

// TestPreparedClaimOfASickGPU: the containers of a claim that is prepared have the GPU as long as
// it is there, and so have those that are restarted; giving it back needs no driver.
func TestPreparedClaimOfASickGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	r.prepare(c, claim("uid-1", gpuA))
	s := snapshot()
	s.GPUs[0].Health = inventory.Health{State: inventory.Lost}
	r.publish(s)
	if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err != nil {
		t.Errorf("the GPU is lost: %v", err)
	}
	s.GPUs = s.GPUs[1:]
	stale := s
	stale.Stale = "the driver does not answer"
	for what, now := range map[string]inventory.Snapshot{"the look has failed": stale,
		"the driver has not answered yet": {}} {
		stop()
		r.publish(now)
		c, stop = r.start()
		answer, err := ask(t.Context(), c, claim("uid-1", gpuA))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		r.nodes(ids(answer)...)
	}
	stop()
	r.publish(inventory.Snapshot{})
	c, _ = r.start()
	if err := os.Remove(r.specs().File("uid-1")); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err == nil ||
		!strings.Contains(err.Error(), "are not known yet") {
		t.Errorf("without a driver and a spec: %v", err)
	}
	if _, err := ask(t.Context(), c, claim("uid-2", gpuC)); err == nil {
		t.Error("a claim was prepared without a driver")
	}
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || r.spec("uid-1") != nil {
		t.Errorf("Unprepare() = %v", err)
	}
	if err := c.Unprepare(t.Context(), "uid-9", "default", "x"); err != nil {
		t.Errorf("Unprepare() of a claim that nobody knows: %v", err)
	}
}

// TestSpecsFollowTheDriver: when files of the driver have other places, and when somebody removes a
// spec, containers that are restarted find what is there now.
func TestSpecsFollowTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA))
		mounts := func() string {
			var all []string
			for _, m := range r.spec("uid-1").ContainerEdits.Mounts {
				all = append(all, m.HostPath)
			}
			return strings.Join(all, " ")
		}
		if !strings.Contains(mounts(), "libcuda.so.580.95.05") {
			t.Fatalf("mounts %s", mounts())
		}
		lib := filepath.Join(r.driver, "usr/lib/x86_64-linux-gnu/libcuda.so.")
		if err := os.Rename(lib+"580.95.05", lib+"590.48.01"); err != nil {
			t.Fatal(err)
		}
		s := snapshot()
		s.Generation, s.Driver.Version = 2, "590.48.01"
		r.publish(s)
		synctest.Wait()
		if !strings.Contains(mounts(), "libcuda.so.590.48.01") || strings.Contains(mounts(), "580.95.05") {
			t.Errorf("mounts with another driver: %s", mounts())
		}
		moved := filepath.Join(r.driver, "usr/lib64")
		if err := os.Rename(filepath.Join(r.driver, "usr/lib/x86_64-linux-gnu"), moved); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.RefreshInterval)
		synctest.Wait()
		if !strings.Contains(mounts(), "/usr/lib64/libcuda.so.590.48.01") {
			t.Errorf("mounts after the files were moved: %s", mounts())
		}
		if err := os.RemoveAll(r.options.CDIDir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.RefreshInterval)
		synctest.Wait()
		if r.spec("uid-1") == nil {
			t.Error("a spec that somebody removed was not written again")
		}
		configured := r.configs.Value()
		configured.Edits.DevRoot = "/run/nvidia/driver"
		r.configs.Publish(configured)
		synctest.Wait()
		if n := r.spec("uid-1").Devices[0].ContainerEdits.DeviceNodes[0]; n.HostPath != "/run/nvidia/driver/dev/nvidia0" {
			t.Errorf("with another configuration: %+v", n)
		}
	})
}

// TestNoGrowth prepares and unprepares 200 claims. Ten minutes later nothing of them is left.
func TestNoGrowth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		left := filepath.Join(r.options.StateDir, "claims", ".uid-0.json.123.gpu-device-plugin.tmp")
		for i := range 200 {
			uid := fmt.Sprintf("uid-%d", i)
			r.prepare(c, claim(uid, gpuA, migB1))
			r.unprepare(c, uid)
		}
		old := time.Now().Add(-time.Hour)
		spec := r.specs().File("uid-0")
		// of a process that was killed
		spec = filepath.Join(filepath.Dir(spec), "."+filepath.Base(spec)+".5.gpu-device-plugin.tmp")
		others := filepath.Join(r.options.CDIDir, ".another.yaml.5.tmp")
		for _, path := range []string{left, spec, others} {
			if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, old, old)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got := files(t, filepath.Join(r.options.StateDir, "claims")); len(got) != 0 {
			t.Errorf("the folder of records has %d files: %q", len(got), got[:min(len(got), 5)])
		}
		if got := files(t, r.options.CDIDir); !slices.Equal(got, []string{filepath.Base(others)}) {
			t.Errorf("the folder of specs has %q", got)
		}
		for _, fd := range files(t, "/proc/self/fd") { // tests beside this one open others
			if path, err := os.Readlink(filepath.Join("/proc/self/fd", fd)); err == nil && strings.HasPrefix(path, r.dir) {
				t.Errorf("%s is still open", path)
			}
		}
		if len(c.InUse().Value()) != 0 || len(c.Status().Value()) != 0 {
			t.Errorf("in use %v", c.InUse().Value())
		}
	})
}

// TestCauses: each failure has a cause for metrics, and a success has none.
func TestCauses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	counted := &metrics{}
	r.options.Metrics = counted
	c, _ := r.start()
	other := claim("uid-2", gpuA)
	mps := claim("uid-3", gpuC)
	mps.Configs = []dra.OpaqueConfig{{Parameters: []byte(`{}`)}}
	for _, wanted := range []dra.Claim{claim("uid-1", gpuA), other, claim("uid-4", "gpu-9"), mps, claim("/", gpuA)} {
		_, _ = ask(t.Context(), c, wanted)
	}
	_ = c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1")
	_ = c.Unprepare(t.Context(), "/", "default", "x")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, _ = ask(ended, claims.New(r.options), claim("uid-1", gpuA)) // nobody runs it
	if got, want := strings.Join(counted.causes, ","), ",in-use,device,configuration,malformed,-,-malformed,not-ready"; got != want {
		t.Errorf("causes %s, want %s", got, want)
	}
}

type metrics struct {
	causes  []string
	unasked int
}

func (m *metrics) PreparedWithoutKubelet() { m.unasked++ }

func (m *metrics) Prepared(_ time.Duration, cause string)   { m.causes = append(m.causes, cause) }
func (m *metrics) Unprepared(_ time.Duration, cause string) { m.causes = append(m.causes, "-"+cause) }
