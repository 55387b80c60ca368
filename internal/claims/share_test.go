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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// TestSharesOfOneGPU: claims have one GPU at the same time, come and go in any order, and each is answered, recorded and shown with its share.
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
					answer, err := c.Prepare(t.Context(), part(uid, 20, gpuA))
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
				if _, err := c.Prepare(t.Context(), claim("whole", gpuA)); err == nil || !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("the whole of a GPU with %d shares: %v", 3-n, err)
				}
				if err := c.NotPrepared([]string{"GPU-a"}); err == nil {
					t.Error("the device plugin may give the GPU")
				}
				if err := c.Unprepare(t.Context(), uids[i], "default", "claim-"+uids[i]); err != nil {
					t.Fatal(err)
				}
				if r.record(uids[i]) != "" || r.spec(uids[i]) != nil || len(c.InUse().Value()["GPU-a"]) != 2-n {
					t.Errorf("after %s: record %q, in use %v", uids[i], r.record(uids[i]), c.InUse().Value())
				}
			}
			if _, err := c.Prepare(t.Context(), claim("whole", gpuA)); err != nil {
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
	answer, err := c.Prepare(t.Context(), part("uid-1", 30, gpuA, gpuA))
	if err != nil {
		t.Fatal(err)
	}
	if all := ids(answer); len(all) != 2 || all[0] == all[1] || r.nodes(all...) != "nvidia0 nvidia0" {
		t.Errorf("CDI devices %v", all)
	}
	if _, err := c.Prepare(t.Context(), part("uid-2", 30, gpuA)); err == nil || !strings.Contains(err.Error(), "has not as much memory left") {
		t.Errorf("more than is left: %v", err)
	}
	if _, err := c.Prepare(t.Context(), part("uid-3", 20, gpuA)); err != nil {
		t.Errorf("what is left: %v", err)
	}
	if _, err := c.Prepare(t.Context(), part("uid-4", 41, gpuC, gpuC)); err == nil || r.record("uid-4") != "" {
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
		"too much":            {part("uid-1", 61, gpuA), part("uid-2", 20, gpuA), "has not as much memory left as the claim was given; it is in use by default/claim-uid-1"},
		"another time slice":  {part("uid-1", 20, gpuA), long(part("uid-2", 20, gpuA)), "is shared by the claim default/claim-uid-1 in another way: without configuration, and not GpuConfig: time-slicing, interval Long"},
		"two ways in a claim": {part("uid-1", 20, gpuC), mixed, "the requests gpu and second have shares of the device gpu-0"},
		"an odd share":        {part("uid-1", 20, gpuC), odd, `"../share" is not the ID of a share`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, _ := r.start()
			if _, err := c.Prepare(t.Context(), tt.first); err != nil {
				t.Fatal(err)
			}
			_, err := c.Prepare(t.Context(), tt.second)
			if err == nil || !strings.Contains(err.Error(), tt.want) || r.record("uid-2") != "" || r.spec("uid-2") != nil {
				t.Errorf("Prepare() = %v, want %q; record %q", err, tt.want, r.record("uid-2"))
			}
		})
	}
}

// TestSharesThatAreNotPublished: the GPU of a share is given whole by now, or the records were lost, or the node was restarted. What others
// have counts all the same, as long as their containers can run.
func TestSharesThatAreNotPublished(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.pools.Publish(r.pools.Value().Shared(4))
	c, stop := r.start()
	if _, err := c.Prepare(t.Context(), part("uid-1", 60, gpuA)); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := os.RemoveAll(filepath.Join(r.options.StateDir, "claims")); err != nil {
		t.Fatal(err)
	}
	r.pools.Publish(r.pools.Value().Unshared())
	c, stop = r.start()
	for uid, fits := range map[string]bool{"uid-2": true, "uid-3": false} {
		gib := map[bool]int{true: 20, false: 21}[fits]
		if _, err := c.Prepare(t.Context(), part(uid, gib, gpuA)); (err == nil) != fits {
			t.Errorf("a share of %d GiB: %v", gib, err)
		}
		if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Prepare(t.Context(), claim("uid-4", gpuA)); err == nil {
		t.Error("the whole GPU was given while a claim has a share")
	}
	stop()
	r.options.BootID = "two"
	c, _ = r.start()
	if _, err := c.Prepare(t.Context(), part("uid-5", 60, gpuA)); err != nil {
		t.Errorf("after a restart of the node: %v", err)
	}
	if _, err := c.Prepare(t.Context(), part("uid-1", 60, gpuA)); err == nil {
		t.Error("a claim of before the restart was given memory that another one has")
	}
}

// TestSharesOfTwoProcesses: two daemons overlap while claims come and go with shares of two GPUs, and with the whole of them. Never is more
// memory given than there is, and never a share beside a whole.
func TestSharesOfTwoProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	first, _ := r.start()
	second, _ := r.start()
	both := []*claims.Claims{first, second}
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
				_, err := both[i%2].Prepare(t.Context(), wanted)
				if err != nil && !strings.Contains(err.Error(), "in use by") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					account(device, gib)
					account(device, -gib)
				}
				if err := both[(i+1)%2].Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
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
	if _, err := c.Prepare(t.Context(), part("uid-1", 20, gpuA)); err != nil {
		t.Fatal(err)
	}
	s := snapshot()
	s.Generation, s.GPUs = 2, slices.Clone(s.GPUs)
	s.GPUs[0].Health = inventory.Health{State: inventory.Unhealthy, XID: 79}
	r.publish(s)
	if _, err := c.Prepare(t.Context(), part("uid-1", 20, gpuA)); err != nil {
		t.Errorf("a share that is prepared: %v", err)
	}
	if _, err := c.Prepare(t.Context(), part("uid-2", 20, gpuA)); err == nil || !strings.Contains(err.Error(), "Unhealthy") {
		t.Errorf("a new share of an ill GPU: %v", err)
	}
}
