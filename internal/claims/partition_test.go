package claims_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A gpuInstance is one of GPU-b, as a divider keeps it.
type gpuInstance struct {
	inventory.GPUInstance
	Busy bool
}

// A divider is the driver of a rig whose GPU-b is in MIG mode. How it is divided is in a file, so that it outlives the process.
type divider struct {
	rig *rig

	mu    sync.Mutex
	err   error // of all calls
	step  error // of the steps
	late  error // of the steps, which are made nevertheless
	steps int   // that were made
	mode  inventory.MIGMode
	// looks and makes are called before it is told how the GPU is divided, and before a GPU instance is made.
	looks, makes func()
}

// The profiles of GPU-b, and the devices that are made of it.
const (
	small0 = "gpu-1-mig-1g10gb-19-0"
	small1 = "gpu-1-mig-1g10gb-19-1"
	half0  = "gpu-1-mig-3g40gb-9-0"
	half4  = "gpu-1-mig-3g40gb-9-4"
)

var profiles = []inventory.MIGProfile{
	{Name: "1g.10gb", ID: 19, Count: 7, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}, Attributes: inventory.MIGAttributes{GISlices: 1, CISlices: 1}},
	{Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}, Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3}},
}

// divide has the rig make MIG devices of GPU-b for claims.
func (r *rig) divide() *divider {
	d := &divider{rig: r, mode: inventory.MIGEnabled}
	r.options.Driver = d
	configured := r.configs.Value()
	configured.DRA = config.DRA{Mode: config.DRAAll, DynamicMIG: true}
	r.configs.Publish(configured)
	d.show()
	return d
}

func (d *divider) path() string { return filepath.Join(d.rig.dir, "instances.json") }

func (d *divider) read() (all []gpuInstance) {
	text, err := os.ReadFile(d.path())
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil && !os.IsNotExist(err) {
		d.rig.tb.Error(err)
	}
	return all
}

func (d *divider) write(all []gpuInstance) {
	text, err := json.Marshal(all)
	if err == nil {
		err = os.WriteFile(d.path(), text, 0o600)
	}
	if err != nil {
		d.rig.tb.Error(err)
	}
}

// has writes the instances in one line.
func (d *divider) has() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var parts []string
	for _, i := range d.read() {
		parts = append(parts, fmt.Sprintf("%s@%d/%d", i.Profile, i.Start, len(i.Computes)))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// other has another program make a GPU instance, with compute instances of these sizes.
func (d *divider) other(profile string, start, size int, computes ...int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.read()
	made := inventory.GPUInstance{ID: 90 + len(all), Profile: profile, Start: start, Size: size}
	for i, n := range computes {
		made.Computes = append(made.Computes, inventory.ComputeInstance{ID: i, Slices: n})
	}
	d.write(append(all, gpuInstance{GPUInstance: made}))
}

// busy has processes compute on all instances, or on none.
func (d *divider) busy(busy bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.read()
	for i := range all {
		all[i].Busy = busy
	}
	d.write(all)
}

// fail has all calls fail, or only steps.
func (d *divider) fail(err, step error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.step = err, step
}

func (d *divider) Partitions(_ context.Context, uuid string) (inventory.Partitions, error) {
	if d.looks != nil {
		d.looks()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil || uuid != "GPU-b" {
		return inventory.Partitions{}, errors.Join(d.err)
	}
	p := inventory.Partitions{Mode: d.mode, Pending: d.mode, Profiles: profiles}
	for _, i := range d.read() {
		p.Instances = append(p.Instances, i.GPUInstance)
	}
	slices.SortFunc(p.Instances, func(a, b inventory.GPUInstance) int { return a.Start - b.Start })
	return p, nil
}

func (d *divider) Processes(context.Context, []string) (map[string][]inventory.Process, error) {
	return nil, nil
}

func (d *divider) Repartition(_ context.Context, _ string, step inventory.MIGStep) (int, error) {
	if d.makes != nil && step.Action == inventory.MIGCreateInstance {
		d.makes()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil || d.step != nil {
		return 0, errors.Join(d.err, d.step)
	}
	all := d.read()
	d.steps++
	at := slices.IndexFunc(all, func(i gpuInstance) bool { return i.ID == step.GI })
	id := 0
	switch step.Action {
	case inventory.MIGCreateInstance:
		id = 1
		for _, i := range all {
			if i.Start < step.Start+step.Size && step.Start < i.Start+i.Size {
				return 0, errors.New("insufficient resources")
			}
			id = max(id, i.ID+1)
		}
		p := profiles[slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.ID == step.Profile })]
		all = append(all, gpuInstance{GPUInstance: inventory.GPUInstance{ID: id, Profile: p.Name, Start: step.Start, Size: p.Size}})
	case inventory.MIGCreateCompute:
		all[at].Computes = []inventory.ComputeInstance{{Slices: step.Size}}
	case inventory.MIGDestroyCompute:
		if all[at].Busy {
			return 0, fmt.Errorf("destroy: %w", inventory.ErrInUse)
		}
		d.served(all[at].ID)
		all[at].Computes = nil
	case inventory.MIGDestroyInstance:
		all = slices.Delete(all, at, at+1)
	default:
		d.rig.tb.Errorf("step %+v", step)
	}
	d.write(all)
	return id, d.late
}

// served complains if a control daemon of MPS may still be there for a MIG device that is destroyed.
func (d *divider) served(gi int) {
	for _, name := range files(d.rig.tb, d.rig.dir) {
		if !strings.Contains(name, ".mps") {
			continue
		}
		if wanted, err := os.ReadFile(filepath.Join(d.rig.dir, name)); err != nil || strings.Contains(string(wanted), fmt.Sprintf("%q", fmt.Sprintf("MIG-%d", gi))) {
			d.rig.tb.Errorf("MIG-%d is destroyed before %s has ended (%v)", gi, name, err)
		}
	}
}

func (d *divider) Look(context.Context) (inventory.Snapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return inventory.Snapshot{}, d.err
	}
	return d.show(), nil
}

