// Package simulated gives tests simulated nodes, which are looked at by the code that looks at real
// ones.
package simulated

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// A Driver is that of a simulated node, as a monitor asks for it.
type Driver struct{ *nvidia.Driver }

// DriverOf returns the driver of a node.
func DriverOf(node *simulator.Node) Driver {
	return Driver{nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root()})}
}

// Open implements monitor.Driver.
func (d Driver) Open(ctx context.Context) (monitor.Session, error) {
	s, err := d.Driver.Open(ctx)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Node returns a node that ends with the test. The profile is the name of one, or a file.
func Node(t testing.TB, profile string) *simulator.Node {
	t.Helper()
	p, err := simulator.Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	node := simulator.New(p)
	t.Cleanup(node.Close)
	return node
}

// Open returns such a node, and a session with its driver, which ends with the test, too.
func Open(t testing.TB, profile string) (*simulator.Node, *nvidia.Session) {
	t.Helper()
	node := Node(t, profile)
	session, err := DriverOf(node).Driver.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := session.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return node, session
}

// InVirtualTime runs a part of a test in virtual time. There a look takes no time: in real time, a
// machine that stands still for a second makes a look leave out the links between GPUs. A benchmark
// stays in real time.
func InVirtualTime(t testing.TB, part func(t testing.TB)) {
	t.Helper()
	test, ok := t.(*testing.T)
	if !ok {
		part(t)
		return
	}
	synctest.Test(test, func(t *testing.T) { part(t) })
}

// Healthy returns a Snapshot in which all GPUs and MIG devices are Healthy: nobody has judged those
// of a look.
func Healthy(s inventory.Snapshot) inventory.Snapshot {
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		g := &s.GPUs[i]
		g.Health = inventory.Health{State: inventory.Healthy}
		g.MIGDevices = slices.Clone(g.MIGDevices)
		for j := range g.MIGDevices {
			g.MIGDevices[j].Health = g.Health
		}
	}
	return s
}
