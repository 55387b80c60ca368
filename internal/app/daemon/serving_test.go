package daemon_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A slow driver has a first scan that ends when end is closed.
type slow struct {
	driver
	end chan struct{}
}

func (s *slow) Open(ctx context.Context) (monitor.Session, error) {
	<-s.end
	return s.driver.Open(ctx)
}

// A plugins is a record of the node's device plugins.
type plugins struct {
	allocatable map[string][]string
	err         error
	remembered  map[string][]string
	forgotten   error
	sockets     []string
}

func (p plugins) Allocatable(context.Context) (map[string][]string, error) {
	return p.allocatable, p.err
}
func (p plugins) Remembered() (map[string][]string, error) { return p.remembered, p.forgotten }
func (p plugins) Listening(context.Context) []string       { return p.sockets }

// A scanned driver has a result of each scan.
type scanned struct {
	driver
	snapshot inventory.Snapshot
}

func (s *scanned) Open(context.Context) (monitor.Session, error) { return s, s.err }
func (s *scanned) Scan(context.Context) (inventory.Snapshot, error) {
	return s.snapshot, nil
}
func (s *scanned) Read(context.Context, string) (inventory.Reading, error) {
	return inventory.Reading{}, nil
}

// ofPlugin is a feed in which the device plugin owns all GPUs of a monitor.
func ofPlugin(m *monitor.Monitor) *feed.Feed[dra.Owners] {
	owners := dra.Owners{}
	for _, g := range m.Snapshots().Value().GPUs {
		owners[g.UUID] = dra.OwnedByPlugin
	}
	return feed.New(owners)
}

// serving judges the servers of a plan of which everything is offered.
func serving(m *monitor.Monitor, others daemon.Others, servers ...serve.Status) *daemon.Serving {
	return &daemon.Serving{
		Configs: feed.New(config.Config{}), Monitor: m, Others: others, Owners: ofPlugin(m),
		Servers: func() []serve.Status { return servers }, Leads: func() bool { return true },
		Offered: feed.New(resource.New(m.Snapshots().Value(), resource.Options{})),
	}
}

