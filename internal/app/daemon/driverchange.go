package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverswap"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// newSwaps returns the owner of changes of the driver.
func (w *maintenanceWing) newSwaps() *driverswap.Swaps {
	o := driverswap.Options{
		Wanted: func() (driverswap.Wanted, <-chan struct{}) {
			c, changed := w.watcher.Configs().Latest()
			return driverswap.Wanted(c.DriverChange), changed
		},
		Refused: func() string {
			if w.cluster == nil {
				return "a change of the driver needs a slot of the cluster: run gpu-node-agent"
			}
			return w.cluster.DriverRefusal()
		},
		Admit: func(change string) (time.Time, error) {
			if w.cluster == nil {
				return time.Time{}, errors.New("this program does not talk to the API server")
			}
			err := w.cluster.RequestSlot(change)
			return w.cluster.SlotSince(), err
		},
		Users: w.usersForSwap,
		Evict: func(ctx context.Context, p mig.Pod) error { return w.cluster.Evict(ctx, p) },
		Released: func(ctx context.Context) (here, elsewhere bool, err error) {
			state, err := w.gpus.monitor.Status(ctx)
			return state.ForChange, !state.ForChange && !state.Quiesced.IsZero(), err
		},
		Release: func(ctx context.Context) error { return requests{w.gpus.requests(), w.proofs}.QuiesceForChange(ctx) },
		Use:     func(ctx context.Context) error { return w.gpus.requests().Resume(ctx) },
		Healthy: func() []string { return healthyGPUs(w.gpus.monitor.Snapshots().Value()) },
		Problem: w.problemOfDriver,
		BootID:  BootID(w.gpus.node),
	}
	if w.startup.StateDir != "" {
		o.Socket = filepath.Join(w.startup.StateDir, filepath.Base(driverapi.DefaultDirectory),
			filepath.Base(driverapi.DefaultSocket))
	}
	return driverswap.New(o)
}

// usersForSwap returns the pods with devices of GPUs, of any resource and by claims, the prepared
// claims, and other processes of this program.
func (w *maintenanceWing) usersForSwap(ctx context.Context) (users []driverswap.User, err error) {
	add := func(u driverswap.User) {
		if !slices.Contains(users, u) {
			users = append(users, u)
		}
	}
	if beside, _ := w.beside(); beside {
		add(driverswap.User{Name: "another process of this program"})
	}
	var resources []string
	for _, r := range w.kubelet.set.Offered().Value().Resources {
		resources = append(resources, r.Name)
	}
	driver := ""
	if w.claims.dra != nil {
		driver = w.startup.DRADriver
		for _, c := range w.claims.dra.Claims.Status().Value() {
			add(driverswap.User{Name: "claim " + c.Namespace + "/" + c.Name})
		}
	}
	if w.kubelet.directory == nil {
		return users, nil
	}
	devices, err := w.kubelet.account.ContainerDevices(ctx)
	for _, d := range devices {
		if d.IsGPU(resources, driver) {
			add(driverswap.User{Namespace: d.Namespace, Name: d.Pod})
		}
	}
	return users, err
}

func healthyGPUs(s inventory.Snapshot) (uuids []string) {
	for _, g := range s.GPUs {
		if g.Health.State == inventory.Healthy {
			uuids = append(uuids, g.UUID)
		}
	}
	return uuids
}

// problemOfDriver returns why the loaded driver does not work: this process uses another version, a
// GPU that was Healthy before is not, or a required CUDA check has not passed.
func (w *maintenanceWing) problemOfDriver(ctx context.Context, version string, before []string) string {
	state, err := w.gpus.monitor.Status(ctx)
	s := state.Snapshot
	switch {
	case err != nil:
		return err.Error()
	case state.Err != nil:
		return state.Err.Error()
	case s.Driver.Version != version:
		return fmt.Sprintf("driver %s is loaded, and this process uses %s", version, s.Driver.Version)
	case len(healthyGPUs(s)) == 0 && len(s.GPUs) == 0:
		return "the driver finds no GPU"
	}
	var problems []string
	there := map[string]bool{}
	unproven := w.proofs.Unproven(s)
	for _, g := range s.GPUs {
		there[g.UUID] = true
		switch isNew := len(before) > 0 && !slices.Contains(before, g.UUID); {
		case isNew:
		case g.Health.State != inventory.Healthy:
			problems = append(problems, fmt.Sprintf("GPU %d is %s: %s", g.Index, g.Health.State, g.Health.Why()))
		case unproven[g.UUID] != "":
			problems = append(problems, fmt.Sprintf("GPU %d: %s", g.Index, unproven[g.UUID]))
		}
	}
	for _, uuid := range before {
		if !there[uuid] {
			problems = append(problems, "GPU "+uuid+" is missing")
		}
	}
	return strings.Join(problems, "; ")
}

// driverChange returns the progress of the change of the driver; nil if no driver is wanted and
// none is under way.
func (w *maintenanceWing) driverChange() *driverchange.Status {
	s := w.swaps.Status().Value()
	if s.Wanted == "" && s.State == driverchange.Off && !s.Withholds {
		return nil
	}
	return &s
}
