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

// The header of a call of GetDevicePluginOptions by which a process says that it ends, with its
// token, and that of the answer by which another process says that it registers again then, or that
// it is about to register. The kubelet sends no such header, and an earlier version of this program
// does not answer with it.
const (
	leavesHeader         = "gpu-device-plugin-leaves"
	registersAgainHeader = "gpu-device-plugin-registers-again"
	registersSoon        = "soon" // the other value is "yes"
)

// tellTimeout limits the calls to the processes between an earlier one that ends and the last one.
// One of them may hang.
const tellTimeout = 300 * time.Millisecond

// Why kubelet has not forgotten a later server.
var (
	errNotAgain = errors.New("the other process does not say that it registers again")
	errAccepted = errors.New("it accepted a registration without options")
)

// ErrNotYet is the error of Leave while the process that is to serve the resource has not
// registered yet.
var ErrNotYet = errors.New("the process that takes the resource over has not registered yet")

// Leave prepares the end of this process's stream for a resource, where another process of this
// program serves the resource afterwards: the one that started last, which has registered since, or
// else an earlier one, which registers when it is told here that this process leaves.
//
// The kubelet up to 1.36 keeps one client for a resource, and takes the end of any stream for the
// end of that client's. It forgets the client when a registration fails. So a registration fails
// here, and the kubelet takes no notice of the next ends of streams. The other process is asked
// before whether it registers again after that: otherwise the kubelet would not see its end.
// Kubelet 1.37 forgets only the client of the failed registration.
//
// An error means that the kubelet may not have forgotten the client. It is ErrNotYet where Leave is
// to be called again in a moment, and wraps fs.ErrNotExist where there is no other process.
func (d *Directory) Leave(ctx context.Context, incarnation uint64, resource string) error {
	var header metadata.MD
	ask := func(options ...grpc.CallOption) func(context.Context, pluginapi.DevicePluginClient) error {
		return func(ctx context.Context, other pluginapi.DevicePluginClient) error {
			ctx = metadata.AppendToOutgoingContext(ctx, leavesHeader, d.token)
			_, err := other.GetDevicePluginOptions(ctx, &pluginapi.Empty{}, options...)
			return err
		}
	}
	defer d.LockRegistrations(ctx)() // the kubelet would also forget a process that registers meanwhile
	rivals := d.Rivals(resource)
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
	if s, ok := status.FromError(err); !ok || s.Code() != codes.Unknown { // which is the code of an error of kubelet's
		return fmt.Errorf("have kubelet forget the server of %s: %w", resource, cmp.Or(err, errAccepted))
	}
	return nil
}

// severalClientsSince is the minor version of gRPC with which kubelet 1.37.0 was built: 1.36.3 has
// 1.79.
const severalClientsSince = 82

// KeepsOneClient reports whether the kubelet that names itself so in its calls is one that keeps
// one client for a resource, up to 1.36. It goes by the version of gRPC, as kubelet does not name
// its own; false if that cannot be known.
func KeepsOneClient(userAgent string) bool {
	_, version, _ := strings.Cut(userAgent, "grpc-go/1.")
	minor, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(minor)
	return err == nil && n < severalClientsSince
}

// Leaves returns the token of the process that ends, where a call of GetDevicePluginOptions, whose
// context ctx is, comes from one; empty otherwise.
func Leaves(ctx context.Context) (token string) {
	header, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(header.Get(leavesHeader), "")
}

// RegistersAgain answers such a call with the promise that this process registers again once the
// other one has ended.
func RegistersAgain(ctx context.Context) { answerLeaving(ctx, "yes") }

// RegistersSoon answers such a call with the promise that this process is about to register: the
// other one asks again.
func RegistersSoon(ctx context.Context) { answerLeaving(ctx, registersSoon) }

func answerLeaving(ctx context.Context, answer string) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(registersAgainHeader, answer)) // it fails only outside a call
}
