package serve

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// maxRequests is how many requests a server reads and answers at a time. The kubelet sends its
	// requests one by one. A request of maxRequest bytes takes twice as much memory.
	maxRequests = 4
	// maxPreStart bounds a request of PreStartContainer, in bytes. It names the
	// devices of one container. An answer may take seconds, so the request no
	// longer counts among maxRequests after it was read.
	maxPreStart = 1 << 20
	// readPatience is how long a request may take to arrive. A slower request ends
	// when another request waits for its place. So no request holds others up, and
	// at most maxRequests take memory.
	readPatience = time.Second
	// requestPatience is how long a request waits for a place. Then it ends.
	requestPatience = 30 * time.Second
	// streamWindow is how much of a waiting request is received, in bytes.
	streamWindow = 256 << 10
	// connectionWindow is how much the kubelet may send before the server has read
	// it, in bytes. The server reads as fast as it can, so the window takes no
	// memory. With the default of 64 KiB, a request with 8,000 devices takes a
	// third longer: gRPC enlarges the window itself only where no window is set.
	connectionWindow = 1 << 20
)

// A requestLimit makes requests wait before they are read while other requests are
// answered, so that many large requests at once take little memory.
type requestLimit struct {
	places chan struct{}
	wanted chan struct{} // a place is wanted of a request that is late
}

func newRequestLimit() requestLimit {
	return requestLimit{places: make(chan struct{}, maxRequests), wanted: make(chan struct{})}
}

// A place is the place of a request in the limit.
type place struct {
	end     context.CancelFunc // ends the request
	arrive  func()             // notes that the request has arrived or ended
	arrived chan struct{}
	leave   func() // gives the place up
}

type placeKey struct{}

// tap lets a waiting request be ended.
func (l requestLimit) tap(ctx context.Context, call *tap.Info) (context.Context, error) {
	switch call.FullMethodName {
	case pluginapi.DevicePlugin_GetPreferredAllocation_FullMethodName, pluginapi.DevicePlugin_Allocate_FullMethodName,
		pluginapi.DevicePlugin_PreStartContainer_FullMethodName:
	default:
		return ctx, nil
	}
	ctx, end := context.WithCancel(ctx)
	arrived := make(chan struct{})
	p := &place{
		end: end, arrived: arrived, arrive: sync.OnceFunc(func() { close(arrived) }), leave: func() {},
	}
	return context.WithValue(ctx, placeKey{}, p), nil
}

// TagRPC waits until the request may be read.
func (l requestLimit) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	p, has := ctx.Value(placeKey{}).(*place)
	if !has {
		return ctx
	}
	if !l.wait(ctx) {
		p.end()
		return ctx
	}
	p.leave = sync.OnceFunc(func() { <-l.places })
	time.AfterFunc(readPatience, func() {
		select {
		case <-p.arrived:
		case <-l.wanted:
			p.end()
		}
	})
	return ctx
}

// wait waits for a place. It returns false if no place becomes free in time.
func (l requestLimit) wait(ctx context.Context) bool {
	select {
	case l.places <- struct{}{}:
		return true
	default:
	}
	timer := time.NewTimer(requestPatience)
	defer timer.Stop()
	wanted := l.wanted
	for {
		select {
		case l.places <- struct{}{}:
			return true
		case wanted <- struct{}{}:
			wanted = nil // the place of that one comes free
		case <-ctx.Done():
			return false
		case <-timer.C:
			return false
		}
	}
}

// HandleRPC frees the place of an answered request.
func (l requestLimit) HandleRPC(ctx context.Context, event stats.RPCStats) {
	p, has := ctx.Value(placeKey{}).(*place)
	if !has {
		return
	}
	switch event.(type) {
	case *stats.InPayload:
		p.arrive()
	case *stats.End:
		p.arrive()
		p.leave()
	}
}

// TagConn and HandleConn satisfy the interface of gRPC. Connections have no limit.
func (l requestLimit) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (l requestLimit) HandleConn(context.Context, stats.ConnStats)                       {}

// boundPreStart refuses a PreStartContainer request that is too large, and frees
// the places of the others.
func boundPreStart(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	if info.FullMethod == pluginapi.DevicePlugin_PreStartContainer_FullMethodName {
		if message, ok := request.(proto.Message); ok && proto.Size(message) > maxPreStart {
			return nil, status.Errorf(codes.ResourceExhausted, "the request has %d bytes and may have %d",
				proto.Size(message), maxPreStart)
		}
		if p, has := ctx.Value(placeKey{}).(*place); has {
			p.leave()
		}
	}
	return handle(ctx, request)
}
