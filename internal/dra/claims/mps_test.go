package claims_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// byMPS is a claim whose GPUs are shared by MPS with some configuration.
func byMPS(uid, config string, devices ...string) dra.Claim {
	c := claim(uid, devices...)
	for _, kind := range []string{"GpuConfig", "MigDeviceConfig"} {
		c.Configs = append(c.Configs, dra.OpaqueConfig{Source: dra.FromClaim, Parameters: fmt.Appendf(nil,
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":%q,"sharing":{"strategy":"MPS","mpsConfig":{%s}}}`, kind, config)})
	}
	return c
}

// TestMPS: the GPUs of a claim have one control daemon and each of its MIG devices one of its own,
// with the limits of the configuration; containers are clients of it, and it ends when the claim is
// given back.
func TestMPS(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	wanted := byMPS("uid-1", `"defaultActiveThreadPercentage":30,"defaultPinnedDeviceMemoryLimit":"2Gi","multiUser":true,
"defaultPerDevicePinnedMemoryLimit":{"GPU-c":"1Gi"}`, gpuA, gpuC)
	for range 2 {
		r.prepare(c, wanted)
	}
	r.prepare(c, byMPS("uid-2", `"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}`, migB1, migB0))
	want := map[string]string{
		"uid-1-0": `{"devices":[{"uuid":"GPU-a","memoryLimit":2147483648},{"uuid":"GPU-c","memoryLimit":1073741824}],"activeThreadPercentage":30,` +
			`"multiUser":true,"exclusive":true}`,
		"uid-2-0": `{"devices":[{"uuid":"MIG-b1"}]}`,
		"uid-2-1": `{"devices":[{"uuid":"MIG-b0","memoryLimit":1073741824}]}`,
	}
	if diff := cmp.Diff(want, r.mps()); diff != "" {
		t.Errorf("control daemons (-want +got):\n%s", diff)
	}
	for uid, clients := range map[string][]string{"uid-1": {"uid-1-0", "uid-1-0"}, "uid-2": {"uid-2-1", "uid-2-0"}} {
		for i, d := range r.spec(uid).Devices {
			pipe := "/mps/claims/" + clients[i] + "/pipe"
			if !slices.Contains(d.ContainerEdits.Env, "CUDA_MPS_PIPE_DIRECTORY="+pipe) {
				t.Errorf("%s has the environment %q", d.Name, d.ContainerEdits.Env)
			}
			mounts := map[string]string{}
			for _, m := range d.ContainerEdits.Mounts {
				mounts[m.ContainerPath] = m.HostPath
			}
			if mounts[pipe] != "/run/nvidia"+pipe || mounts["/dev/shm"] != "/run/nvidia/mps/shm" {
				t.Errorf("%s has the mounts %v", d.Name, mounts)
			}
		}
	}
	for _, uid := range []string{"uid-1", "uid-2"} {
		r.unprepare(c, uid)
	}
	if left := r.mps(); len(left) > 0 {
		t.Errorf("control daemons after Unprepare: %v", left)
	}
}

// TestMPSThatIsRefused: a claim that cannot be shared as it wants has neither a record nor a
// daemon.
func TestMPSThatIsRefused(t *testing.T) {
	t.Parallel()
	differing := byMPS("uid-1", `"defaultActiveThreadPercentage":30`, gpuA, gpuC)
	differing.Results[1].Request = "second"
	other := byMPS("uid-1", `"defaultActiveThreadPercentage":40`, gpuA).Configs[0]
	other.Requests = []string{"second"}
	differing.Configs = append(differing.Configs, other)
	looks := byMPS("uid-1", ``, gpuA)
	looks.Results[0].AdminAccess = true
	shares := part("uid-1", 20, gpuA, gpuC)
	shares.Configs = looks.Configs
	for name, tt := range map[string]struct {
		claim   dra.Claim
		without bool
		want    string // empty: it is prepared without MPS
	}{
		"no process for it":  {byMPS("uid-1", ``, gpuA), true, "sharing.strategy: MPS needs mps-control-daemon on the node"},
		"different settings": {differing, false, "the requests gpu and second have different settings"},
		"a device of another": {byMPS("uid-1", `"defaultPerDevicePinnedMemoryLimit":{"GPU-c":"1Gi"}`, gpuA), false,
			"the claim has no such device"},
		"shares of two GPUs": {shares, false, "MPS is not supported for shares of several GPUs in one claim: the requests gpu and gpu have gpu-0 and gpu-2"},
		"admin access":       {looks, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if tt.without {
				r.options.MPS = nil
			}
			c, _ := r.start()
			_, err := ask(t.Context(), c, tt.claim)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want) ||
				r.record("uid-1") != "") {
				t.Errorf("Prepare() = %v, want %q; record %q", err, tt.want, r.record("uid-1"))
			}
			if left := r.mps(); len(left) > 0 {
				t.Errorf("control daemons: %v", left)
			}
		})
	}
}

