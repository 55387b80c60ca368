package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// unitFigures are those of GPUs in units.
var unitFigures = []figure{
	{"Choice among units of 128 MiB, 8 × 141 GB, 160 wanted", "1 ms", choiceOfUnits},
	{"List of units of 128 MiB, 8 × 141 GB", "3 MB", listOfUnits},
}

// unitsOf returns the units of a node with eight GPUs of 141 GB.
func unitsOf(ctx context.Context) (resource.Resource, error) {
	const name = "volcano.sh/gpu-mem.128Mi"
	snapshot, err := scan(ctx, "dgx-h200")
	if err != nil {
		return resource.Resource{}, err
	}
	plan := resource.New(snapshot, resource.Options{
		Units:     resource.Units{Name: name, ReserveMiB: 1024, MPS: true},
		Selectors: []resource.Selector{{Where: "selectors[0]", Models: []resource.Pattern{"*"}, Units: true}},
	})
	r, planned := plan.Resource(name)
	if !planned {
		return r, fmt.Errorf("the node has no units: %q", plan.Warnings)
	}
	return r, nil
}

// idleUnits is idle with all GPUs in units but one, for which kubelet's first list is awaited.
func idleUnits(ctx context.Context, daemon string) (_ string, err error) {
	folder, err := os.MkdirTemp("", "bench-units-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	file := filepath.Join(folder, "config.yaml")
	const text = "version: v1\nselectors: [{indices: [1, 2, 3, 4, 5, 6, 7], units: true}]\n" +
		"units: {enforce: none, reserveMiB: 1024}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return "", err
	}
	n, err := registered(ctx, node.Setup{Daemon: daemon, Profile: "dgx-h200", Args: []string{"--config-file", file}})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	// A list of so many devices is made, sent and compared in the first seconds.
	if _, err := shownOf(ctx, n, func(s status.Status) bool { return s.Readiness.Ready }); err != nil {
		return "", err
	}
	return used(ctx, n, 20*time.Second)
}

// choiceOfUnits measures the choice where all units are free, which is the most work.
func choiceOfUnits(ctx context.Context, _ string) (string, error) {
	r, err := unitsOf(ctx)
	if err != nil {
		return "", err
	}
	var all []string
	for d := range r.All() {
		all = append(all, d.ID)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	times, computed := make([]time.Duration, 0, 1000), make([]time.Duration, 0, 1000)
	for range cap(times) {
		began, used := time.Now(), threadTime()
		if _, err := r.Prefer(all, nil, 160); err != nil {
			return "", err
		}
		computed = append(computed, threadTime()-used)
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	slices.Sort(computed)
	return fmt.Sprintf("median %.0f µs, p99 %.0f µs of %d units; p99 of computing %.0f µs",
		micros(times[len(times)/2]), micros(times[len(times)*99/100]), len(all), micros(computed[len(computed)*99/100])), nil
}

// threadTime returns how long the thread has computed: unlike the time that passes, it says the
// same beside other work.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // Linux has this clock always
	return time.Duration(t.Nano())
}

// listOfUnits says how long the list is that kubelet gets.
func listOfUnits(ctx context.Context, _ string) (string, error) {
	r, err := unitsOf(ctx)
	if err != nil {
		return "", err
	}
	list := &pluginapi.ListAndWatchResponse{}
	for d := range r.All() {
		list.Devices = append(list.Devices, &pluginapi.Device{
			ID: d.ID, Health: pluginapi.Unhealthy,
			Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(d.NUMANode)}}},
		})
	}
	return fmt.Sprintf("%.2f MB for %d units", float64(proto.Size(list))/1e6, len(list.Devices)), nil
}
