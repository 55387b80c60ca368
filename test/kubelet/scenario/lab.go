package scenario

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// A Subject is the kubelet that a scenario is about. Its methods mean what those of kubelet.Kubelet
// mean.
type Subject interface {
	Restart() error
	DropStream(resource string) int
	Resources() map[string]kubelet.Quantity
	Admit(ctx context.Context, c kubelet.Container) (kubelet.Allocation, error)
	Remove(pod string)
	SetPodsKnown(known bool)
	PodStatus(pod string) map[string]map[string]bool
}

// Setup says against what the table runs.
type Setup struct {
	Version kubelet.Version
	// Start starts a kubelet with these directories and ends it with the test.
	Start func(t *testing.T, dir, podResourcesSocket string) Subject
	// Pass makes time pass for the subject. If nil, the scenarios that need minutes are left out.
	Pass func(s Subject, d time.Duration)
}

const (
	resource = "nvidia.com/gpu"
	fence    = "nvidia.com/fence"

	// patience bounds every scenario. The longest thing that kubelet itself waits for is its dial of
	// 10 s.
	patience = 3 * time.Minute
	// stopGrace is how long a resource outlives its last stream; margin is how close to that a
	// scenario looks.
	stopGrace = 5 * time.Minute
	margin    = 5 * time.Second
	// lookEvery is how often a condition is looked at that nothing announces.
	lookEvery = 2 * time.Millisecond
)

// Run runs the table, each scenario as a subtest with a kubelet of its own.
func Run(t *testing.T, setup Setup) {
	for _, group := range [][]scenario{registration, lists, restarts, allocation, overlaps, account, file, topology} {
		for _, s := range group {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				if s.minutes && setup.Pass == nil {
					t.Skip("needs minutes on this subject")
				}
				s.run(newLab(t, setup, s.minutes))
			})
		}
	}
}

type scenario struct {
	name    string
	run     func(*lab)
	minutes bool // it needs Pass
}

// lab is one kubelet and what a scenario does with it.
type lab struct {
	*testing.T
	setup   Setup
	ctx     context.Context //nolint:containedctx // the scenario's own, which ends with it
	dir     string
	socket  string // PodResources
	subject Subject
}

func newLab(t *testing.T, setup Setup, minutes bool) *lab {
	// Socket paths are limited to 107 bytes, and t.TempDir has the test's name in it.
	root := loopback.Folder(t)
	l := &lab{
		T: t, setup: setup,
		dir:    filepath.Join(root, "device-plugins"),
		socket: filepath.Join(root, "pod-resources", "kubelet.sock"),
	}
	limit := patience
	if minutes {
		limit += 2 * stopGrace
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	l.ctx = ctx
	l.subject = setup.Start(t, l.dir, l.socket)
	return l
}

// must ends the scenario on an error.
func (l *lab) must(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

// serve starts a plugin with a list, and does not register it.
func (l *lab) serve(name string, script Script, devices ...*v1beta1.Device) *Plugin {
	l.Helper()
	return l.serveFor(resource, name, script, devices...)
}

func (l *lab) serveFor(resource, name string, script Script, devices ...*v1beta1.Device) *Plugin {
	l.Helper()
	p, err := StartPlugin(l.dir, name, resource, script)
	l.must(err)
	l.Cleanup(p.Stop)
	p.Send(devices...)
	return p
}

// start starts a plugin with healthy devices of these IDs, registers it, and waits until kubelet
// has its list.
func (l *lab) start(name string, script Script, ids ...string) *Plugin {
	l.Helper()
	p := l.serve(name, script, devices(ids...)...)
	l.must(p.Register(l.ctx))
	l.must(p.WaitStreams(l.ctx, 1))
	l.shows(len(ids), len(ids))
	return p
}

// until waits until done holds, and says whether it came to that within the scenario's time.
func (l *lab) until(done func() bool) bool {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for !done() {
		select {
		case <-l.ctx.Done():
			return false
		case <-look.C:
		}
	}
	return true
}

// eventually is until for conditions that the scenario cannot do without.
func (l *lab) eventually(what string, done func() bool) {
	l.Helper()
	if !l.until(done) {
		l.Fatalf("%s: has not come; the node shows %v", what, l.subject.Resources())
	}
}

// shows waits until the node shows so many devices, and so many healthy ones.
func (l *lab) shows(capacity, allocatable int) {
	l.Helper()
	l.eventually("what was expected", func() bool { return l.looksLike(capacity, allocatable) })
}

func (l *lab) looksLike(capacity, allocatable int) bool {
	got, there := l.subject.Resources()[resource]
	return there && got == kubelet.Quantity{Capacity: capacity, Allocatable: allocatable}
}

// stays waits until kubelet has gone through a whole registration of another plugin, and then looks
// whether the node still shows the same: for things that must not happen.
func (l *lab) stays(capacity, allocatable int) {
	l.Helper()
	p := l.serveFor(fence, "fence.sock", Script{}, devices("f")...)
	l.must(p.Register(l.ctx))
	l.eventually("fence", func() bool { return l.subject.Resources()[fence].Allocatable == 1 })
	p.Stop()
	l.eventually("fence is down", func() bool { return l.subject.Resources()[fence].Allocatable == 0 })
	want := kubelet.Quantity{Capacity: capacity, Allocatable: allocatable}
	l.same("what the node shows", want, l.subject.Resources()[resource])
}

// admit admits a pod of one container, and expects it to come up.
func (l *lab) admit(pod string, count int) kubelet.Allocation {
	l.Helper()
	got, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: pod, Name: "main", Resource: resource, Count: count})
	l.must(err)
	if len(got.IDs) != count {
		l.Fatalf("pod %s got %v, want %d devices", pod, got.IDs, count)
	}
	return got
}

// refuse admits a pod of one container, and expects it not to come up, for that reason and with
// that in the message.
func (l *lab) refuse(pod string, count int, reason, message string) {
	l.Helper()
	_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: pod, Name: "main", Resource: resource, Count: count})
	var failed *kubelet.PodError
	switch {
	case !errors.As(err, &failed):
		l.Fatalf("pod %s: %v, want it to fail with %s", pod, err, reason)
	case failed.Reason != reason || !strings.Contains(failed.Error(), message):
		l.Fatalf("pod %s failed with %v, want %s and %q in it", pod, failed, reason, message)
	}
}

// same fails the scenario if got is not want.
func (l *lab) same(what string, want, got any) {
	l.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		l.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

// podResources returns a client of kubelet's PodResources service.
func (l *lab) podResources() podresources.PodResourcesListerClient {
	l.Helper()
	conn, err := grpc.NewClient("unix://"+l.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	l.must(err)
	l.Cleanup(func() { _ = conn.Close() })
	return podresources.NewPodResourcesListerClient(conn)
}

// devices returns healthy devices.
func devices(ids ...string) []*v1beta1.Device {
	var list []*v1beta1.Device
	for _, id := range ids {
		list = append(list, device(id, v1beta1.Healthy))
	}
	return list
}

// device returns a device with the NUMA nodes it is on.
func device(id, health string, nodes ...int64) *v1beta1.Device {
	d := &v1beta1.Device{ID: id, Health: health}
	for _, node := range nodes {
		if d.Topology == nil {
			d.Topology = &v1beta1.TopologyInfo{}
		}
		d.Topology.Nodes = append(d.Topology.Nodes, &v1beta1.NUMANode{ID: node})
	}
	return d
}