// show publishes the node as it is.
func (d *divider) show() inventory.Snapshot {
	s := snapshot()
	s.GPUs[1].MIGDevices = nil
	for _, i := range d.read() {
		if len(i.Computes) == 0 {
			continue
		}
		p := profiles[slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.Name == i.Profile })]
		s.GPUs[1].MIGDevices = append(s.GPUs[1].MIGDevices, inventory.MIGDevice{
			UUID: fmt.Sprintf("MIG-%d", i.ID), Index: len(s.GPUs[1].MIGDevices), GI: i.ID, GICap: 100 + 2*i.ID, CICap: 101 + 2*i.ID, Profile: p.Name,
			Placement: inventory.MIGPlacement{Profile: p.ID, Start: i.Start, Size: i.Size}, Attributes: p.Attributes, Health: healthy,
		})
	}
	d.rig.pools.Publish(dra.NewDivided(s, "node", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), dra.Divisions{"GPU-b": {Profiles: profiles}}))
	d.rig.snapshots.Publish(s)
	return s
}

// TestMadeDevices: a MIG device is made for a claim, given to it alone, and destroyed with it. What another program made stays.
func TestMadeDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	prepare := func(uid string, devices ...string) ([]dra.Prepared, error) {
		return c.Prepare(t.Context(), claim(uid, devices...))
	}
	unprepare := func(uid string) error { return c.Unprepare(t.Context(), uid, "default", "claim-"+uid) }
	refused := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	d.other("1g.10gb", 3, 1)
	first, err := prepare("uid-1", small0, half4)
	if err != nil {
		t.Fatal(err)
	}
	if has := d.has(); has != "1g.10gb@0/1 1g.10gb@3/0 3g.40gb@4/1" {
		t.Errorf("the GPU has %s", has)
	}
	nodes := r.nodes(ids(first)...)
	steps := d.steps
	if again, err := prepare("uid-1", small0, half4); err != nil || text(t, again) != text(t, first) || d.steps != steps {
		t.Errorf("once more: %v, %v, %d steps", again, err, d.steps-steps)
	}
	if holders := c.InUse().Value()["GPU-b"]; len(holders) != 2 || holders[0].Device == "" {
		t.Errorf("in use: %+v", holders)
	}

	_, err = prepare("uid-2", small0)
	refused("is in use by the claim default/claim-uid-1", err)
	_, err = prepare("uid-2", half0)
	refused("is in use by the claim default/claim-uid-1", err)
	admin := claim("uid-admin", half4)
	admin.Results[0].AdminAccess = true
	if seen, err := c.Prepare(t.Context(), admin); err != nil || !strings.Contains(nodes, strings.TrimPrefix(r.nodes(ids(seen)...), "nvidia1 ")) {
		t.Errorf("a claim with adminAccess: %v", err)
	}
	if err := unprepare("uid-admin"); err != nil || d.steps != steps {
		t.Errorf("a claim with adminAccess, given back: %v, %d steps", err, d.steps-steps)
	}
	admin.Results[0].Device = small1
	_, err = c.Prepare(t.Context(), admin)
	refused("adminAccess makes none", err)

	d.busy(true)
	refused("is in use still", unprepare("uid-1"))
	if left := released(c); !strings.Contains(left, "uid-1: destroy: ") {
		t.Errorf("the status says of what is in use still: %q", left)
	}
	_, err = prepare("uid-2", small0)
	refused("which was given back, is not destroyed", err)
	d.busy(false)
	for range 2 {
		if err := unprepare("uid-1"); err != nil {
			t.Fatal(err)
		}
	}
	if has := d.has(); has != "1g.10gb@3/0" || r.record("uid-1") != "" || r.spec("uid-1") != nil {
		t.Errorf("given back: the GPU has %s, record %q", has, r.record("uid-1"))
	}
	_, err = prepare("uid-2", half0)
	refused("is in the way of "+half0+", and was not made for a claim", err)
	if r.record("uid-2") != "" {
		t.Error("a claim that was refused has a record")
	}
	held := claim("uid-3", small1)
	held.Results = append(held.Results, dra.Result{Request: "gpu", Pool: "node", Device: gpuC})
	if _, err := c.Prepare(t.Context(), held); err != nil {
		t.Errorf("with a whole GPU: %v", err)
	}
	if err := unprepare("uid-3"); err != nil || d.has() != "1g.10gb@3/0" {
		t.Errorf("with a whole GPU, given back: %v, the GPU has %s", err, d.has())
	}
}

