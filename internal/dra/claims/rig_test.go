package claims_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A rig is a node with two GPUs, of which the second has two MIG devices, and what Claims need of
// it.
type rig struct {
	tb        testing.TB
	options   claims.Options
	snapshots *feed.Feed[inventory.Snapshot]
	pools     *feed.Feed[dra.Pool]
	configs   *feed.Feed[config.Config]
	dir       string
	driver    string // where the driver's files are

	mu       sync.Mutex
	held     []kubelet.HeldDevice
	heldErr  error
	smi      error  // of the driver's program
	daemon   string // why control daemons of MPS do not serve
	stays    error  // why they do not end
	disk     error  // what comes of their disk after a time
	asked    func() // called when kubelet is asked
	claimed  map[string]bool
	existing map[string]dra.Claim // at the API server, by name
	asksAPI  bool
	exists   error
}

var healthy = inventory.Health{State: inventory.Healthy}

// snapshot is what the rig's driver finds.
func snapshot() inventory.Snapshot {
	place := func(start int) inventory.MIGPlacement {
		return inventory.MIGPlacement{Profile: 9, Start: start, Size: 4}
	}
	half := inventory.MIGAttributes{GISlices: 3, CISlices: 3}
	return inventory.Snapshot{
		Generation: 1, Driver: inventory.Driver{Version: "580.95.05"}, Control: inventory.NodeControl | inventory.NodeUVM,
		GPUs: []inventory.GPU{
			{UUID: "GPU-a", Index: 0, Minor: 0, BDF: "0000:1b:00.0", NUMANode: -1, MemoryBytes: 80 << 30,
				MIG: inventory.MIGDisabled, Health: healthy},
			{UUID: "GPU-b", Index: 1, Minor: 1, BDF: "0000:1c:00.0", NUMANode: -1, MIG: inventory.MIGEnabled, Health: healthy,
				MIGDevices: []inventory.MIGDevice{
					{UUID: "MIG-b0", Index: 0, GI: 1, GICap: 30, CICap: 31, Profile: "3g.40gb", Placement: place(0), Attributes: half,
						Health: healthy},
					{UUID: "MIG-b1", Index: 1, GI: 2, GICap: 39, CICap: 40, Profile: "3g.40gb", Placement: place(4), Attributes: half,
						Health: healthy},
				}},
			{UUID: "GPU-c", Index: 2, Minor: 2, BDF: "0000:1d:00.0", NUMANode: -1, MemoryBytes: 80 << 30,
				MIG: inventory.MIGDisabled, Health: healthy},
		},
	}
}

func newRig(tb testing.TB) *rig {
	tb.Helper()
	return newRigAt(tb, tb.TempDir())
}

// newRigAt returns the rig of a folder, which another process may have used before.
func newRigAt(tb testing.TB, dir string) *rig {
	tb.Helper()
	r := &rig{tb: tb, dir: dir, snapshots: feed.New(inventory.Snapshot{}), pools: feed.New(dra.Pool{}),
		claimed: map[string]bool{}, existing: map[string]dra.Claim{}, asksAPI: true}
	r.driver = filepath.Join(dir, "root")
	library := filepath.Join(r.driver, "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05")
	if err := os.MkdirAll(filepath.Dir(library), 0o700); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(library, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	r.configs = feed.New(config.Config{Live: config.Live{CDI: cdi.Options{DriverRoot: "/", ContainerDriverRoot: "/"},
		Edits: containeredits.Options{MPSRoot: "/run/nvidia/mps"}}})
	r.options = claims.Options{
		Inputs: claims.Inputs{Pools: r.pools, Snapshots: r.snapshots, Configs: r.configs},
		Accounts: claims.Accounts{HeldDevices: func(context.Context) ([]kubelet.HeldDevice, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.asked != nil {
				r.asked()
			}
			return r.held, r.heldErr
		}, PodClaims: func(context.Context) (map[string]bool, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.claimed, nil
		}},
		Hardware: claims.Hardware{SetTimeSlice: func(_ context.Context, gpu string, interval int) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.smi != nil {
				return r.smi
			}
			return os.WriteFile(filepath.Join(dir, gpu+".slice"), []byte{byte('0' + interval)}, 0o600)
		}},
		Files: claims.Files{StateDir: filepath.Join(dir, "state"), CDIDir: filepath.Join(dir, "cdi"), BootID: "one", Root: os.DirFS(r.driver)},
	}
	r.options.MPS = daemons{r}
	r.publish(snapshot())
	return r
}

