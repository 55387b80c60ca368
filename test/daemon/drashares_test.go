package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// share makes of a claim one with a part of its device, as the scheduler does.
func (c *claimable) share(name, memory string) {
	c.t.Helper()
	if err := c.api.ChangeClaim("default", name, func(claim *resourceapi.ResourceClaim) {
		result := &claim.Status.Allocation.Devices.Results[0]
		result.ShareID = ptr.To(types.UID("share-of-" + name))
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	}); err != nil {
		c.t.Fatal(err)
	}
}

// TestShares: claims have parts of one GPU by MPS, which has one control daemon, each with its own
// limit. They are answered with their shares, and go on while all processes die. The GPU is given
// whole, and goes to the device plugin, when none has it any more.
func TestShares(t *testing.T) {
	t.Parallel()
	c := newWithMPS(t)
	signal := c.mpsControlDaemon()
	c.mode("{mode: dra, shares: 4}")
	c.eventually("GPUs are given in shares", func() bool {
		for _, s := range c.api.Slices() {
			for _, d := range s.Spec.Devices {
				if !ptr.Deref(d.AllowMultipleAllocations, false) || d.Capacity["memory"].RequestPolicy == nil {
					return false
				}
			}
		}
		return true
	})
	uuid := c.devices()["gpu-3"]
	uids := map[string]string{}
	for _, name := range []string{"one", "two"} {
		uids[name] = c.claimByMPS(name, "gpu-3")
		c.share(name, map[string]string{"one": "30Gi", "two": "8Gi"}[name])
		ids := c.prepared(name, uids[name])
		if want := "k8s.gpu.nvidia.com/claim=" + uids[name] + "-gpu-3-share-of-" + name; len(ids) != 1 || ids[0] != want {
			t.Errorf("%s has the CDI devices %q, want %s", name, ids, want)
		}
		answers, err := c.plugins.Prepare(t.Context(), draDriver,
			&drav1.Claim{Namespace: "default", Name: name, Uid: uids[name]})
		if err != nil || answers[uids[name]].GetDevices()[0].GetShareId() != "share-of-"+name {
			t.Errorf("kubelet is told the share of %s: %v, %v", name, answers, err)
		}
	}
	daemon := c.Path("mps/claims/gpu." + uuid)
	check := func(when string) {
		t.Helper()
		all, err := filepath.Glob(c.Path("mps/claims/*.json"))
		if err != nil || len(all) != 1 || all[0] != daemon+".json" {
			t.Errorf("%s the control daemons are %q (%v)", when, all, err)
		}
	}
	check("with two shares")
	for name, limit := range map[string]string{"one": "10240M", "two": "8192M"} { // the configuration says 10Gi
		specs, _ := filepath.Glob(filepath.Join(c.Path("cdi"), "*"+uids[name]+"*"))
		if len(specs) != 1 {
			t.Fatalf("specs of %s: %q", name, specs)
		}
		text, err := os.ReadFile(specs[0])
		for _, part := range []string{
			"CUDA_MPS_PIPE_DIRECTORY=/mps/claims/gpu." + uuid + "/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=" +
				limit, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
		} {
			if !strings.Contains(string(text), part) {
				t.Errorf("the CDI spec of %s has no %s (%v): %s", name, part, err, text)
			}
		}
	}
	if status := c.command("status"); !strings.Contains(status, "30720 MiB of gpu-3, a limit by MPS") {
		t.Errorf("status has no share: %s", status)
	}
	whole := c.claim("whole", "gpu-3")
	if _, err := c.prepare(t.Context(), "whole", whole); err == nil ||
		!strings.Contains(err.Error(), "is in use by the claim default/") {
		t.Errorf("a GPU of which claims have shares was given whole: %v", err)
	}

	c.crash()
	signal(syscall.SIGKILL)
	c.mpsControlDaemon()
	for name, uid := range uids {
		c.prepared(name, uid)
	}
	check("after the deaths of all processes")
	c.mode("{mode: plugin}")
	c.owner(uuid, "leaving-dra")
	c.release(t.Context(), "one", uids["one"])
	check("with one share")
	c.owner(uuid, "leaving-dra")
	c.release(t.Context(), "two", uids["two"])
	c.eventually("nothing is left of the control daemon", func() bool {
		left, err := filepath.Glob(c.Path("mps/claims/*"))
		return err == nil && len(left) == 0
	})
	if err := c.api.DeleteClaim("default", "whole"); err != nil {
		t.Error(err)
	}
	c.allocatable(8)
}