// TestMadeDevicesWithoutDriver: a driver that refuses leaves nothing behind; one that does not work keeps no claim from being given back,
// and what is left is destroyed when it works again.
func TestMadeDevicesWithoutDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	refused := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	d.fail(nil, inventory.ErrNoPermission)
	_, err := c.Prepare(t.Context(), claim("uid-1", small0))
	refused("the MIG devices of the claim cannot be made", err)
	if d.has() != "" || r.record("uid-1") != "" {
		t.Errorf("a driver that refuses: the GPU has %q, record %q", d.has(), r.record("uid-1"))
	}
	d.fail(nil, inventory.ErrNoAnswer) // it may still come
	_, err = c.Prepare(t.Context(), claim("uid-1", small0))
	refused("the MIG devices of the claim cannot be made", err)
	if r.record("uid-1") == "" {
		t.Error("the record is gone of a claim for which a MIG device may still be made")
	}
	d.fail(nil, nil)
	if _, err := c.Prepare(t.Context(), claim("uid-1", small0)); err != nil || d.has() != "1g.10gb@0/1" {
		t.Errorf("the next call: %v, the GPU has %q", err, d.has())
	}

	d.fail(errors.New("no driver"), nil)
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Fatalf("without a driver: %v", err)
	}
	if r.spec("uid-1") != nil || !strings.Contains(r.record("uid-1"), `"released":true`) || len(c.InUse().Value()["GPU-b"]) != 1 {
		t.Errorf("without a driver: record %q, in use %v", r.record("uid-1"), c.InUse().Value())
	}
	if left := released(c); left != "uid-1: no driver" {
		t.Errorf("the status says of what could not be destroyed: %q", left)
	}
	later, stop := r.start()
	if left := released(later); left != "uid-1: they are to be destroyed" {
		t.Errorf("the status of the next process says: %q", left)
	}
	stop()
	_, err = c.Prepare(t.Context(), claim("uid-2", small0))
	refused("is not destroyed", err)
	_, err = c.Prepare(t.Context(), claim("uid-1", small1))
	refused("not destroyed yet", err)
	d.fail(nil, nil)
	_, err = c.Prepare(t.Context(), claim("uid-2", small0))
	refused("is not destroyed", err)
	c.GiveBackReleased(t.Context())
	if d.has() != "" || r.record("uid-1") != "" || released(c) != "" {
		t.Errorf("the driver is back: the GPU has %q, record %q", d.has(), r.record("uid-1"))
	}
	if _, err := c.Prepare(t.Context(), claim("uid-2", small0)); err != nil {
		t.Error(err)
	}

	// A claim that was given back without a driver, and is allocated anew, has the rest destroyed first.
	d.fail(errors.New("no driver"), nil)
	if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil {
		t.Fatal(err)
	}
	d.fail(nil, nil)
	if _, err := c.Prepare(t.Context(), claim("uid-2", half4)); err != nil || d.has() != "3g.40gb@4/1" {
		t.Errorf("allocated anew: %v, the GPU has %q", err, d.has())
	}

	// A restart of the node has ended all instances: the one at the place is another program's.
	r.options.BootID = "two"
	steps := d.steps
	after, _ := r.start()
	if err := after.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || d.steps != steps || r.record("uid-2") != "" {
		t.Errorf("after a restart of the node: %v, %d steps, record %q", err, d.steps-steps, r.record("uid-2"))
	}
}

