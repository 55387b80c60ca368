package serve

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// maxRequests is how many requests a server reads and answers at a time. The kubelet sends one
	// after the other. A request of maxRequest bytes takes twice as much memory.
	maxRequests = 4
	// maxPreStart bounds a request of PreStartContainer, in bytes: it names the devices of one
	// container. It may take seconds to answer, so that it does not count among maxRequests once it
	// is read.
	maxPreStart = 1 << 20
	// readPatience is how long a request may take to arrive before others are read beside it: one
	// that never arrives holds nothing up.
	readPatience = time.Second
	// requestPatience is how long a request waits at most before it is read.
	requestPatience = 30 * time.Second
)

// A requestLimit makes requests wait for a moment before they are read while others are answered,
// so that many large ones at once do not take much memory.
type requestLimit chan struct{}

func newRequestLimit() requestLimit { return make(requestLimit, maxRequests) }

// A place of a request in the limit.
type place struct {
	leave   func()
	arrives *time.Timer // leaves if the request does not arrive
}

type placeKey struct{}

// TagRPC waits until the request may be read.
func (l requestLimit) TagRPC(ctx context.Context, call *stats.RPCTagInfo) context.Context {
	switch call.FullMethodName {
	case pluginapi.DevicePlugin_GetPreferredAllocation_FullMethodName, pluginapi.DevicePlugin_Allocate_FullMethodName,
		pluginapi.DevicePlugin_PreStartContainer_FullMethodName:
	default:
		return ctx
	}
	timer := time.NewTimer(requestPatience)
	defer timer.Stop()
	select {
	case l <- struct{}{}:
		leave := sync.OnceFunc(func() { <-l })
		return context.WithValue(ctx, placeKey{}, &place{leave, time.AfterFunc(readPatience, leave)})
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx
}

// HandleRPC has the request leave its place when it was answered.
func (l requestLimit) HandleRPC(ctx context.Context, event stats.RPCStats) {
	p, has := ctx.Value(placeKey{}).(*place)
	if !has {
		return
	}
	switch event.(type) {
	case *stats.InPayload:
		p.arrives.Stop()
	case *stats.End:
		p.arrives.Stop()
		p.leave()
	}
}

// TagConn and HandleConn are for gRPC: connections have no limit.
func (l requestLimit) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (l requestLimit) HandleConn(context.Context, stats.ConnStats)                       {}

// boundPreStart refuses a request of PreStartContainer that is too large, and has the others leave
// their places.
func boundPreStart(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any,
	error) {
	if info.FullMethod == pluginapi.DevicePlugin_PreStartContainer_FullMethodName {
		if message, ok := request.(proto.Message); ok && proto.Size(message) > maxPreStart {
			return nil, status.Errorf(codes.ResourceExhausted, "the request has %d bytes and may have %d", proto.Size(message),
				maxPreStart)
		}
		if p, has := ctx.Value(placeKey{}).(*place); has {
			p.leave()
		}
	}
	return handle(ctx, request)
}
