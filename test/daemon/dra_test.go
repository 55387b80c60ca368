package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
)

const draDriver = "gpu.nvidia.com"

// A claimable is a node whose GPUs the daemon gives as its configuration file says, with an API
// server and the part of kubelet that calls DRA drivers.
type claimable struct {
	*stage
	api       *apiserver.Server
	plugins   *plugins.Kubelet
	file      string        // the configuration
	driver    string        // its name; empty for draDriver
	callLimit time.Duration // of kubelet's calls for a claim; 0 for a long one
	library   *cuda.Library // that proves CUDA; nil for none

	mu        sync.Mutex
	users     map[string]map[string]string // of GPUs, by UUID: the pods that have them now, and by which way
	allocated map[string]string            // devices by the claim that the scheduler gave them to
	given     map[string]int               // how many pods got a GPU, by the way
	refused   []string
	shared    int // how often kubelet gave a GPU that it had forgotten to a second pod
}

func newClaimable(t *testing.T, mode string, args ...string) *claimable {
	t.Helper()
	c := openClaimable(t, mode, args...)
	c.start()
	return c
}

// openClaimable is newClaimable without a daemon.
func openClaimable(t *testing.T, mode string, args ...string) *claimable {
	t.Helper()
	s, api := openAgent(t, "")
	c := &claimable{stage: s, api: api, users: map[string]map[string]string{}, allocated: map[string]string{},
		given: map[string]int{}}
	registry := c.Path("plugins_registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		t.Fatal(err)
	}
	c.plugins = plugins.Start(plugins.Options{Dir: registry})
	t.Cleanup(c.plugins.Stop)
	c.file = c.write("config.yaml", "dra: {mode: "+mode+"}")
	c.Args = append(c.Args, "--kubelet-root", c.Path(""), "--config-file", c.file)
	for _, arg := range args {
		c.Args = append(c.Args, strings.ReplaceAll(arg, "$DIR", c.Path("")))
	}
	return c
}

// mode has the configuration file name another mode.
func (c *claimable) mode(text string) {
	c.t.Helper()
	next := c.write("next.yaml", "dra: "+text)
	if err := os.Rename(next, c.file); err != nil {
		c.t.Fatal(err)
	}
}

// devices returns the devices in slices that new claims may have, with the UUIDs.
func (c *claimable) devices() map[string]string {
	found := map[string]string{}
	for _, s := range c.api.Slices() {
		for _, d := range s.Spec.Devices {
			if len(d.Taints) == 0 {
				found[d.Name] = *d.Attributes["uuid"].StringValue
			}
		}
	}
	return found
}

// published waits until so many devices are in slices for new claims.
func (c *claimable) published(count int) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("%d devices in slices", count), func() bool { return len(c.devices()) == count })
}

// claim gives a device to a claim as the scheduler does: by the slices as they were seen.
func (c *claimable) claim(name, device string) (uid string) {
	c.t.Helper()
	if err := c.api.ChangeClaim("default", name, func(claim *resourceapi.ResourceClaim) {
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
			{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: draDriver, AllocationMode: "ExactCount",
				Count: 1}}}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: cmp.Or(c.driver, draDriver),
				Pool: nodeName, Device: device}},
		}}
	}); err != nil {
		c.t.Fatal(err)
	}
	made, err := c.api.Claim("default", name)
	if err != nil {
		c.t.Fatal(err)
	}
	return string(made.UID)
}