// released returns what the status says of claims that were given back while their MIG devices are there still.
func released(c *claims.Claims) string {
	var all []string
	for _, s := range c.Status().Value() {
		if s.Released != "" {
			all = append(all, s.UID+": "+s.Released)
		}
	}
	return strings.Join(all, ", ")
}

// TestAnotherProgramIsFaster: another program makes an instance of the profile that a claim wants, at the same place. What it made is never the
// claim's, and is never destroyed, at whatever moment it is made; but for one that has no compute instance and is made while the claim's record
// intends one there and no call works on it.
func TestAnotherProgramIsFaster(t *testing.T) {
	t.Parallel()
	const theirs, without = "3g.40gb@0/1", "3g.40gb@0/0"
	for name, tt := range map[string]struct {
		when     string
		computes []int
		want     string // what the GPU has after Prepare
	}{
		"before it is looked at again":                        {"looks", []int{3}, theirs},
		"before it is looked at again, without compute":       {"looks", nil, without},
		"just before ours is made":                            {"makes", []int{3}, theirs},
		"just before ours is made, without compute":           {"makes", nil, without},
		"after a call that gave no answer":                    {"later", []int{3}, theirs},
		"after a call that gave no answer, other compute":     {"later", []int{1}, theirs},
		"after a call that gave no answer and did not happen": {"later", nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, retried := range []bool{true, false} {
				r := newRig(t)
				d := r.divide()
				c, _ := r.start()
				asked := 0
				switch tt.when {
				case "looks": // first to see whether there is room, and then to make it
					d.looks = func() {
						if asked++; asked == 2 {
							d.other("3g.40gb", 0, 4, tt.computes...)
						}
					}
				case "makes":
					d.makes = sync.OnceFunc(func() { d.other("3g.40gb", 0, 4, tt.computes...) })
				case "later":
					d.fail(nil, inventory.ErrNoAnswer)
				}
				_, err := c.Prepare(t.Context(), claim("uid-1", half0))
				if tt.when == "later" {
					d.fail(nil, nil)
					d.other("3g.40gb", 0, 4, tt.computes...)
					if retried {
						_, err = c.Prepare(t.Context(), claim("uid-1", half0))
					}
				}
				prepared := retried && tt.want == ""
				if prepared != (err == nil) || d.has() != tt.want && retried && !prepared {
					t.Errorf("Prepare() = %v, and the GPU has %q", err, d.has())
				}
				if err != nil && retried && r.record("uid-1") != "" {
					t.Errorf("a claim that was refused has the record %s", r.record("uid-1"))
				}
				if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || d.has() != tt.want || r.record("uid-1") != "" {
					t.Errorf("given back: %v, and the GPU has %q, record %q", err, d.has(), r.record("uid-1"))
				}
			}
		})
	}
}

// TestMadeAfterAll: a call made an instance and gave no answer. The next one makes it anew, or has it destroyed.
func TestMadeAfterAll(t *testing.T) {
	t.Parallel()
	for _, retried := range []bool{true, false} {
		r := newRig(t)
		d := r.divide()
		c, _ := r.start()
		d.late = inventory.ErrNoAnswer
		if _, err := c.Prepare(t.Context(), claim("uid-1", half0)); err == nil || d.has() != "3g.40gb@0/0" {
			t.Fatalf("without an answer: %v, and the GPU has %q", err, d.has())
		}
		d.late = nil
		if retried {
			if _, err := c.Prepare(t.Context(), claim("uid-1", half0)); err != nil || d.has() != "3g.40gb@0/1" {
				t.Errorf("the next call: %v, and the GPU has %q", err, d.has())
			}
		}
		if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || d.has() != "" {
			t.Errorf("given back: %v, and the GPU has %q", err, d.has())
		}
	}
}

