package layout_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

const nodeOfAll = `description: One GPU of each model that has another geometry
driver: 590.48.01
cuda: "13.1"
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0, model: h100-sxm5-80gb}
- {bdf: "0000:18:00.0", pcie: 0/0/1, model: a100-sxm4-40gb}
- {bdf: "0000:19:00.0", pcie: 0/0/2, model: a30-pcie-24gb}
- {bdf: "0000:1a:00.0", pcie: 0/0/3, model: rtx-pro-6000}
`

// A driven is a simulated node with a session of its driver.
type driven struct {
	t       *testing.T
	node    *simulator.Node
	session *nvidia.Session
}

func drive(t *testing.T, text string) *driven {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	profile, err := simulator.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	d := &driven{t: t, node: simulator.New(profile)}
	if d.session, err = nvidia.New(nvidia.Options{Library: d.node.NVML(),
		Root: d.node.Root()}).Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.session.Close(t.Context()); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	if _, err := d.session.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

// reset has the mode of a GPU set that is reset for it: there is no session meanwhile.
func (d *driven) reset(uuid string, action inventory.MIGAction) error {
	mode, _ := inventory.MIGStep{Action: action}.Mode()
	if err := d.session.Close(d.t.Context()); err != nil {
		return err
	}
	options := nvidia.Options{Library: d.node.NVML(), Root: d.node.Root()}
	failed := nvidia.SetMIGMode(options, uuid, mode)
	var err error
	if d.session, err = nvidia.New(options).Open(d.t.Context()); err != nil {
		return err
	}
	_, err = d.session.Scan(d.t.Context())
	return errors.Join(failed, err)
}

// gpu reads a GPU.
func (d *driven) gpu(index int) layout.GPU {
	d.t.Helper()
	g := layout.GPU{Index: index, UUID: d.node.List()[index].UUID, InUse: map[int]bool{}}
	var err error
	if g.Partitions, err = d.session.Partitions(d.t.Context(), g.UUID); err != nil {
		d.t.Fatal(err)
	}
	return g
}

// make makes the steps of a change.
func (d *driven) make(c layout.GPUChange) error {
	created := map[int]int{} // the IDs of instances by their first slice
	for _, i := range c.GPU.Instances {
		created[i.Start] = i.ID
	}
	for n, s := range c.Steps {
		end, err := d.session.Repartition(d.t.Context(), c.GPU.UUID, s.Call(created[s.Part.Start]))
		if err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
		id, err := end(d.t.Context())
		if errors.Is(err, inventory.ErrSessionInUse) {
			err = d.reset(c.GPU.UUID, s.Action)
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
		if s.Action == inventory.MIGCreateInstance {
			created[s.Part.Start] = id
		}
	}
	return nil
}

// TestDriverTakesSteps makes the steps of one random layout after the other on simulated GPUs. The
// driver takes each step, the GPU ends as the plan says, instances that are kept are the same ones,
// and nothing is left to do.
func TestDriverTakesSteps(t *testing.T) {
	t.Parallel()
	d := drive(t, nodeOfAll)
	r := rand.New(rand.NewPCG(12, 12))
	made, kept := 0, 0
	for n := range 1200 {
		g := d.gpu(n % 4)
		profiles := slices.Clone(g.Profiles)
		devices := map[string]int{}
		for range 1 + r.IntN(5) {
			name := profiles[r.IntN(len(profiles))].Name
			if _, all, _ := parse(name); all > 1 && r.IntN(3) == 0 {
				name = fmt.Sprintf("%dc.%s", 1+r.IntN(all-1), name)
			}
			devices[name]++
		}
		l := onAllGPUs(devices)
		if r.IntN(40) == 0 {
			l = layout.Layout{Items: []layout.Item{{All: true}}}
		}
		for _, i := range g.Instances {
			g.InUse[i.ID] = r.IntN(2) == 0
		}
		c := layout.Plan(l, []layout.GPU{g}).GPUs[0]
		if c.Reason != "" {
			continue
		}
		if err := d.make(c); err != nil {
			t.Fatalf("layout %d, %v of a GPU with %+v: %v\n%v", n, devices, g.Instances, err, show(c))
		}
		made++
		after := d.gpu(n % 4)
		after.InUse = maps.Clone(g.InUse)
		if again := layout.Plan(l, []layout.GPU{after}).GPUs[0]; len(again.Steps) > 0 || again.Reason != "" {
			t.Fatalf("layout %d: steps are left: %v %s", n, show(again), again.Reason)
		}
		exported, lost := layout.Export([]layout.GPU{after})
		if again := layout.Plan(exported, []layout.GPU{after}).GPUs[0]; len(again.Steps) > 0 || again.Reason != "" ||
			len(lost) > 0 {
			t.Fatalf("layout %d: what is exported is not what is there: %v %s %q", n, show(again), again.Reason, lost)
		}
		var want, got []inventory.GPUInstance
		for i, part := range c.After.Instances {
			there := after.Instances[i]
			if part.Exists {
				kept++
			} else {
				part.ID = there.ID
			}
			if len(part.Computes) > 0 && !part.Exists {
				for j := range there.Computes {
					there.Computes[j].ID = 0
				}
			}
			want, got = append(want, part.GPUInstance), append(got, there)
		}
		if diff := cmp.Diff(want, got); diff != "" || len(after.Instances) != len(want) {
			t.Fatalf("layout %d (-planned +there):\n%s", n, diff)
		}
	}
	if made < 300 || kept < 50 {
		t.Errorf("%d layouts were created and %d instances were kept: the test does not try what it should", made, kept)
	}
}
