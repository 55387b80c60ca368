package serve

import (
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

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