// TestMPSOnMadeDevices: a MIG device that is made for a claim has a control daemon of its own, from when it is there until before it is destroyed.
func TestMPSOnMadeDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	set := func(daemon string, stays error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.daemon, r.stays = daemon, stays
	}
	wanted := byMPS("uid-1", `"defaultActiveThreadPercentage":30,"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}`, small0, half4)
	unprepare := func() error { return c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") }

	set("it has died", nil)
	if _, err := c.Prepare(t.Context(), wanted); err == nil || !strings.Contains(err.Error(), "it has died") || r.spec("uid-1") != nil {
		t.Errorf("a daemon that does not serve: %v", err)
	}
	if err := unprepare(); err != nil || d.has() != "" {
		t.Errorf("given back without a daemon: %v, the GPU has %s", err, d.has())
	}
	set("", nil)
	if _, err := c.Prepare(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"uid-1-0": `{"devices":[{"uuid":"MIG-2"}],"activeThreadPercentage":30}`, // the large one is made first
		"uid-1-1": `{"devices":[{"uuid":"MIG-1","memoryLimit":1073741824}],"activeThreadPercentage":30}`,
	}
	if diff := cmp.Diff(want, r.mps()); diff != "" {
		t.Errorf("control daemons (-want +got):\n%s", diff)
	}
	if env := r.spec("uid-1").Devices[1].ContainerEdits.Env; !slices.Contains(env, "CUDA_MPS_PIPE_DIRECTORY=/mps/claims/uid-1-1/pipe") {
		t.Errorf("containers have the environment %q", env)
	}
	d.busy(true) // by a process that is no client: its clients end with a daemon
	if err := unprepare(); err == nil || !strings.Contains(err.Error(), "is in use still") || d.has() != "1g.10gb@0/1 3g.40gb@4/1" {
		t.Errorf("while a process computes: %v, the GPU has %s", err, d.has())
	}
	d.busy(false)
	if err := unprepare(); err != nil || d.has() != "" || r.record("uid-1") != "" || len(r.mps()) > 0 {
		t.Errorf("given back: %v, the GPU has %s, daemons %v", err, d.has(), r.mps())
	}

	if _, err := c.Prepare(t.Context(), wanted); err != nil {
		t.Fatal(err)
	}
	set("", errors.New("it does not end"))
	if err := unprepare(); err != nil || d.has() != "1g.10gb@0/1 3g.40gb@4/1" || released(c) != "uid-1: it does not end" {
		t.Errorf("a daemon that does not end: %v, the GPU has %s, status %q", err, d.has(), released(c))
	}
	if _, err := c.Prepare(t.Context(), claim("uid-2", small0)); err == nil || !strings.Contains(err.Error(), "is not destroyed") {
		t.Errorf("another claim: %v", err)
	}
	set("", nil)
	c.GiveBackReleased(t.Context())
	if d.has() != "" || r.record("uid-1") != "" {
		t.Errorf("the daemon has ended: the GPU has %s, record %q", d.has(), r.record("uid-1"))
	}
}

