package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// leavesHeader is the header of a call of GetDevicePluginOptions by which an ending process
// announces its end, with its token. registersAgainHeader is the header of the answer by which
// another process promises to register again afterwards, or says that it is about to register. The
// kubelet sends no such header, and an earlier version of this program does not answer with one.
const (
	leavesHeader         = "gpu-device-plugin-leaves"
	registersAgainHeader = "gpu-device-plugin-registers-again"
	registersSoon        = "soon" // the other value is "yes"
)

// tellTimeout limits the calls to the processes between an ending earlier process and the last
// process. One of them may hang.
const tellTimeout = 300 * time.Millisecond

// Why the kubelet has not forgotten a later server.
var (
	errNotAgain = errors.New("the other process does not say that it registers again")
	errAccepted = errors.New("it accepted a registration without options")
)

// ErrNotYet is the error of Detach while the process that takes the resource over has not
// registered yet.
var ErrNotYet = errors.New("the process that takes the resource over has not registered yet")

// Detach prepares the end of this process's stream of a resource that another process of this
// program serves afterwards: the newest process, which has registered since, or else an earlier
// process, which registers when Detach announces this end.
//
// A kubelet up to 1.36 keeps one client for each resource, and takes the end of any stream for the
// end of that client's stream. It forgets the client when a registration fails. So Detach makes a
// registration fail, and the kubelet ignores the next ends of streams. Before that, the other
// process must promise to register again: otherwise the kubelet would not notice the end of that
// process. The kubelet 1.37 forgets only the client of the failed registration.
//
// An error means that the kubelet may not have forgotten the client. On ErrNotYet, call Detach
// again in a moment. The error wraps fs.ErrNotExist if there is no other process.
func (d *Directory) Detach(ctx context.Context, incarnation uint64, resource string) error {
	var header metadata.MD
	ask := func(options ...grpc.CallOption) func(context.Context, pluginapi.DevicePluginClient) error {
		return func(ctx context.Context, other pluginapi.DevicePluginClient) error {
			ctx = metadata.AppendToOutgoingContext(ctx, leavesHeader, d.token)
			_, err := other.GetDevicePluginOptions(ctx, &pluginapi.Empty{}, options...)
			return err
		}
	}
	unlock, _ := d.LockRegistrations(ctx) // the kubelet would also forget a process that registers meanwhile
	defer unlock()
	rivals := d.Peers(resource)
	others := append(newestFirst(rivals.Later), newestFirst(rivals.Earlier)...)
	for len(others) > 0 && d.Refuses(ctx, others[0]) {
		others = others[1:] // that process was killed
	}
	if len(others) == 0 {
		return fmt.Errorf("find another server of %s: %w", resource, fs.ErrNotExist)
	}
	if err := d.call(ctx, others[0], ask(grpc.Header(&header))); err != nil {
		return fmt.Errorf("ask another server of %s: %w", resource, err)
	}
	switch again := header.Get(registersAgainHeader); {
	case len(again) == 0:
		return errNotAgain
	case again[0] == registersSoon:
		return ErrNotYet
	}
	var told sync.WaitGroup
	for _, name := range others[1:] { // none of them must take that process's devices for its own when that has ended
		told.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, tellTimeout)
			defer cancel()
			_ = d.call(ctx, name, ask()) // one that does not answer has ended, or hangs
		})
	}
	told.Wait()
	endpoint := d.NewEndpoint(resource)
	listener, err := statefile.Listen(ctx, endpoint)
	if err != nil {
		return err
	}
	server := grpc.NewServer() // it has no service: each call fails
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // it ends by Stop alone
	defer serving.Wait()
	defer server.Stop()
	err = d.Register(ctx, incarnation, resource, endpoint, nil)
	if s, ok := status.FromError(err); !ok || s.Code() != codes.Unknown { // which is the code of an error of the kubelet's
		return fmt.Errorf("have kubelet forget the server of %s: %w", resource, cmp.Or(err, errAccepted))
	}
	return nil
}

// severalClientsSince is the minor version of gRPC in kubelet 1.37.0. Kubelet 1.36.3 has 1.79.
const severalClientsSince = 82

// KeepsOneClient reports whether the kubelet with this user agent keeps one client for each
// resource, as up to 1.36. It uses the version of gRPC, because the kubelet does not send its own
// version. It returns false if the version is unknown.
func KeepsOneClient(userAgent string) bool {
	_, version, _ := strings.Cut(userAgent, "grpc-go/1.")
	minor, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(minor)
	return err == nil && n < severalClientsSince
}

// LeavingToken returns the token of the ending process if a call of GetDevicePluginOptions with
// context ctx announces an end, and otherwise an empty string.
func LeavingToken(ctx context.Context) (token string) {
	header, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(header.Get(leavesHeader), "")
}

// WillReregister answers such a call with the promise that this process registers again once the
// other process has ended.
func WillReregister(ctx context.Context) { answerLeaving(ctx, "yes") }

// WillRegister answers such a call with the promise that this process is about to register. The
// other process asks again.
func WillRegister(ctx context.Context) { answerLeaving(ctx, registersSoon) }

func answerLeaving(ctx context.Context, answer string) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(registersAgainHeader, answer)) // it fails only outside a call
}
