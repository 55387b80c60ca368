package claims_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestSharesOfOneGPU: claims have one GPU at the same time, come and go in any order, and each is
// answered, recorded and shown with its share.
func TestSharesOfOneGPU(t *testing.T) {
	t.Parallel()
	uids := []string{"uid-1", "uid-2", "uid-3"}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, stop := r.start()
			for n, uid := range uids {
				for range 2 {
					answer, err := ask(t.Context(), c, part(uid, 20, gpuA))
					if err != nil {
						t.Fatal(err)
					}
					want := dra.Prepared{
						Requests: []string{"gpu"}, Pool: "node", Device: gpuA, ShareID: "share-" + uid + "-0",
						CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + uid + "-gpu-0-share-" + uid + "-0"},
					}
					if text(t, answer) != text(t, []dra.Prepared{want}) || r.nodes(ids(answer)...) != "nvidia0" {
						t.Errorf("prepared %+v, want %+v; the container has %s", answer, want, r.nodes(ids(answer)...))
					}
				}
				if !strings.Contains(r.record(uid), `"consumedCapacity":{"memory":"20Gi"},"share":21474836480`) {
					t.Errorf("the record is %s", r.record(uid))
				}
				if has := len(c.InUse().Value()["GPU-a"]); has != n+1 {
					t.Errorf("%d claims have the GPU, want %d", has, n+1)
				}
			}
			for _, s := range c.Status().Value() {
				if d := s.Devices[0]; d.ShareID != "share-"+s.UID+"-0" || d.Share != 20<<30 || d.Limited {
					t.Errorf("%s is shown with %+v", s.UID, d)
				}
			}
			stop()
			c, _ = r.start() // the next process
			for n, i := range order {
				if _, err := ask(t.Context(), c, claim("whole", gpuA)); err == nil ||
					!strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("the whole of a GPU with %d shares: %v", 3-n, err)
				}
				if len(c.InUse().Value()["GPU-a"]) == 0 {
					t.Error("the device plugin may give the GPU")
				}
				if err := c.Unprepare(t.Context(), uids[i], "default", "claim-"+uids[i]); err != nil {
					t.Fatal(err)
				}
				if r.record(uids[i]) != "" || r.spec(uids[i]) != nil || len(c.InUse().Value()["GPU-a"]) != 2-n {
					t.Errorf("after %s: record %q, in use %v", uids[i], r.record(uids[i]), c.InUse().Value())
				}
			}
			if _, err := ask(t.Context(), c, claim("whole", gpuA)); err != nil {
				t.Errorf("the whole of a GPU that nobody has: %v", err)
			}
		})
	}
}

// TestSharesOfOneClaim: a claim with two shares of one GPU has a name for each, and both count.
func TestSharesOfOneClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	answer, err := ask(t.Context(), c, part("uid-1", 30, gpuA, gpuA))
	if err != nil {
		t.Fatal(err)
	}
	if all := ids(answer); len(all) != 2 || all[0] == all[1] || r.nodes(all...) != "nvidia0 nvidia0" {
		t.Errorf("CDI devices %v", all)
	}
	if _, err := ask(t.Context(), c, part("uid-2", 30, gpuA)); err == nil ||
		!strings.Contains(err.Error(), "does not have enough memory left") {
		t.Errorf("more than is left: %v", err)
	}
	if _, err := ask(t.Context(), c, part("uid-3", 20, gpuA)); err != nil {
		t.Errorf("what is left: %v", err)
	}
	if _, err := ask(t.Context(), c, part("uid-4", 41, gpuC, gpuC)); err == nil || r.record("uid-4") != "" {
		t.Errorf("more than there is, by one claim: %v", err)
	}
}