// TestReady: a daemon is ready when it serves everything, and no less than another plugin serves.
func TestReady(t *testing.T) {
	t.Parallel()
	var owners *feed.Feed[dra.Owners] // nil: ofPlugin
	leads := true
	ready := func(m *monitor.Monitor, others plugins, servers ...serve.Status) (bool, string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s := serving(m, others, servers...)
		s.Leads = func() bool { return leads }
		if owners != nil {
			s.Owners = owners
		}
		return s.Ready(ctx)
	}
	wants := func(what string, want bool, reason string) func(bool, string) {
		return func(got bool, said string) {
			t.Helper()
			if got != want || !strings.Contains(said, reason) || reason == "" && said != "" {
				t.Errorf("%s: %v, %q, want %v, %q", what, got, said, want, reason)
			}
		}
	}
	theirs := plugins{allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-a"}}}

	late := &slow{end: make(chan struct{})}
	m := watch(t, late)
	wants("before the first look", false, "the first scan of the node has not ended")(ready(m, plugins{}))
	close(late.end)
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	wants("no GPU", true, "nothing to serve: this node has no GPU")(ready(m, plugins{}))
	wants("no GPU, and a resource that no pod holds", true,
		"this node has no GPU")(ready(m, plugins{}, serve.Status{Resource: "nvidia.com/gpu"}))
	wants("no GPU, and pods hold two", false,
		"nvidia.com/gpu cannot be offered, and pods hold or may hold 2 devices of it; this daemon has nothing")(
		ready(m, plugins{}, serve.Status{Resource: "a/b"}, serve.Status{Resource: "nvidia.com/gpu",
			Retiring: make([]listing.RetiringDevice, 2)}))
	wants("no GPU, and another plugin has some", false,
		"is served by another device plugin, with 1 device; this one has nothing to serve: this node has no GPU")(ready(m,
		theirs))
	if err := m.Quiesce(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	wants("quiesce", true, "nothing to serve: the driver is released")(ready(m, plugins{}))

	bad := watch(t, &driver{err: inventory.ErrDriverMismatch})
	if err := bad.First(t.Context()); err == nil {
		t.Fatal("the driver works")
	}
	wants("files that do not fit the module", false, inventory.ErrDriverMismatch.Error())(ready(bad, plugins{}))

	i := inspect(t, "dgx-h100", resource.Options{}, none)
	server := serve.Status{Resource: resource.WholeGPU, Phase: serve.PhaseServing}
	wants("no server yet", false, "nvidia.com/gpu is not offered: its server is starting")(ready(i.Monitor, plugins{}))
	wants("not compared", false, "has not been compared")(ready(i.Monitor, plugins{}, server))
	wants("no account", true, "")(ready(i.Monitor, plugins{err: errors.New("no such file")}, server))
	server.Agreed = true
	wants("served", true, "")(ready(i.Monitor, theirs, server))
	owners = feed.New(dra.Owners(nil))
	wants("no owners yet", false, "not known yet which GPUs")(ready(i.Monitor, plugins{}))
	leads = false
	wants("a lead that knows no owners", true, "the leading process does not say which GPUs")(ready(i.Monitor,
		plugins{}))
	leads = true
	gpus := i.Monitor.Snapshots().Value().GPUs
	owners.Publish(dra.All(gpus[1:]))
	wants("an owner is not known yet", false, "not known yet which GPUs")(ready(i.Monitor, plugins{}))
	owners.Publish(dra.All(gpus))
	wants("all in slices", true, "Dynamic Resource Allocation gives out 8 GPUs")(ready(i.Monitor, plugins{}))

	ended, end := context.WithCancel(t.Context())
	end()
	got, said := (&daemon.Serving{Monitor: monitor.New(monitor.Options{Driver: &driver{}})}).Ready(ended)
	wants("the monitor cannot be reached", false, "canceled")(got, said)
}

// TestUnserved: each resource of the plan has to be offered, and its server in agreement with the
// kubelet's account if there is one.
func TestUnserved(t *testing.T) {
	t.Parallel()
	healthy := inventory.Health{State: inventory.Healthy}
	m := watch(t, &scanned{snapshot: inventory.Snapshot{GPUs: []inventory.GPU{
		{UUID: "GPU-a", Index: 0, Health: healthy}, {UUID: "GPU-b", Index: 1, Health: healthy},
	}}})
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	const name = resource.WholeGPU
	plan := resource.New(m.Snapshots().Value(), resource.Options{})
	held := plan.Under([]resource.Hold{{UUID: "GPU-a", Reason: "no file", Hidden: true},
		{UUID: "GPU-b", Reason: "no file", Hidden: true}})
	for what, tt := range map[string]struct {
		offered     resource.Plan
		server      serve.Status
		accountable bool
		want        string
	}{
		"agreed": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing, Agreed: true}, true, ""},
		"not compared": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing}, true,
			"is not served: the kubelet's account"},
		"no account": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing}, false, ""},
		"another account": {plan, serve.Status{Resource: name, Phase: serve.PhaseServing, Problem: "it differs"}, true,
			"is not served: it differs"},
		"waiting for kubelet": {plan, serve.Status{Resource: name, Phase: serve.PhaseNoKubelet}, false,
			"is not served: waiting for kubelet"},
		"refused": {plan, serve.Status{Resource: name, Phase: serve.PhaseRegistering, Problem: "refused"}, true,
			"is not served: refused"},
		"no server yet": {plan, serve.Status{Resource: "another"}, true, "is not offered: its server is starting"},
		"no file":       {held, serve.Status{Resource: "another"}, true, "is not offered: no file"},
		"no file any more": {held, serve.Status{Resource: name, Phase: serve.PhaseServing, Agreed: true}, true,
			"is not offered: no file"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			others := plugins{}
			if !tt.accountable {
				others.err = errors.New("no such file")
			}
			s := serving(m, others, tt.server)
			s.Offered.Publish(tt.offered)
			ready, got := s.Ready(t.Context())
			if !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") || ready != (got == "") {
				t.Errorf("not served: %q, want %q", got, tt.want)
			}
		})
	}
}

