package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2/ktesting"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestAPanicEndsTheCallAlone(t *testing.T) {
	log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	_, err := recoverCalls(log)(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/Allocate"},
		func(context.Context, any) (any, error) { panic("index out of range") })
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "/Allocate") {
		t.Errorf("a call that panics returns %v, want Internal", err)
	}
	err = recoverStreams(log)(nil, nil, &grpc.StreamServerInfo{FullMethod: "/ListAndWatch"},
		func(any, grpc.ServerStream) error { panic("index out of range") })
	if status.Code(err) != codes.Internal {
		t.Errorf("a stream that panics returns %v, want Internal", err)
	}
	logged := log.GetSink().(ktesting.Underlier).GetBuffer().String()
	if !strings.Contains(logged, "index out of range") || !strings.Contains(logged, "service_internal_test.go") {
		t.Errorf("the log has no cause and stack:\n%s", logged)
	}
}

// A listStream is kubelet's stream, and what came by it.
type listStream struct {
	grpc.ServerStream
	ctx  context.Context
	sent []string // the IDs of each list
	err  error
}

func (s *listStream) Context() context.Context { return s.ctx }

func (s *listStream) Send(r *pluginapi.ListAndWatchResponse) error {
	ids := ""
	for _, d := range r.Devices {
		ids += d.GetID() + " "
	}
	s.sent = append(s.sent, ids)
	return s.err
}

// TestWhatAStreamSends: the list, each other one, and the last one again when it is to be repeated;
// nothing while the server is silent.
func TestWhatAStreamSends(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newList(gpuName)
		ended := 0
		life := &registration{list: l, previous: &previous{},
			session:       session{closing: make(chan struct{}), connections: newConnections(), end: func(error) { ended++ }},
			Collaborators: Collaborators{KeepsOneClient: func(agent string) bool { return agent == "grpc-go/1.79.0" }}}
		life.resend.Publish(7) // in an earlier stream
		s, again, sent, silence := alone(life), &life.resend, &life.sent, &life.mute
		ctx, cancel := context.WithCancel(metadata.NewIncomingContext(t.Context(),
			metadata.Pairs("user-agent", "grpc-go/1.79.0")))
		defer cancel()
		stream := &listStream{ctx: ctx}
		if s.streamed() {
			t.Error("the stream has begun before the call")
		}
		var answer error
		go func() { answer = s.ListAndWatch(nil, stream) }()
		list := func(ids ...string) {
			r := resource.Resource{Name: gpuName}
			for _, id := range ids {
				r.Devices = append(r.Devices, resource.Device{ID: id})
			}
			l.publish(listOf(r), Options{})
		}
		sends := func(step string, want ...string) {
			t.Helper()
			synctest.Wait()
			if diff := cmp.Diff(want, stream.sent); diff != "" {
				t.Errorf("%s (want - got +): %s", step, diff)
			}
			stream.sent = nil
			if last := l.views.Value().response; len(want) > 0 && (sent.Value() != last || l.last.Load() != last) {
				t.Errorf("%s: what was sent is not noted", step)
			}
		}
		sends("it begins", "")
		if !s.streamed() || !s.oneClient {
			t.Errorf("it has begun: %v, kubelet keeps one client: %v", s.streamed(), s.oneClient)
		}
		list("a")
		sends("a list", "a ")
		list("a")
		sends("the same list")
		again.Publish(8)
		sends("it is to be sent again", "a ")
		silence.Publish(muteOtherPlugin)
		list("b")
		again.Publish(9)
		sends("it is silent")
		silence.Publish(muteNone)
		sends("it speaks again", "b ")
		silence.Publish(muteOtherPlugin)
		silence.Publish(muteNone)
		sends("nothing has changed meanwhile")
		close(life.closing)
		synctest.Wait()
		if status.Code(answer) != codes.Unavailable || ended != 0 {
			t.Errorf("at the end of the life: %v; kubelet ended %d streams", answer, ended)
		}
		cancel()
		synctest.Wait()
		if ended != 1 {
			t.Errorf("kubelet ended %d streams, want one", ended)
		}
		life.closing = make(chan struct{})
		if err := s.ListAndWatch(nil, stream); err != nil || ended != 1 {
			t.Errorf("a stream that has ended: %v, %d ends", err, ended)
		}
		if err := s.ListAndWatch(nil, &listStream{ctx: t.Context(), err: io.ErrClosedPipe}); !errors.Is(err,
			io.ErrClosedPipe) {
			t.Errorf("a list that cannot be sent: %v", err)
		}
	})
}

