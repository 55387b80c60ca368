package claims_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A gpuInstance is one of GPU-b, as a divider keeps it.
type gpuInstance struct {
	inventory.GPUInstance
	Busy bool
}

// A divider is the driver of a rig whose GPU-b is in MIG mode. How it is divided is in a file, so
// that it outlives the process.
type divider struct {
	rig *rig

	mu    sync.Mutex
	err   error // of all calls
	step  error // of the steps
	late  error // of the steps, which are made nevertheless
	steps int   // that were made
	shown atomic.Uint64
	caps  int // is added to the numbers of the nodes under /dev/nvidia-caps
	mode  inventory.MIGMode
	// pending is the mode after a reset, if it is another, and unread why it is not known how the GPU
	// is divided.
	pending inventory.MIGMode
	unread  string
	// switches says that the mode is changed without a reset; it is in a file then. Processes use the
	// GPU, and inUse refuses another mode, which is pending then.
	switches, inUse bool
	processes       []inventory.Process
	// silent is the error of a switch of the mode, which has happened nevertheless if it is to.
	silent error
	lost   bool // it has not
	// looks and makes are called before it is told how the GPU is divided, and before a GPU instance
	// is made.
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
	{Name: "1g.10gb", ID: 19, Count: 7, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6},
		Attributes: inventory.MIGAttributes{GISlices: 1, CISlices: 1}},
	{Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4},
		Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3}},
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

// switching has MIG mode be switched for claims.
func (r *rig) switching() *divider {
	d := r.divide()
	d.switches = true
	configured := r.configs.Value()
	configured.DRA.SwitchMIG = true
	r.configs.Publish(configured)
	d.show()
	return d
}

// now returns the mode that is in force.
func (d *divider) now() inventory.MIGMode {
	if !d.switches {
		return d.mode
	}
	if _, err := os.Stat(d.path() + ".mig"); err != nil {
		return inventory.MIGDisabled
	}
	return inventory.MIGEnabled
}

// turn switches the mode, if it may be.
func (d *divider) turn(wanted inventory.MIGMode) (err error) {
	switch used := d.inUse || len(d.processes) > 0 || len(d.read()) > 0; {
	case wanted == d.now():
		d.pending = inventory.MIGUnsupported
	case used:
		d.pending = wanted
		return fmt.Errorf("switch: %w", inventory.ErrInUse)
	case wanted == inventory.MIGEnabled:
		err = os.WriteFile(d.path()+".mig", nil, 0o600)
	default:
		err = os.Remove(d.path() + ".mig")
	}
	return err
}

// set changes the driver.
func (d *divider) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
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
	p := inventory.Partitions{Mode: d.now(), Pending: cmp.Or(d.pending, d.now()), Resetless: d.switches, Unread: d.unread,
		Profiles: profiles}
	for _, i := range d.read() {
		p.Instances = append(p.Instances, i.GPUInstance)
	}
	slices.SortFunc(p.Instances, func(a, b inventory.GPUInstance) int { return a.Start - b.Start })
	return p, nil
}

func (d *divider) Processes(context.Context, []string) (map[string][]inventory.Process, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return map[string][]inventory.Process{"GPU-b": d.processes}, nil
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
		all = append(all, gpuInstance{GPUInstance: inventory.GPUInstance{ID: id, Profile: p.Name, Start: step.Start,
			Size: p.Size}})
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
	case inventory.MIGEnable, inventory.MIGDisable:
		mode := map[inventory.MIGAction]inventory.MIGMode{inventory.MIGEnable: inventory.MIGEnabled,
			inventory.MIGDisable: inventory.MIGDisabled}[step.Action]
		if d.silent != nil && d.lost {
			return 0, d.silent
		}
		return 0, cmp.Or(d.turn(mode), d.silent)
	default:
		d.rig.tb.Errorf("step %+v", step)
	}
	d.write(all)
	return id, d.late
}

// served complains if a control daemon of MPS may still be there for a MIG device that is
// destroyed.
func (d *divider) served(gi int) {
	for _, name := range files(d.rig.tb, d.rig.dir) {
		if !strings.Contains(name, ".mps") {
			continue
		}
		wanted, err := os.ReadFile(filepath.Join(d.rig.dir, name))
		if err != nil || strings.Contains(string(wanted), fmt.Sprintf(`"MIG-%d"`, gi)) {
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
	s.Generation += d.shown.Add(1)
	s.GPUs[1].MIG, s.GPUs[1].MIGDevices = d.now(), nil
	for _, i := range d.read() {
		if len(i.Computes) == 0 {
			continue
		}
		p := profiles[slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.Name == i.Profile })]
		s.GPUs[1].MIGDevices = append(s.GPUs[1].MIGDevices, inventory.MIGDevice{
			UUID: fmt.Sprintf("MIG-%d", i.ID), Index: len(s.GPUs[1].MIGDevices), GI: i.ID, GICap: 100 + 2*i.ID +
				d.caps, CICap: 101 + 2*i.ID + d.caps, Profile: p.Name,
			Placement: inventory.MIGPlacement{Profile: p.ID, Start: i.Start,
				Size: i.Size}, Attributes: p.Attributes, Health: healthy,
		})
	}
	d.rig.pools.Publish(dra.New(s, "node", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs),
		dra.Divisions{"GPU-b": {Profiles: profiles, Switched: d.switches}}))
	d.rig.snapshots.Publish(s)
	return s
}