// TestMPSThatDoesNotServe: the claim is not prepared, and is once the daemon serves. What is wrong
// later is shown.
func TestMPSThatDoesNotServe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		wrong := func(problem string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.daemon = problem
		}
		problem := func() string { return c.Status().Value()[0].Devices[0].Problem }
		wrong("it does not take the limit")
		want := "the MPS control daemon of the claim does not serve clients: it does not take the limit"
		if _, err := ask(t.Context(), c, byMPS("uid-1", ``, gpuA)); err == nil || err.Error() != want {
			t.Errorf("Prepare() = %v, want %q", err, want)
		}
		if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err == nil {
			t.Error("another claim has the GPU")
		}
		wrong("")
		if _, err := ask(t.Context(), c, byMPS("uid-1", ``, gpuA)); err != nil || problem() != "" {
			t.Errorf("Prepare() = %v, with problem %q", err, problem())
		}
		wrong("it has died")
		r.configs.Publish(r.configs.Value())
		synctest.Wait()
		if problem() != "it has died" {
			t.Errorf("the problem is %q", problem())
		}
	})
}

// TestMPSThatIsLeft: a daemon that no record needs is ended, by the next claim on its device or
// after a while. One that is needed is not.
func TestMPSThatIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for id, uuid := range map[string]string{"gone-0": "GPU-a", "gone-1": "GPU-c", "other-0": "MIG-b0"} {
			if err := (daemons{r}).Start(t.Context(), id, mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: uuid}}}); err != nil {
				t.Fatal(err)
			}
		}
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA))
		r.prepare(c, byMPS("uid-2", ``, migB1))
		if got := slices.Sorted(maps.Keys(r.mps())); !slices.Equal(got, []string{"gone-1", "other-0", "uid-2-0"}) {
			t.Errorf("after the next claim: %q", got)
		}
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		if got := slices.Sorted(maps.Keys(r.mps())); !slices.Equal(got, []string{"uid-2-0"}) {
			t.Errorf("after a while: %q", got)
		}
	})
}

// TestMPSOfBefore: after a restart of the node a claim needs no daemon until it is prepared again,
// and can be given back as ever.
func TestMPSOfBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		r.prepare(c, byMPS("uid-1", ``, gpuA))
		stop()
		r.options.BootID = "two"
		c, stop = r.start()
		defer stop()
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		if left := r.mps(); len(left) > 0 || r.record("uid-1") == "" {
			t.Errorf("daemons %v, record %q", left, r.record("uid-1"))
		}
		if _, err := ask(t.Context(), c, byMPS("uid-1", ``, gpuA)); err != nil || len(r.mps()) != 1 {
			t.Errorf("prepared again: %v, daemons %v", err, r.mps())
		}
		if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || len(r.mps()) > 0 {
			t.Errorf("given back: %v, daemons %v", err, r.mps())
		}
	})
}

// TestMPSThatIsSwitchedOff: a claim that is shared by MPS is shown with a problem where control
// daemons are run no more. It is not prepared again, and can be given back.
func TestMPSThatIsSwitchedOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		r.prepare(c, byMPS("uid-1", ``, gpuA))
		r.prepare(c, part("uid-2", 20, gpuC))
		stop()
		r.options.MPS = nil
		c, stop = r.start()
		defer stop()
		const want = "sharing.strategy: MPS needs mps-control-daemon on the node"
		if s := c.Status().Value(); !strings.Contains(s[0].Devices[0].Problem, want) || s[1].Devices[0].Problem != "" {
			t.Errorf("status %s", text(t, s))
		}
		if p := c.Problems().Value(); len(p) != 1 || !strings.Contains(p[gpuA], want) {
			t.Errorf("problems %v", p)
		}
		if _, err := ask(t.Context(), c, byMPS("uid-1", ``, gpuA)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Prepare() = %v", err)
		}
		r.prepare(c, part("uid-2", 20, gpuC))
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		r.unprepare(c, "uid-1")
		if p := c.Problems().Value(); len(p) > 0 || r.record("uid-1") != "" {
			t.Errorf("given back: problems %v, record %q", p, r.record("uid-1"))
		}
	})
}

// TestMPSThatDoesNotEnd: the next claim on a device waits for the control daemon of the last one. A
// claim on another device does not, nor one that only looks.
func TestMPSThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	if err := (daemons{r}).Start(t.Context(), "gone-0", mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-a"}}}); err != nil {
		t.Fatal(err)
	}
	r.stays = errors.New("it has clients")
	r.prepare(c, claim("uid-1", gpuC))
	looks := claim("uid-2", gpuA)
	looks.Results[0].AdminAccess = true
	r.prepare(c, looks)
	if _, err := ask(t.Context(), c, claim("uid-3", gpuA)); err == nil || err.Error() != "it has clients" ||
		r.spec("uid-3") != nil {
		t.Errorf("Prepare() = %v, spec %v", err, r.spec("uid-3"))
	}
}