// TestWhatAContainerGets: all edits, in kubelet's words.
func TestWhatAContainerGets(t *testing.T) {
	t.Parallel()
	got := answer(containeredits.Edits{
		Env: map[string]string{"A": "b"}, Annotations: map[string]string{"c": "d"}, CDIDevices: []string{"e", "f"},
		Mounts: []containeredits.Mount{{HostPath: "/h", ContainerPath: "/c"}},
		Nodes:  []containeredits.DeviceNode{{HostPath: "/dev/h", ContainerPath: "/dev/c", Permissions: "rw"}},
	})
	want := &pluginapi.ContainerAllocateResponse{
		Envs: map[string]string{"A": "b"}, Annotations: map[string]string{"c": "d"},
		CdiDevices: []*pluginapi.CDIDevice{{Name: "e"}, {Name: "f"}},
		Mounts:     []*pluginapi.Mount{{HostPath: "/h", ContainerPath: "/c"}},
		Devices:    []*pluginapi.DeviceSpec{{HostPath: "/dev/h", ContainerPath: "/dev/c", Permissions: "rw"}},
	}
	if !proto.Equal(want, got) {
		t.Errorf("a container gets %v, want %v", got, want)
	}
}

// A headerStream keeps the header of an answer.
type headerStream struct {
	grpc.ServerTransportStream
	header metadata.MD
}

func (s *headerStream) SetHeader(h metadata.MD) error { s.header = h; return nil }

// TestThePromiseToRegisterAgain is given where the kubelet keeps one client and goes by this life,
// or may. While this process is about to register, it promises that, too. The call of a process
// that ends is not one of the kubelet's.
func TestThePromiseToRegisterAgain(t *testing.T) {
	t.Parallel()
	const ends, third = "gpu-device-plugin-gpu-000000-zzzzzzzzzzzz-1.sock", "gpu-device-plugin-gpu-000000-zzzzzzzzzzzy-1.sock"
	for name, tt := range map[string]struct {
		silent                 mute
		later                  []string
		unseen, several, ended bool // no stream has begun; a kubelet that keeps several clients; this process also ends
		promises               string
		unlisted               bool // no list was sent
	}{
		"the kubelet goes by it":              {promises: "yes"},
		"the kubelet may":                     {silent: muteAccountDiffers, promises: "yes"},
		"an earlier process, and a third one": {silent: muteLaterProcess, later: []string{third}},
		"the later process, and a third one":  {silent: muteLaterProcess, later: []string{ends, third}, promises: "soon"},
		"another program":                     {silent: muteOtherPlugin},
		"its next life registers":             {silent: muteReplaced, promises: "soon"},
		"it has not registered":               {unseen: true, promises: "soon"},
		"it has sent no list":                 {unlisted: true, promises: "soon"},
		"a later process, not noticed yet":    {later: []string{ends}, promises: "soon"},
		"kubelet 1.37":                        {several: true},
		"it ends":                             {ended: true, unseen: true},
	} {
		s := alone(&registration{list: newList(gpuName), previous: &previous{ending: tt.ended},
			session:       session{connections: newConnections()},
			Collaborators: Collaborators{Registrar: &sharedDirectory{later: tt.later}}})
		caller := &conn{Conn: &net.UnixConn{}, connections: s.connections}
		s.oneClient, s.inspect = !tt.several, true
		if s.mute.Publish(tt.silent); !tt.unseen {
			close(s.began)
		}
		if !tt.unlisted {
			s.sent.Publish(&pluginapi.ListAndWatchResponse{})
		}
		for _, leaves := range []bool{true, false} {
			ctx, stream, want := t.Context(), &headerStream{}, ""
			if leaves {
				want, ctx = tt.promises, metadata.NewIncomingContext(ctx,
					metadata.Pairs("gpu-device-plugin-leaves", "zzzzzzzzzzzz"))
			}
			ctx = peer.NewContext(grpc.NewContextWithServerTransportStream(ctx, stream), &peer.Peer{Addr: caller.RemoteAddr()})
			o, err := s.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
			promises := strings.Join(stream.header.Get("gpu-device-plugin-registers-again"), "")
			if called := s.connections.kubelet == caller; err != nil || !o.GetPreStartRequired() || promises != want ||
				called == leaves {
				t.Errorf("%s: %v, %v; promises %q, want %q; taken for a call of the kubelet's: %v", name, o, err, promises, want,
					called)
			}
		}
		if s.reregisterPromised.Value() != (tt.promises == "yes") || s.previous.isForgotten() == tt.ended {
			t.Errorf("%s: registers again: %v; forgotten: %v", name, s.reregisterPromised.Value(), s.previous.isForgotten())
		}
	}
}

