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

// leavesHeader marks a call of GetDevicePluginOptions as the announcement of an ending
// process, and carries the token of that process. The answer has registersAgainHeader:
// another process promises to register again afterwards, or says that it is about to
// register. The kubelet never sends leavesHeader, and an earlier version of this program
// never answers with registersAgainHeader.
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

// Detach prepares the end of this process's stream of a resource. Afterwards another process
// of this program serves the resource: the newest process, which has registered since, or
// else an earlier process, which registers when Detach announces the end.
//
// A kubelet up to 1.36 keeps one client for each resource, and takes the end of any stream
// for the end of the client's stream. The kubelet forgets the client when a registration
// fails. So Detach makes a registration fail, and the kubelet ignores later ends of streams.
// Before that, the other process must promise to register again: otherwise the kubelet would
// miss the end of the other process. The kubelet 1.37 forgets only the client of the failed
// registration.
//
// An error means that the kubelet may still have the client. After ErrNotYet, call Detach
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
		others = others[1:] // the process was killed
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
	var calls sync.WaitGroup
	// The other processes must not take over the devices when the newest process has ended.
	for _, name := range others[1:] {
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, tellTimeout)
			defer cancel()
			_ = d.call(ctx, name, ask()) // a process without an answer has ended, or hangs
		})
	}
	calls.Wait()
	endpoint := d.NewEndpoint(resource)
	listener, err := statefile.Listen(ctx, endpoint)
	if err != nil {
		return err
	}
	// The server has no services, so that each call fails.
	server := grpc.NewServer()
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // Serve ends only by Stop
	defer serving.Wait()
	defer server.Stop()
	err = d.Register(ctx, incarnation, resource, endpoint, nil)
	// Unknown is the code of an error from the kubelet.
	if s, ok := status.FromError(err); !ok || s.Code() != codes.Unknown {
		return fmt.Errorf("have the kubelet forget the server of %s: %w", resource, cmp.Or(err, errAccepted))
	}
	return nil
}

// severalClientsSince is the minor version of gRPC in kubelet 1.37.0. Kubelet 1.36.3 has 1.79.
const severalClientsSince = 82

// KeepsOneClient reports whether the kubelet with this user agent keeps one client for each
// resource, like the kubelet up to 1.36. The user agent contains the version of gRPC, not
// the version of the kubelet. KeepsOneClient returns false if the version is unknown.
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

// WillReregister answers an announcement of Detach: this process registers again after the
// end of the other process.
func WillReregister(ctx context.Context) { answerLeaving(ctx, "yes") }

// WillRegister answers an announcement of Detach: this process is about to register. The
// other process then asks again.
func WillRegister(ctx context.Context) { answerLeaving(ctx, registersSoon) }

func answerLeaving(ctx context.Context, answer string) {
	// An error means only that ctx is not the context of a call
	_ = grpc.SetHeader(ctx, metadata.Pairs(registersAgainHeader, answer))
}
