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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// The header of a call of GetDevicePluginOptions by which a process says that it ends, and of the answer by which a later one says that
// it registers again then. Kubelet sends no such header, and an earlier version of this program does not answer with it.
const (
	leavesHeader         = "gpu-device-plugin-leaves"
	registersAgainHeader = "gpu-device-plugin-registers-again"
)

// tellTimeout limits the calls to the processes between an earlier one that ends and the last one. One of them may hang.
const tellTimeout = 300 * time.Millisecond

// Why kubelet has not forgotten a later server.
var (
	errNotAgain = errors.New("the later process does not say that it registers again")
	errAccepted = errors.New("it accepted a registration without options")
)

// Leave prepares the end of this process's stream for a resource, where a process of this program that started later has registered since.
//
// Kubelet up to 1.36 keeps one client for a resource, and takes the end of any stream for the end of that client's. It forgets the
// client when a registration fails. So a registration fails here, and kubelet takes no notice of the next ends of streams. The later
// process is asked before whether it registers again after that: otherwise kubelet would not see its end. Kubelet 1.37 forgets only the
// client of the failed registration.
//
// An error means that kubelet may not have forgotten the client.
func (d *Directory) Leave(ctx context.Context, incarnation uint64, resource string) error {
	var header metadata.MD
	ask := func(options ...grpc.CallOption) func(context.Context, pluginapi.DevicePluginClient) error {
		return func(ctx context.Context, later pluginapi.DevicePluginClient) error {
			ctx = metadata.AppendToOutgoingContext(ctx, leavesHeader, "yes")
			_, err := later.GetDevicePluginOptions(ctx, &pluginapi.Empty{}, options...)
			return err
		}
	}
	defer d.LockRegistrations(ctx)() // kubelet would forget a process that registers meanwhile, too
	later := newestFirst(d.Rivals(resource).Later)
	if len(later) == 0 {
		return fmt.Errorf("find the later server of %s: %w", resource, fs.ErrNotExist)
	}
	if err := d.call(ctx, later[0], ask(grpc.Header(&header))); err != nil {
		return fmt.Errorf("ask the later server of %s: %w", resource, err)
	}
	if len(header.Get(registersAgainHeader)) == 0 {
		return errNotAgain
	}
	var told sync.WaitGroup
	for _, name := range later[1:] { // a process between the two must not take the newest one's devices for its own when that has ended
		told.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, tellTimeout)
			defer cancel()
			_ = d.call(ctx, name, ask()) // one that does not answer has ended, or hangs
		})
	}
	told.Wait()
	endpoint := d.NewEndpoint(resource)
	listener, err := files.Listen(ctx, endpoint)
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

// severalClientsSince is the minor version of gRPC with which kubelet 1.37.0 was built: 1.36.3 has 1.79.
const severalClientsSince = 82

// KeepsOneClient reports whether the kubelet that names itself so in its calls is one that keeps one client for a resource, up to 1.36.
// It goes by the version of gRPC, as kubelet does not name its own; false if that cannot be known.
func KeepsOneClient(userAgent string) bool {
	_, version, _ := strings.Cut(userAgent, "grpc-go/1.")
	minor, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(minor)
	return err == nil && n < severalClientsSince
}

// Leaves reports whether a call of GetDevicePluginOptions, whose context ctx is, comes from an earlier process that ends.
func Leaves(ctx context.Context) bool {
	header, _ := metadata.FromIncomingContext(ctx)
	return len(header.Get(leavesHeader)) > 0
}

// RegistersAgain answers such a call with the promise that this process registers again once the earlier one has ended.
func RegistersAgain(ctx context.Context) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(registersAgainHeader, "yes")) // it fails only outside a call
}