// TestDivisions: what is published of a GPU follows who divided it.
func TestDivisions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	r.options.Divisions = feed.New(dra.Divisions(nil))
	c, _ := r.start()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Divide(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	until := func(what string, is func(found dra.Divided, has bool) bool) {
		t.Helper()
		deadline := time.After(30 * time.Second)
		for {
			divisions, changed := r.options.Divisions.Latest()
			if found, has := divisions["GPU-b"]; divisions != nil && is(found, has) {
				now, err := claims.New(r.options).Divisions(t.Context(), r.snapshots.Value())
				if diff := cmp.Diff(divisions, now); err != nil || diff != "" {
					t.Errorf("%s, without a daemon (-want +got):\n%s %v", what, diff, err)
				}
				return
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: %+v", what, divisions)
			}
		}
	}
	until("an empty GPU", func(f dra.Divided, has bool) bool {
		return has && f.Fixed == "" && len(f.Profiles) == 2 && len(f.Own) == 0
	})
	if _, err := c.Prepare(t.Context(), claim("uid-1", half0)); err != nil {
		t.Fatal(err)
	}
	until("one for a claim", func(f dra.Divided, _ bool) bool { return f.Fixed == "" && len(f.Own) == 1 && f.Own[0].Profile == 9 })
	d.other("1g.10gb", 6, 1)
	d.show() // a look that shows nothing new: it has no compute instance
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Fatal(err)
	}
	until("one of another program", func(f dra.Divided, _ bool) bool {
		return strings.Contains(f.Fixed, "1g.10gb at memory slice 6) was not made for a claim") && len(f.Own) == 0
	})
	if _, err := c.Prepare(t.Context(), claim("uid-2", small0)); err != nil { // it was allocated before
		t.Fatal(err)
	}
	configured := r.configs.Value()
	configured.DRA.DynamicMIG = false
	r.configs.Publish(configured)
	until("switched off", func(f dra.Divided, _ bool) bool { return f.Fixed == "dra.dynamicMIG is off" && len(f.Own) == 1 })
	if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil {
		t.Fatal(err)
	}
	until("switched off, without claims", func(_ dra.Divided, has bool) bool { return !has })
	if has := d.has(); has != "1g.10gb@6/0" {
		t.Errorf("the GPU has %s", has)
	}
	configured.DRA.DynamicMIG = true
	r.configs.Publish(configured)
	d.fail(errors.New("no driver"), nil)
	until("without a driver", func(f dra.Divided, _ bool) bool { return f.Fixed == "no driver" })
}

// TestTwoProcessesDivide: two daemons overlap. What the GPU has is never more than one of the two allows, and nothing is left.
func TestTwoProcessesDivide(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	first, _ := r.start()
	second, _ := r.start()
	both := []*claims.Claims{first, second}
	var kubelet sync.WaitGroup
	for n, device := range []string{small0, small1, half0, half4} {
		kubelet.Go(func() {
			got := 0
			for i := range 8 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				_, err := both[(n+i)%2].Prepare(t.Context(), claim(uid, device))
				if err != nil && !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					got++
				}
				if err := both[(n+i+1)%2].Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
			if device == half4 && got != 8 {
				t.Errorf("%s was prepared %d times of 8", device, got)
			}
		})
	}
	kubelet.Wait()
	if d.has() != "" {
		t.Errorf("left on the GPU: %s", d.has())
	}
}

// madeRecovers looks at what a killed process has left of a claim for which a MIG device is made, and goes on as kubelet does.
func madeRecovers(t *testing.T, dir, what string, wanted dra.Claim, then string) {
	t.Helper()
	r := newRigAt(t, dir)
	d := r.divide()
	c, _ := r.start()
	recorded := r.record("uid-1") != ""
	if !recorded && d.has() != "1g.10gb@6/0" {
		t.Errorf("%s: the GPU has %s, and nothing is recorded", what, d.has())
	}
	left := "1g.10gb@6/0"
	if then == "another program is faster" && d.has() == left {
		d.other("3g.40gb", 0, 4, 3) // with the ID that the claim's has or had
		left += " 3g.40gb@0/1"
	}
	if then == "retried" {
		other := claim("uid-2", half0)
		if _, err := c.Prepare(t.Context(), other); (err == nil) == recorded {
			t.Errorf("%s: recorded %v, and another claim: %v", what, recorded, err)
		}
		if err := c.Unprepare(t.Context(), other.UID, other.Namespace, other.Name); err != nil {
			t.Fatal(err)
		}
		answer, err := c.Prepare(t.Context(), wanted)
		if daemons := len(r.mps()); err != nil || d.has() != "1g.10gb@6/0 3g.40gb@0/1" || daemons != len(wanted.Configs)/2 {
			t.Fatalf("%s: the next Prepare: %v, and the GPU has %s, with %d daemons", what, err, d.has(), daemons)
		}
		r.nodes(ids(answer)...)
	}
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Fatalf("%s: the next Unprepare: %v", what, err)
	}
	if r.record("uid-1") != "" || r.spec("uid-1") != nil || d.has() != left || len(r.mps()) > 0 {
		t.Errorf("%s: left after Unprepare: record %q, spec %v, daemons %v, and the GPU has %s", what, r.record("uid-1"), r.spec("uid-1"), r.mps(), d.has())
	}
}