// prepare has kubelet start a pod on a claim, and returns the names of its CDI devices.
func (c *claimable) prepare(ctx context.Context, name, uid string) ([]string, error) {
	answers, err := c.plugins.Prepare(ctx, cmp.Or(c.driver, draDriver),
		&drav1.Claim{Namespace: "default", Name: name, Uid: uid})
	if err == nil && answers[uid].GetError() != "" {
		err = errors.New(answers[uid].GetError())
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, d := range answers[uid].GetDevices() {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids, nil
}

// prepared has kubelet start a pod on a claim again and again until it may: the driver may not be
// registered yet.
func (c *claimable) prepared(name, uid string) (ids []string) {
	c.t.Helper()
	c.eventually("claim "+name+" is prepared", func() bool {
		now, err := c.prepare(c.t.Context(), name, uid)
		ids = now
		return err == nil
	})
	return ids
}

// release has the last pod on a claim end: kubelet asks until the driver has given it back, and the
// claim is deleted.
func (c *claimable) release(ctx context.Context, name, uid string) {
	for ctx.Err() == nil {
		answers, err := c.plugins.Unprepare(ctx, cmp.Or(c.driver, draDriver),
			&drav1.Claim{Namespace: "default", Name: name, Uid: uid})
		if err == nil && answers[uid].GetError() == "" {
			break
		}
		pause(ctx, 50*time.Millisecond)
	}
	if err := c.api.DeleteClaim("default", name); err != nil {
		c.t.Error(err)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// has notes that a pod has GPUs. It fails if another pod has one of them, but for a fault of
// kubelet's own (kubernetes/kubernetes#137534), which ADR 48 makes rare: where kubelet answers a
// question about pods while it allocates a GPU, it forgets that GPU and gives it to the next pod,
// too, by the device plugin.
func (c *claimable) has(pod, way string, uuids ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.given[way]++
	for _, uuid := range uuids {
		for other, by := range c.users[uuid] {
			if way != "plugin" || by != "plugin" || !c.forgotten(uuid, pod, other) {
				c.t.Errorf("%s is given to %s by %s and to %s by %s", uuid, other, by, pod, way)
				continue
			}
			c.shared++
		}
		if c.users[uuid] == nil {
			c.users[uuid] = map[string]string{}
		}
		c.users[uuid][pod] = way
	}
}

// forgotten reports whether kubelet forgot a GPU while it allocated it to that of two pods which
// got it first.
func (c *claimable) forgotten(uuid, one, other string) bool {
	first, forgotten := "", map[string]bool{}
	for _, e := range c.Events(0) {
		switch {
		case e.Pod != one && e.Pod != other || !slices.Contains(e.IDs, uuid):
		case e.Kind == standin.Forgotten:
			forgotten[e.Pod] = true
		case first == "":
			first = e.Pod
		}
	}
	return forgotten[first]
}

func (c *claimable) hasNot(pod string, uuids ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uuid := range uuids {
		delete(c.users[uuid], pod)
	}
}

// load has pods come and go until ctx ends: where kubelet has GPUs of the device plugin they get
// one there, and else by a claim, as the scheduler decides it. It sees slices as they were some
// time ago.
func (c *claimable) load(ctx context.Context, worker int) {
	stale := c.devices()
	for n := 0; ctx.Err() == nil; n++ {
		pod := fmt.Sprintf("pod-%d-%d", worker, n)
		if c.Allocatable(gpu) > 0 {
			c.byPlugin(ctx, pod)
		} else if name, uuid := c.choose(pod, stale); name != "" {
			c.byClaim(ctx, pod, name, uuid)
		}
		if stale = c.devices(); rand.N(4) == 0 { // the scheduler's cache lags behind
			pause(ctx, rand.N(50*time.Millisecond))
		}
		// All together ask for less than the 100 answers a second that kubelet's PodResources gives: each
		// claim needs one.
		pause(ctx, rand.N(200*time.Millisecond))
	}
}

func (c *claimable) byPlugin(ctx context.Context, pod string) {
	got, err := c.Admit(ctx, standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1})
	if err != nil {
		return // all are taken, or the daemon has just ended
	}
	c.has(pod, "plugin", got.IDs...)
	pause(ctx, rand.N(60*time.Millisecond))
	c.hasNot(pod, got.IDs...)
	c.Remove(pod)
}

// choose takes a device that no claim has.
func (c *claimable) choose(claim string, devices map[string]string) (name, uuid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, uuid := range devices {
		if c.allocated[name] == "" {
			c.allocated[name] = claim
			return name, uuid
		}
	}
	return "", ""
}

func (c *claimable) byClaim(ctx context.Context, pod, device, uuid string) {
	uid := c.claim(pod, device)
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	call, end := context.WithTimeout(limited, cmp.Or(c.callLimit, patience))
	_, err := c.prepare(call, pod, uid)
	if end(); err != nil {
		c.mu.Lock()
		c.refused = append(c.refused, err.Error())
		c.mu.Unlock()
		pause(ctx, 50*time.Millisecond)
	} else {
		c.has(pod, "claim", uuid)
		pause(ctx, rand.N(60*time.Millisecond))
		c.hasNot(pod, uuid)
	}
	c.release(limited, pod, uid)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.allocated, device)
}

// counted returns how many pods got a GPU in a way.
func (c *claimable) counted(way string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.given[way]
}

// TestClaims: a GPU of a node in the mode dra is in a slice, a claim has it prepared, the
// container's CDI spec has its device node alone, and kubelet has no resource of the device plugin. When
// the GPU needs a reset, the pod of its claim is evicted, and the GPU is reset after the pod has ended.
func TestClaims(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra", "--namespace=gpus", "--repair=evict", "--rollout-slots=1")
	c.published(8)
	uid := c.claim("one", "gpu-3")
	ids := c.prepared("one", uid)
	again, err := c.prepare(t.Context(), "one", uid)
	if err != nil || !slices.Equal(ids, again) || len(ids) != 1 {
		t.Errorf("prepared as %q, then as %q and %v", ids, again, err)
	}
	_, name, _ := strings.Cut(ids[0], "=")
	specs, err := filepath.Glob(filepath.Join(c.Path("cdi"), "*claim*"))
	if err != nil || len(specs) != 1 {
		t.Fatalf("specs %q and %v", specs, err)
	}
	text, err := os.ReadFile(specs[0])
	if err != nil {
		t.Fatal(err)
	}
	if spec := string(text); !strings.Contains(spec, name) || !strings.Contains(spec, "/dev/nvidia3") ||
		strings.Contains(spec, "/dev/nvidia2") {
		t.Errorf("the CDI spec: %s", text)
	}
	if got := c.Resources(); len(got) > 0 {
		t.Errorf("kubelet has %v", slices.Collect(maps.Keys(got)))
	}
	second := c.claim("two", "gpu-3")
	if _, err := c.prepare(t.Context(), "two", second); err == nil || !strings.Contains(err.Error(), "default/one") {
		t.Errorf("a second claim on the GPU: %v", err)
	}
	if shown := c.command("status"); !strings.Contains(shown, "gpu-3") || !strings.Contains(shown, "default/one") {
		t.Errorf("status:\n%s", shown)
	}
	c.release(t.Context(), "one", uid)
	if specs, _ := filepath.Glob(filepath.Join(c.Path("cdi"), "*claim*")); len(specs) > 0 {
		t.Errorf("specs are left: %q", specs)
	}
	c.prepared("two", second)

	for _, name := range []string{"train", "other"} {
		if err := c.api.AddPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{NodeName: nodeName}}); err != nil {
			t.Fatal(err)
		}
	}
	c.AdmitClaim(standin.Container{Pod: "train", Name: "c"}, &podresources.DynamicResource{
		ClaimNamespace: "default", ClaimName: "two",
		ClaimResources: []*podresources.ClaimResource{{DriverName: draDriver, PoolName: nodeName, DeviceName: "gpu-3"}},
	})
	c.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 119})
	c.eventually("the pod of the claim is evicted", func() bool { return len(c.api.Pods()) < 2 })
	if _, left := c.api.Pods()["default/other"]; !left {
		t.Errorf("the pods that are left: %v", c.api.Pods())
	}
	if state, reason := c.repairState(3); state != repair.Waiting || !strings.Contains(reason, "default/two") {
		t.Errorf("while the pod ends: %s, %s", state, reason)
	}
	c.Remove("train")
	c.release(t.Context(), "two", second)
	c.eventually("the GPU is repaired", func() bool {
		r := c.status().Repair
		return r != nil && r.Repaired == 1 && len(r.Steps) == 0
	})
}