// TestOtherPlugins: a daemon with nothing to serve is not ready while another device plugin serves
// GPUs.
func TestOtherPlugins(t *testing.T) {
	t.Parallel()
	m := watch(t, &driver{})
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	unread := errors.New("no such file")
	gpus := map[string][]string{"nvidia.com/gpu.shared": {"GPU-a::0", "GPU-a::1"}}
	for name, tt := range map[string]struct {
		others plugins
		want   string
	}{
		"nobody": {plugins{}, ""},
		"GPUs": {plugins{allocatable: gpus},
			"nvidia.com/gpu.shared is served by another device plugin, with 2 devices"},
		"MIG devices": {plugins{allocatable: map[string][]string{"a.b/c": {"MIG-x"}}},
			"a.b/c is served by another device plugin, with 1 device"},
		"names that are no UUIDs": {plugins{allocatable: map[string][]string{"nvidia.com/gpu": {"nvidia0"}}},
			"nvidia.com/gpu is served by another device plugin, with 1 device"},
		"other devices of NVIDIA's": {plugins{
			allocatable: map[string][]string{"nvidia.com/hostdev": {"0000:3b:00.2"}}}, ""},
		"GPUs that are all unhealthy": {plugins{allocatable: map[string][]string{"nvidia.com/gpu": nil},
			sockets: []string{"nvidia-gpu.sock"}}, ""},
		"GPUs of a short time ago": {plugins{remembered: gpus},
			"nvidia.com/gpu.shared was served until recently, and the kubelet still remembers it, with 2 devices"},
		"no account, but a memory": {plugins{err: unread, remembered: gpus},
			"nvidia.com/gpu.shared was served until recently, and the kubelet still remembers it, with 2 devices"},
		"no account, and no memory": {plugins{err: unread, sockets: []string{"nvidia-gpu.sock"}}, ""},
		"nothing of kubelet, a socket": {plugins{err: unread, forgotten: unread, sockets: []string{"nvidia-gpu.sock"}},
			"another device plugin listens at nvidia-gpu.sock, and the kubelet's account cannot be read: no such file"},
		"nothing at all": {plugins{err: unread, forgotten: unread}, ""},
	} {
		ready, got := serving(m, tt.others).Ready(t.Context())
		want := "nothing to serve: this node has no GPU"
		if tt.want != "" {
			want = tt.want + "; this one has " + want
		}
		if ready != (tt.want == "") || !strings.HasSuffix(got, want) {
			t.Errorf("%s: %t (-want +got):\n%s", name, ready, cmp.Diff(want, got))
		}
	}
}

// TestWhyNothingIsServed: the state of the driver comes before the GPUs.
func TestWhyNothingIsServed(t *testing.T) {
	t.Parallel()
	some, bad := []inventory.GPU{{UUID: "GPU-a", MIG: inventory.MIGEnabled}}, []inventory.LeftOut{{Reason: "no UUID"}}
	released := func(m *monitor.Monitor) error { return m.Quiesce(t.Context(), false) }
	const see = "none of the node's GPUs can be offered, see status"
	for name, test := range map[string]struct {
		driver monitor.Driver
		act    func(*monitor.Monitor) error
		want   string
	}{
		"no GPU": {&driver{}, nil, "this node has no GPU"},
		"released": {&driver{err: errors.New("no driver")}, released,
			"the driver is released; to end this, run: gpu-device-plugin resume"},
		"a change": {&driver{}, func(m *monitor.Monitor) error { return m.QuiesceForChange(t.Context()) },
			"the driver of the node is being changed"},
		"no driver":        {&driver{err: errors.New("no driver")}, nil, "no driver"},
		"a GPU":            {&scanned{snapshot: inventory.Snapshot{GPUs: some}}, nil, see},
		"a bad GPU":        {&scanned{snapshot: inventory.Snapshot{LeftOut: bad}}, nil, see},
		"a GPU, a bad GPU": {&scanned{snapshot: inventory.Snapshot{GPUs: some, LeftOut: bad}}, nil, see},
	} {
		m := watch(t, test.driver)
		_ = m.First(t.Context())
		if test.act != nil {
			if err := test.act(m); err != nil {
				t.Fatal(err)
			}
		}
		s := serving(m, plugins{})
		s.Configs.Publish(config.Config{Live: config.Live{Resource: resource.Options{MIG: resource.MIGMixed}}})
		if ready, got := s.Ready(t.Context()); !ready || got != "nothing to serve: "+test.want {
			t.Errorf("%s: %t, %q, want %q", name, ready, got, test.want)
		}
	}
}