// TestSharesThatAreRefused: what the claim asks for, and what others have. Nothing is left of it.
func TestSharesThatAreRefused(t *testing.T) {
	t.Parallel()
	long := func(c dra.Claim) dra.Claim {
		c.Configs = sliced("").Configs
		return c
	}
	odd := part("uid-2", 20, gpuA)
	odd.Results[0].ShareID = "../share"
	mixed := part("uid-2", 20, gpuA, gpuA)
	mixed.Results[1].Request = "second"
	mixed.Configs = sliced("").Configs
	mixed.Configs[0].Requests = []string{"second"}
	for name, tt := range map[string]struct {
		first, second dra.Claim
		want          string
	}{
		"too much": {part("uid-1", 61, gpuA), part("uid-2", 20, gpuA),
			"does not have enough memory left for the claim; it is in use by default/claim-uid-1"},
		"another time slice": {part("uid-1", 20, gpuA), long(part("uid-2", 20, gpuA)),
			"is shared by the claim default/claim-uid-1 with other settings: without configuration instead of GpuConfig: time-slicing, interval Long"},
		"two ways in a claim": {part("uid-1", 20, gpuC), mixed,
			"the requests gpu and second have shares of the device gpu-0"},
		"an odd share": {part("uid-1", 20, gpuC), odd, `invalid share ID "../share"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, _ := r.start()
			r.prepare(c, tt.first)
			_, err := ask(t.Context(), c, tt.second)
			if err == nil || !strings.Contains(err.Error(), tt.want) || r.record("uid-2") != "" || r.spec("uid-2") != nil {
				t.Errorf("Prepare() = %v, want %q; record %q", err, tt.want, r.record("uid-2"))
			}
		})
	}
}

// TestSharesThatAreNotPublished: the GPU of a share is given whole by now, or the records were
// lost, or the node was restarted. What others have counts all the same, as long as their
// containers can run.
func TestSharesThatAreNotPublished(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.pools.Publish(r.pools.Value().Shared(4))
	c, stop := r.start()
	r.prepare(c, part("uid-1", 60, gpuA))
	stop()
	if err := os.RemoveAll(filepath.Join(r.options.StateDir, "claims")); err != nil {
		t.Fatal(err)
	}
	r.pools.Publish(r.pools.Value().Unshared())
	c, stop = r.start()
	for uid, fits := range map[string]bool{"uid-2": true, "uid-3": false} {
		gib := map[bool]int{true: 20, false: 21}[fits]
		if _, err := ask(t.Context(), c, part(uid, gib, gpuA)); (err == nil) != fits {
			t.Errorf("a share of %d GiB: %v", gib, err)
		}
		r.unprepare(c, uid)
	}
	if _, err := ask(t.Context(), c, claim("uid-4", gpuA)); err == nil {
		t.Error("the whole GPU was given while a claim has a share")
	}
	stop()
	r.options.BootID = "two"
	c, _ = r.start()
	if _, err := ask(t.Context(), c, part("uid-5", 60, gpuA)); err != nil {
		t.Errorf("after a restart of the node: %v", err)
	}
	if _, err := ask(t.Context(), c, part("uid-1", 60, gpuA)); err == nil {
		t.Error("a claim of before the restart was given memory that another one has")
	}
}

// TestSharesAtOnce: claims come and go at the same time with shares of two GPUs, and with the whole
// of them. Never is more memory given than there is, and never a share beside a whole.
func TestSharesAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	var mu sync.Mutex
	given, got := map[string]int{}, 0 // GiB by device
	account := func(device string, gib int) {
		mu.Lock()
		defer mu.Unlock()
		if given[device] += gib; given[device] > 80 {
			t.Errorf("%d GiB of %s are given", given[device], device)
		}
		if gib > 0 {
			got++
		}
	}
	var pods sync.WaitGroup
	for n := range 6 {
		pods.Go(func() {
			random := rand.New(rand.NewPCG(uint64(n), 7))
			for i := range 25 {
				uid, device, gib := fmt.Sprintf("uid-%d-%d", n, i), []string{gpuA, gpuC}[random.IntN(2)], 10+10*random.IntN(5)
				wanted := part(uid, gib, device)
				if random.IntN(4) == 0 {
					wanted, gib = claim(uid, device), 80
				}
				_, err := ask(t.Context(), c, wanted)
				if err != nil && !strings.Contains(err.Error(), "in use by") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					account(device, gib)
					account(device, -gib)
				}
				if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
		})
	}
	pods.Wait()
	if got < 25 || len(files(t, r.options.CDIDir)) != 0 {
		t.Errorf("%d claims were prepared; specs %v are left", got, files(t, r.options.CDIDir))
	}
}

// TestShareOfAnIllGPU: a GPU that becomes ill keeps the shares that it has, and is given no other.
func TestShareOfAnIllGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	r.prepare(c, part("uid-1", 20, gpuA))
	s := snapshot()
	s.Generation, s.GPUs = 2, slices.Clone(s.GPUs)
	s.GPUs[0].Health = inventory.Health{State: inventory.Unhealthy, XID: 79}
	r.publish(s)
	if _, err := ask(t.Context(), c, part("uid-1", 20, gpuA)); err != nil {
		t.Errorf("a share that is prepared: %v", err)
	}
	if _, err := ask(t.Context(), c, part("uid-2", 20, gpuA)); err == nil || !strings.Contains(err.Error(), "Unhealthy") {
		t.Errorf("a new share of an ill GPU: %v", err)
	}
}

// partByMPS is a claim for a share of the first GPU, which is used by MPS.
func partByMPS(uid string, gib int, config ...string) dra.Claim {
	c := part(uid, gib, gpuA)
	c.Configs = byMPS(uid, strings.Join(config, ",")).Configs
	return c
}

// TestSharesByMPS: the shares of a GPU have one control daemon without limits; those of each claim
// are in the environment of its containers: its memory, unless the configuration says less. The
// daemon ends with the last of them, in any order.
func TestSharesByMPS(t *testing.T) {
	t.Parallel()
	const daemon = `{"devices":[{"uuid":"GPU-a"}],"multiUser":true,"exclusive":true,"shared":true}`
	r := newRig(t)
	c, stop := r.start()
	environments := map[string][]string{
		"uid-1": {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M"},
		"uid-2": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M"},
		"uid-3": {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M"},
	}
	configs := map[string]string{
		"uid-1": ``, "uid-2": `"defaultActiveThreadPercentage":30,"defaultPinnedDeviceMemoryLimit":"1Gi"`,
		"uid-3": `"defaultPinnedDeviceMemoryLimit":"1Gi","defaultPerDevicePinnedMemoryLimit":{"0":"50Gi"}`,
	}
	for _, uid := range []string{"uid-1", "uid-2", "uid-3"} {
		r.prepare(c, partByMPS(uid, 20, configs[uid]))
		env := r.spec(uid).Devices[0].ContainerEdits.Env
		want := append([]string{"CUDA_MPS_PIPE_DIRECTORY=/mps/claims/gpu.GPU-a/pipe"}, environments[uid]...)
		if !slices.Equal(env[max(len(env)-len(want), 0):], want) {
			t.Errorf("%s has the environment %q, want %q", uid, env, want)
		}
		if all := r.mps(); len(all) != 1 || all["gpu.GPU-a"] != daemon {
			t.Errorf("control daemons with %s: %v", uid, all)
		}
	}
	for _, s := range c.Status().Value() {
		if !s.Devices[0].Limited || s.Devices[0].Problem != "" {
			t.Errorf("%s is shown with %+v", s.UID, s.Devices[0])
		}
	}
	if _, err := ask(t.Context(), c, part("uid-4", 20, gpuA)); err == nil ||
		!strings.Contains(err.Error(), "MPS for all or none") {
		t.Errorf("a share without MPS: %v", err)
	}
	stop()
	c, _ = r.start() // the next process
	for i, uid := range []string{"uid-2", "uid-1", "uid-3"} {
		if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil || len(r.mps()) != min(2-i, 1) {
			t.Errorf("after %s: %v, control daemons %v", uid, err, r.mps())
		}
	}
	if _, err := ask(t.Context(), c, part("uid-4", 20, gpuA)); err != nil {
		t.Errorf("a share without MPS when the others have ended: %v", err)
	}
}

// TestWholeOfASharedGPUByMPS: a claim with all of the memory has a daemon of its own, as on a GPU
// that is not given in shares. Several shares of one claim have the daemon of the GPU.
func TestWholeOfASharedGPUByMPS(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	whole, two := partByMPS("uid-1", 80, `"defaultActiveThreadPercentage":40`), part("uid-2", 20, gpuC, gpuC)
	two.Configs = whole.Configs
	for _, wanted := range []dra.Claim{whole, two} {
		r.prepare(c, wanted)
	}
	want := map[string]string{
		"uid-1-0":   `{"devices":[{"uuid":"GPU-a"}],"activeThreadPercentage":40,"exclusive":true}`,
		"gpu.GPU-c": `{"devices":[{"uuid":"GPU-c"}],"multiUser":true,"exclusive":true,"shared":true}`,
	}
	if diff := cmp.Diff(want, r.mps()); diff != "" {
		t.Errorf("control daemons (-want +got):\n%s", diff)
	}
}

// TestSharesByMPSAtOnce: claims with shares of one GPU come and go at the same time. Each finds the
// control daemon as long as it is prepared, and the last one leaves none.
func TestSharesByMPSAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	var pods sync.WaitGroup
	for n := range 4 {
		pods.Go(func() {
			for i := range 20 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				if _, err := ask(t.Context(), c, partByMPS(uid, 20)); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
				if _, err := os.Stat(filepath.Join(r.dir, "gpu.GPU-a.mps")); err != nil {
					t.Errorf("%s is prepared: %v", uid, err)
				}
				if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
		})
	}
	pods.Wait()
	if len(r.mps()) > 0 {
		t.Errorf("control daemons are left: %v", r.mps())
	}
}

// TestSharedDaemonThatIsLeft: one that no claim needs is ended after a while, and one that is
// needed is not, also after a restart of the node.
func TestSharedDaemonThatIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		if err := (daemons{r}).Start(t.Context(), "gpu.GPU-c",
			mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-c"}}}); err != nil {
			t.Fatal(err)
		}
		c, stop := r.start()
		for _, uid := range []string{"uid-1", "uid-2"} {
			r.prepare(c, partByMPS(uid, 20))
		}
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		if all := r.mps(); len(all) != 1 || all["gpu.GPU-a"] == "" {
			t.Errorf("control daemons %v", all)
		}
		stop()
		r.options.BootID = "two"
		c, stop = r.start()
		defer stop()
		r.prepare(c, partByMPS("uid-2", 20))
		time.Sleep(claims.RefreshInterval + 1)
		synctest.Wait()
		if len(r.mps()) != 1 {
			t.Errorf("control daemons %v, and one of two claims was prepared again", r.mps())
		}
		if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || len(r.mps()) > 0 {
			t.Errorf("%v, control daemons %v", err, r.mps())
		}
	})
}

// counted returns a claim with so many of the shares of each device.
func counted(uid string, count int, devices ...string) dra.Claim {
	c := part(uid, 0, devices...)
	for i := range c.Results {
		c.Results[i].ConsumedCapacity = map[string]string{"memory": "0", "shares": fmt.Sprint(count)}
	}
	return c
}

// TestSharesByCount: so many claims as there are shares have a GPU or a MIG device, over restarts;
// the whole of it nobody has meanwhile. Those whose claims were not given back count, whatever the
// scheduler knows.
func TestSharesByCount(t *testing.T) {
	t.Parallel()
	for _, device := range []string{gpuA, migB0} {
		r := newRig(t)
		r.pools.Publish(r.pools.Value().SharedBy(dra.ByCount, 3))
		c, stop := r.start()
		r.prepare(c, counted("uid-1", 1, device))
		r.prepare(c, counted("uid-2", 2, device))
		stop()
		c, _ = r.start()
		for want, wrong := range map[string]dra.Claim{
			"does not have enough shares left for the claim; it is in use by default/claim-uid-1, default/claim-uid-2": counted("uid-3", 1, device),
			"is in use by the claim": claim("uid-4", device),
		} {
			if _, err := ask(t.Context(), c, wrong); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %s", device, err, want)
			}
		}
		if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil {
			t.Fatal(err)
		}
		r.prepare(c, counted("uid-3", 2, device))
		r.pools.Publish(r.pools.Value().Unshared().SharedBy(dra.Unlimited, 0))
		without := part("uid-5", 0, device)
		if _, err := ask(t.Context(), c, without); err == nil || !strings.Contains(err.Error(), "with other settings") {
			t.Errorf("%s: without a limit beside shares that are counted: %v", device, err)
		}
		for _, uid := range []string{"uid-1", "uid-3"} {
			if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 20 {
			r.prepare(c, part(fmt.Sprintf("uid-u%d", i), 0, device))
		}
	}
}

// TestSharesByCountAndMPS: a claim is limited to its part of the memory and of the threads, as by
// the device plugin, unless its configuration says less. MIG devices in shares have no MPS.
func TestSharesByCountAndMPS(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.pools.Publish(r.pools.Value().SharedBy(dra.ByCount, 4))
	c, _ := r.start()
	for uid, tt := range map[string]struct {
		count  int
		config string
		want   []string
	}{
		"uid-1": {1, ``, []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M"}},
		"uid-2": {2, ``, []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40960M"}},
		"uid-3": {1, `"defaultActiveThreadPercentage":60,"defaultPinnedDeviceMemoryLimit":"1Gi"`,
			[]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M"}},
	} {
		wanted := counted(uid, tt.count, gpuA)
		wanted.Configs = byMPS(uid, tt.config).Configs
		r.prepare(c, wanted)
		spec := text(t, r.spec(uid))
		for _, env := range tt.want {
			if !strings.Contains(spec, env) {
				t.Errorf("%s: the spec has not %s: %s", uid, env, spec)
			}
		}
	}
	mig := counted("uid-4", 1, migB0)
	mig.Configs = byMPS("uid-4", "").Configs
	mig.Configs[0].Parameters = []byte(strings.ReplaceAll(string(mig.Configs[0].Parameters), "GpuConfig",
		"MigDeviceConfig"))
	if _, err := ask(t.Context(), c, mig); err == nil || !strings.Contains(err.Error(),
		"MPS is not supported for shares of MIG devices") {
		t.Errorf("MPS for a share of a MIG device: %v", err)
	}
}