// daemons are the control daemons of MPS of a rig: a file each, with what is wanted.
type daemons struct{ *rig }

func (d daemons) path(id string) string { return filepath.Join(d.dir, id+".mps") }

// wait returns what comes of the disk, after two seconds if that is an error.
func (d daemons) wait() error {
	d.mu.Lock()
	err := d.disk
	d.mu.Unlock()
	if err != nil {
		<-time.After(2 * time.Second)
	}
	return err
}

func (d daemons) Start(_ context.Context, id string, wanted mps.ClaimDaemon) error {
	if err := d.wait(); err != nil {
		return err
	}
	if problem := d.Problems(id)[id]; problem != "" {
		return errors.New(problem)
	}
	return os.WriteFile(d.path(id), []byte(text(d.tb, wanted)), 0o600)
}

// Stop leaves a file for a daemon that may be there still, which End removes.
func (d daemons) Stop(id string) error {
	if err := d.wait(); err != nil {
		return err
	}
	if err := os.Rename(d.path(id), d.path(id)+".ending"); !os.IsNotExist(err) {
		return err
	}
	return nil
}

func (d daemons) End(_ context.Context, id string) error {
	if err := d.Stop(id); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stays != nil {
		return d.stays
	}
	if err := os.Remove(d.path(id) + ".ending"); !os.IsNotExist(err) {
		return err
	}
	return nil
}

func (d daemons) Problems(ids ...string) map[string]string {
	hangs := d.wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[string]string{}
	for _, id := range ids {
		if hangs != nil {
			all[id] = hangs.Error()
		} else if d.daemon != "" {
			all[id] = d.daemon
		}
	}
	return all
}

func (d daemons) All() (map[string][]string, error) {
	if err := d.wait(); err != nil {
		return nil, err
	}
	all := map[string][]string{}
	for id, wanted := range d.mps() {
		var claim mps.ClaimDaemon
		if err := json.Unmarshal([]byte(wanted), &claim); err != nil {
			return nil, err
		}
		for _, device := range claim.Devices {
			all[id] = append(all[id], device.UUID)
		}
	}
	return all, nil
}

// mps returns what the control daemons are asked for with, by ID.
func (r *rig) mps() map[string]string {
	all := map[string]string{}
	for _, name := range files(r.tb, r.dir) {
		if id, is := strings.CutSuffix(name, ".mps"); is {
			wanted, err := os.ReadFile(filepath.Join(r.dir, name))
			if err != nil {
				r.tb.Error(err)
			}
			all[id] = string(wanted)
		}
	}
	return all
}