// TestMPSOnADiskThatHangs: only claims that need the disk of the control daemons wait for it, and
// no longer than it takes to see that it hangs. All is well again when it answers.
func TestMPSOnADiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		disk := func(err error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.disk = err
		}
		within := func(limit time.Duration, what, want string, call func() error) {
			t.Helper()
			began := time.Now()
			err := call()
			if took := time.Since(began); took > limit {
				t.Errorf("%s took %v", what, took)
			}
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %v, want %q", what, err, want)
			}
		}
		prepare := func(claim dra.Claim) func() error {
			return func() error { _, err := ask(t.Context(), c, claim); return err }
		}
		hangs := errors.New("the disk does not answer")
		r.prepare(c, byMPS("uid-1", ``, gpuA))

		disk(hangs)
		within(3*time.Second, "a claim on another GPU", "", prepare(claim("uid-2", gpuC)))
		within(5*time.Second, "the claim with the daemon", hangs.Error(), prepare(byMPS("uid-1", ``, gpuA)))
		within(5*time.Second, "a new claim with a daemon", hangs.Error(), prepare(byMPS("uid-3", ``, migB0)))
		r.configs.Publish(r.configs.Value())
		synctest.Wait() // the loop waits for the disk
		within(0, "the claim on another GPU, meanwhile", "", prepare(claim("uid-2", gpuC)))
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if p := c.Problems().Value(); p[gpuA] != hangs.Error() || p[gpuC] != "" {
			t.Errorf("problems %v", p)
		}
		within(3*time.Second, "Unprepare", "", func() error { return c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") })
		within(5*time.Second, "the next claim on the GPU", hangs.Error(), prepare(claim("uid-4", gpuA)))
		r.unprepare(c, "uid-2")
		stop()

		c, stop = r.start() // another process: it knows what the records say
		defer stop()
		within(3*time.Second, "a MIG device, after a restart", "", prepare(claim("uid-5", migB1)))
		within(3*time.Second, "a time slice, after a restart", "", prepare(sliced("uid-6", gpuC)))
		within(5*time.Second, "a claim with a daemon, after a restart", hangs.Error(), prepare(byMPS("uid-3", ``, migB0)))
		within(5*time.Second, "the GPU of the claim that was given back, after a restart",
			"of the unprepared claim default/claim-uid-1", prepare(claim("uid-4", gpuA)))
		time.Sleep(claims.RefreshInterval + 6*time.Second)
		within(5*time.Second, "the same, when the loop has tried", hangs.Error(), prepare(claim("uid-4", gpuA)))
		within(5*time.Second, "Unprepare once more", "", func() error { return c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") })
		disk(nil)
		time.Sleep(claims.RefreshInterval + 1)
		within(0, "the next claim on the GPU, then", "", prepare(claim("uid-4", gpuA)))
		within(0, "the new claim with a daemon, then", "", prepare(byMPS("uid-3", ``, migB0)))
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		if got := slices.Sorted(maps.Keys(r.mps())); !slices.Equal(got, []string{"uid-3-0"}) ||
			len(c.Problems().Value()) > 0 {
			t.Errorf("daemons %q, problems %v", got, c.Problems().Value())
		}
	})
}

// TestSharesOnADiskThatHangs: a share that is given back leaves nothing while another one needs the
// control daemon. The last one keeps the GPU from claims without it until the daemon has ended,
// also after a restart.
func TestSharesOnADiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		r.prepare(c, partByMPS("uid-1", 20))
		r.prepare(c, partByMPS("uid-2", 20))
		r.mu.Lock()
		r.disk = errors.New("the disk does not answer")
		r.mu.Unlock()
		r.unprepare(c, "uid-1")
		r.unprepare(c, "uid-2")
		if r.record("uid-1") != "" || !strings.Contains(r.record("uid-2"), `"released":true`) || r.spec("uid-2") != nil {
			t.Errorf("given back: the records %q and %q", r.record("uid-1"), r.record("uid-2"))
		}
		stop()

		c, stop = r.start()
		defer stop()
		if _, err := ask(t.Context(), c, claim("uid-3", gpuA)); err == nil ||
			!strings.Contains(err.Error(), "of the unprepared claim default/claim-uid-2") {
			t.Errorf("the whole GPU: %v", err)
		}
		r.mu.Lock()
		r.disk = nil
		r.mu.Unlock()
		r.prepare(c, partByMPS("uid-4", 40)) // it needs the daemon, so that the record goes, and the daemon stays
		time.Sleep(2 * claims.RefreshInterval)
		synctest.Wait()
		if r.record("uid-2") != "" || len(r.mps()) != 1 {
			t.Errorf("with the next share: the record %q, daemons %v", r.record("uid-2"), r.mps())
		}
		r.unprepare(c, "uid-4")
		r.prepare(c, claim("uid-3", gpuA))
		if len(r.mps()) > 0 {
			t.Errorf("daemons %v", r.mps())
		}
	})
}