// TestADeviceThatNoProcessMustGive is not asked of the earlier process. Others that are not of the
// plan are.
func TestADeviceThatNoProcessMustGive(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		id     string
		asks   bool
		refuse codes.Code
	}{
		"of the plan":             {"GPU-0", false, codes.OK},
		"unknown":                 {"unknown", false, codes.NotFound},
		"departing and given":     {"GPU-1::0", true, codes.OK},
		"departing and not given": {"gone", false, codes.FailedPrecondition},
		"departing and refused":   {"GPU-2::0", true, codes.FailedPrecondition},
	} {
		asked := false
		directory := &sharedDirectory{called: func(string) error {
			if asked = true; tt.id == "GPU-2::0" {
				return status.Error(codes.FailedPrecondition, "its GPU is not free yet")
			}
			return nil
		}}
		set := NewServers(Collaborators{Clock: clock.RealClock{}, Checkpoint: func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Healthy: map[string][]string{gpuName: {"GPU-1::0", "GPU-2::0", "gone"}}}, nil
		}})
		var gpus inventory.Snapshot
		for i := range 3 {
			gpus.GPUs = append(gpus.GPUs, inventory.GPU{UUID: fmt.Sprint("GPU-", i), Index: i,
				Health: inventory.Health{State: inventory.Healthy}})
		}
		set.Apply(resource.New(gpus, resource.Options{}), Options{Edits: containeredits.Options{
			Strategies: []containeredits.Strategy{containeredits.EnvVar}}}, 1)
		s := alone(&registration{Collaborators: Collaborators{Registrar: directory}, list: set.resources[gpuName].list,
			allocating: func(ids [][]string) (listing.Answer, Options) { return set.allocating(gpuName, ids) }})
		_, err := s.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{tt.id}}}})
		if asked != tt.asks || status.Code(err) != tt.refuse {
			t.Errorf("%s: the earlier process is asked: %v, %v; want %v, %v", name, asked, err, tt.asks, tt.refuse)
		}
		if used := s.used.Load(); used != (name == "of the plan") {
			t.Errorf("%s: the life counts as used: %v", name, used)
		}
	}
}

// TestGPUsThatMayNotBeGiven: a pod gets none of them.
func TestGPUsThatMayNotBeGiven(t *testing.T) {
	t.Parallel()
	mayGive := func(d []resource.Device) error { return errors.New(d[0].GPU + d[1].GPU + ": a claim has it") }
	set := NewServers(Collaborators{Clock: clock.RealClock{}, MayGive: mayGive})
	set.Apply(resource.Plan{Resources: []resource.Resource{whole(2).Resource}}, Options{}, 1)
	s := alone(&registration{list: set.resources[gpuName].list,
		allocating: func(ids [][]string) (listing.Answer, Options) { return set.allocating(gpuName, ids) }})
	ids := []string{"GPU-0", "GPU-1"}
	_, err := s.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "GPU-0GPU-1: a claim has it") {
		t.Errorf("Allocate() = %v", err)
	}
	if set.holders.IsHeld(keyOf(gpuName, "GPU-0")) {
		t.Error("a pod that got nothing counts as a holder")
	}
}

// TestAPreferenceAmongDevicesOfAnEarlierServer is that server's.
func TestAPreferenceAmongDevicesOfAnEarlierServer(t *testing.T) {
	t.Parallel()
	for available, want := range map[string]bool{"GPU-x": true, "GPU-x GPU-0": false, "GPU-0": false} {
		asked := false
		l := newList(resource.WholeGPU)
		l.publish(whole(1), Options{})
		s := alone(&registration{list: l, Collaborators: Collaborators{Registrar: &sharedDirectory{called: func(string) error {
			asked = true
			return nil
		}}}})
		_, err := s.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: strings.Fields(available),
				AllocationSize: 1}},
		})
		if err != nil || asked != want {
			t.Errorf("%s: the earlier server is asked: %v, want %v (%v)", available, asked, want, err)
		}
	}
}