// owner waits until a GPU has an owner.
func (c *claimable) owner(uuid, want string) {
	c.t.Helper()
	c.eventually("the owner of "+uuid+" is "+want, func() bool {
		var now struct {
			DRA struct {
				GPUs []struct{ UUID, Owner string }
			}
		}
		out, err := exec.CommandContext(c.t.Context(), binary, "status", "-o", "json", "--control-socket",
			c.ControlSocket()).Output()
		if err := errors.Join(err, json.Unmarshal(out, &now)); err != nil {
			return false
		}
		return slices.ContainsFunc(now.DRA.GPUs, func(g struct {
			UUID,
			Owner string
		}) bool {
			return g.UUID == uuid && g.Owner == want
		})
	})
}

// TestSplit: GPUs that are selected are in slices, the others are the device plugin's.
func TestSplit(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "split, gpus: {indices: [1, 6]}")
	c.published(2)
	c.allocatable(6)
	for uuid := range c.Devices(gpu) {
		if slices.Contains(slices.Collect(maps.Values(c.devices())), uuid) {
			t.Errorf("%s is in both", uuid)
		}
	}
}

// TestHandOverUnderLoad changes the mode to and fro while pods come and go, and kills the daemon in
// the middle: no GPU is ever given to two pods, but for what kubelet forgot.
func TestHandOverUnderLoad(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "plugin")
	c.allocatable(8)
	if n := c.api.Requests()[apiserver.Request{Verb: "list", Resource: "resourceslices"}]; n > 0 {
		t.Errorf("%d lists of slices in the mode plugin", n)
	}
	ctx, stop := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	for i := range 12 {
		workers.Go(func() { c.load(ctx, i) })
	}
	served := func(way string) {
		t.Helper()
		before := c.counted(way)
		c.eventually("pods by "+way, func() bool { return c.counted(way) >= before+30 })
	}
	held := c.hold("long")
	for round := range 3 {
		served("plugin")
		c.mode("{mode: dra}")
		if round == 0 {
			c.eventually("seven GPUs, without the one that is held", func() bool { return len(c.devices()) == 7 })
			c.hasNot("long", held)
			c.Remove("long")
		}
		if round == 1 {
			c.crash()
		}
		c.published(8)
		served("claim")
		c.mode("{mode: plugin}")
		if round == 2 {
			c.crash()
		}
		c.allocatable(8)
	}
	served("plugin")
	stop()
	workers.Wait()
	c.eventually("no slice is left", func() bool { return len(c.api.Slices()) == 0 })
	reasons := slices.Compact(slices.Sorted(slices.Values(c.refused)))
	forgotten := slices.DeleteFunc(c.Events(0), func(e standin.Event) bool { return e.Kind != standin.Forgotten })
	t.Logf("kubelet forgot devices that it was allocating %d times, and gave them to two pods %d times: %v",
		len(forgotten), c.shared, forgotten)
	t.Logf("pods by plugin %d, by claim %d, refused %d: %q", c.given["plugin"], c.given["claim"], len(c.refused), reasons)
	// Each worker chooses by old slices some times at each change. A driver that refuses claims for no
	// reason refuses far more.
	if most := c.given["claim"] + 20*12; len(c.refused) > most {
		t.Errorf("%d claims are refused, want %d at most", len(c.refused), most)
	}
}

// hold has a pod hold a GPU of the device plugin for a long time.
func (c *claimable) hold(pod string) (uuid string) {
	c.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		got, err := c.Admit(c.t.Context(), standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1})
		if err == nil {
			c.has(pod, "plugin", got.IDs...)
			return got.IDs[0]
		}
	}
	c.t.Fatalf("no GPU for %s", pod)
	return ""
}

// crash kills the daemon, and starts it again.
func (c *claimable) crash() {
	c.t.Helper()
	c.kill()
	c.start()
}
