package monitor_test

import (
	"context"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// benchmark runs a Monitor of a simulated node with paces that leave it alone.
func benchmark(b *testing.B, profile string) (*monitor.Monitor, *simulator.Node) {
	b.Helper()
	p, err := simulator.Load(profile)
	if err != nil {
		b.Fatal(err)
	}
	node := simulator.New(p)
	policy := health.Default()
	policy.Manual = true // or the driver's acquittal would race with the next XID
	m := monitor.New(monitor.Options{
		Driver: simulated.DriverOf(node), Policy: policy, Gap: 1,
	})
	ctx, cancel := context.WithCancel(withoutLog(b.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
		node.Close()
	})
	if err := m.First(ctx); err != nil {
		b.Fatal(err)
	}
	return m, node
}

// An XID that the simulated driver reports, until the Snapshot says so.
func BenchmarkXIDToSnapshot(b *testing.B) {
	m, node := benchmark(b, "dgx-h100")
	uuid := m.Snapshots().Value().GPUs[0].UUID
	for b.Loop() {
		_, changed := m.Snapshots().Latest()
		if err := node.Inject(simulator.Fault{Kind: simulator.KindXID, GPU: uuid, XID: 48,
			Action: "none"}); err != nil {
			b.Fatal(err)
		}
		<-changed
		b.StopTimer()
		if err := m.Clear(withoutLog(b.Context()), uuid); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// A look at 16 GPUs that finds nothing new: what a poll costs.
func BenchmarkLook(b *testing.B) {
	m, _ := benchmark(b, "dgx-2")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Look(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
