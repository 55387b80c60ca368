package serve

import (
	"context"
	"errors"
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
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

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