// shared is a claim that wants long time slices on its GPUs, and MPS on its MIG devices.
func shared(uid string, devices ...string) dra.Claim {
	c := sliced(uid, devices...)
	c.Configs = append(c.Configs, dra.OpaqueConfig{Source: dra.FromClaim, Parameters: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1",
"kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}}`)})
	return c
}

// publish has the driver find something else.
func (r *rig) publish(s inventory.Snapshot) {
	r.pools.Publish(dra.New(s, "node", dra.Numbers{}.With(snapshot().GPUs), dra.All(s.GPUs), nil))
	r.snapshots.Publish(s)
}

// start begins the life of Claims, and returns once they have looked.
func (r *rig) start() (*claims.Claims, func()) {
	r.tb.Helper()
	if r.asksAPI {
		r.options.LookUp = func(_ context.Context, _, name string) (dra.Claim, bool, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			claim, found := r.existing[name]
			return claim, found, r.exists
		}
	}
	c := claims.New(r.options)
	return c, r.run(c)
}

// run begins the life of Claims, and returns once they have looked.
func (r *rig) run(c *claims.Claims) (stop func()) {
	r.tb.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(r.tb.Context(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			r.tb.Errorf("Run() = %v", err)
		}
	})
	r.tb.Cleanup(stop)
	<-c.Started()
	return stop
}

// prepare has a claim prepared, which must succeed.
func (r *rig) prepare(c *claims.Claims, wanted dra.Claim) {
	r.tb.Helper()
	if _, err := ask(r.tb.Context(), c, wanted); err != nil {
		r.tb.Fatal(err)
	}
}

// ask has a claim prepared that the API server has.
func ask(ctx context.Context, c *claims.Claims, wanted dra.Claim) ([]dra.Prepared, error) {
	return c.Prepare(ctx, wanted.UID, func(context.Context) (dra.Claim, error) { return wanted, nil })
}

// unprepare has a claim given back, which must succeed.
func (r *rig) unprepare(c *claims.Claims, uid string) {
	r.tb.Helper()
	if err := c.Unprepare(r.tb.Context(), uid, "default", "claim-"+uid); err != nil {
		r.tb.Fatal(err)
	}
}

// claim is a claim for devices.
func claim(uid string, devices ...string) dra.Claim {
	c := dra.Claim{UID: uid, Namespace: "default", Name: "claim-" + uid}
	for _, d := range devices {
		c.Results = append(c.Results, dra.Result{Request: "gpu", Pool: "node", Device: d})
	}
	return c
}

// part is a claim for shares of GPUs, with so many GiB of the memory of each.
func part(uid string, gib int, devices ...string) dra.Claim {
	c := claim(uid, devices...)
	for i := range c.Results {
		c.Results[i].ShareID = fmt.Sprintf("share-%s-%d", uid, i)
		c.Results[i].ConsumedCapacity = map[string]string{"memory": fmt.Sprintf("%dGi", gib)}
	}
	return c
}

// The names of the devices of the rig.
const (
	gpuA  = "gpu-0"
	gpuB  = "gpu-1"
	migB0 = "gpu-1-mig-3g40gb-9-0"
	migB1 = "gpu-1-mig-3g40gb-9-4"
	gpuC  = "gpu-2"
)

// sliced is a claim that wants long time slices on its GPUs.
func sliced(uid string, devices ...string) dra.Claim {
	c := claim(uid, devices...)
	c.Configs = []dra.OpaqueConfig{{Source: dra.FromClass, Parameters: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",
"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`)}}
	return c
}

// slice returns the time slice that a GPU has.
func (r *rig) slice(gpu string) string {
	text, err := os.ReadFile(filepath.Join(r.dir, gpu+".slice"))
	if os.IsNotExist(err) {
		return "0"
	}
	return string(text)
}

// record returns the text of a claim's record; empty if there is none.
func (r *rig) record(uid string) string {
	text, err := os.ReadFile(filepath.Join(r.options.StateDir, "claims", uid+".json"))
	if err != nil && !os.IsNotExist(err) {
		r.tb.Fatal(err)
	}
	return string(text)
}

// specs are the CDI specs of claims.
func (r *rig) specs() cdi.ClaimSpecs {
	return cdi.ClaimSpecs{Dir: r.options.CDIDir, Driver: cmp.Or(r.options.DriverName, dra.Driver)}
}

// spec reads the spec of a claim as a runtime does; nil if there is none.
func (r *rig) spec(uid string) *specs.Spec {
	r.tb.Helper()
	path := r.specs().File(uid)
	if _, err := os.Stat(path); os.IsNotExist(err) {
		return nil
	}
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		r.tb.Fatal(err)
	}
	return spec.Spec
}

// nodes returns the device nodes that a container with all of the given CDI devices gets, as the
// runtime resolves them.
func (r *rig) nodes(ids ...string) string {
	r.tb.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(r.options.CDIDir), cdilib.WithAutoRefresh(false))
	if err != nil {
		r.tb.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		r.tb.Fatalf("the folder of specs has errors: %v", errs)
	}
	var nodes []string
	for _, id := range ids {
		device := cache.GetDevice(id)
		if device == nil {
			r.tb.Fatalf("the runtime does not find %s", id)
		}
		for _, n := range device.ContainerEdits.DeviceNodes {
			nodes = append(nodes, strings.TrimPrefix(n.Path, "/dev/"))
		}
	}
	return strings.Join(nodes, " ")
}

// ids returns all CDI devices of an answer.
func ids(prepared []dra.Prepared) []string {
	var all []string
	for _, p := range prepared {
		all = append(all, p.CDIDeviceIDs...)
	}
	return all
}

// files returns the names in a folder.
func files(tb testing.TB, folder string) []string {
	tb.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil && !os.IsNotExist(err) {
		tb.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func text(tb testing.TB, v any) string {
	tb.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}
