package serve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A service answers the kubelet in one registration: each method reads the list's
// latest view, decides by it, and translates.
type service struct {
	pluginapi.UnimplementedDevicePluginServer
	*registration
	log     klog.Logger
	inspect bool // PreStartRequired as sent at the registration
	// The first stream belongs to the kubelet: no other program knows the socket's
	// name before the kubelet.
	first sync.Once
	began chan struct{} // closed when it begins
	// oneClient says that the kubelet takes the end of any stream for the end of
	// the server that registered last. It is known once began is closed.
	oneClient bool
	used      atomic.Bool // the kubelet allocated in this registration
}

func newService(l *registration, log klog.Logger) *service {
	return &service{registration: l, log: log, inspect: l.list.views.Value().options.Inspect,
		began: make(chan struct{})}
}

func (s *service) GetDevicePluginOptions(
	ctx context.Context, _ *pluginapi.Empty,
) (*pluginapi.DevicePluginOptions, error) {
	if token := kubelet.LeavingToken(ctx); token != "" {
		switch s.answerLeaving(token) {
		case yield.WillReregister:
			kubelet.WillReregister(ctx)
		case yield.WillRegister:
			kubelet.WillRegister(ctx)
		case yield.WillNot:
		}
		return s.options(), nil
	}
	s.connections.noteCall(ctx)
	return s.options(), nil
}

// options are sent to the kubelet at registration. The kubelet never asks again.
func (s *service) options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: s.inspect}
}

// ListAndWatch sends the list, and again after each change, until the kubelet or
// the registration ends the stream.
func (s *service) ListAndWatch(_ *pluginapi.Empty,
	stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	s.connections.noteCall(stream.Context())
	s.first.Do(func() {
		header, _ := metadata.FromIncomingContext(stream.Context())
		s.oneClient = s.KeepsOneClient(strings.Join(header.Get("user-agent"), ""))
		close(s.began)
		context.AfterFunc(stream.Context(), func() { s.end(errStreamEnded) })
	})
	var sent *pluginapi.ListAndWatchResponse
	repeated := s.resend.Value()
	for {
		view, changed := s.list.views.Latest()
		repeat, again := s.resend.Latest()
		may, mayChange := s.maySend()
		if may && (view.response != sent || repeat != repeated) {
			s.noteCheckpoint()
			if err := stream.Send(view.response); err != nil {
				return err
			}
			sent, repeated = view.response, repeat
			s.sent.Publish(sent)
			s.list.last.Store(sent)
		}
		select {
		case <-mayChange:
		case <-again:
		case <-stream.Context().Done():
			return nil
		case <-s.closing:
			return status.Error(codes.Unavailable,
				"this socket is being closed; the plugin registers again if it stays")
		case <-changed:
		}
	}
}

// streamed reports whether the kubelet's stream has begun.
func (s *service) streamed() bool {
	select {
	case <-s.began:
		return true
	default:
		return false
	}
}

// Allocate returns the edits for the devices of each container in the request.
func (s *service) Allocate(ctx context.Context,
	request *pluginapi.AllocateRequest) (response *pluginapi.AllocateResponse, err error) {
	ids := make([][]string, 0, len(request.GetContainerRequests()))
	for _, container := range request.GetContainerRequests() {
		ids = append(ids, container.GetDevicesIds())
	}
	devices, options := s.allocating(ids)
	if all := slices.Concat(ids...); devices.CanForward(all) {
		err := s.forward(ctx, devices.List, [][]string{all}, func(ctx context.Context,
			earlier pluginapi.DevicePluginClient) (err error) {
			response, err = earlier.Allocate(ctx, request)
			return err
		})
		if err == nil {
			return response, nil
		}
		// The earlier server knows the devices, and says why it does not give them.
		if status.Code(err) == codes.FailedPrecondition {
			return nil, err
		}
	}
	if len(ids) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: the request names no container", s.list.name)
	}
	response = &pluginapi.AllocateResponse{
		ContainerResponses: make([]*pluginapi.ContainerAllocateResponse, 0, len(ids)),
	}
	for _, of := range ids {
		e, err := s.editsFor(devices, of, options.Edits)
		if err != nil {
			return nil, status.Errorf(codeOf(err), "allocate %s: %v", s.list.name, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, answer(e))
		s.log.V(2).Info("Allocated", "devices", of)
	}
	s.used.Store(true)
	return response, nil
}

// editsFor returns the edits of a container for its devices, or why the container
// must not get the devices.
func (s *service) editsFor(
	answer listing.Answer, ids []string, o containeredits.Options,
) (e containeredits.Edits, err error) {
	devices, err := answer.Devices(ids)
	if err == nil {
		e, err = containeredits.For(devices, o)
	}
	// `status --holders` prints since when a container has its units. The kubelet keeps the answer as
	// long as the container.
	if err == nil && answer.Resource.InUnits() {
		e.Annotations = maps.Clone(e.Annotations)
		if e.Annotations == nil {
			e.Annotations = map[string]string{}
		}
		e.Annotations[containeredits.AllocatedKey] = s.Clock.Now().UTC().Format(time.RFC3339)
	}
	return e, err
}

// codeOf returns the code for a refused call.
func codeOf(err error) codes.Code {
	var refused *listing.RefusalError
	if errors.As(err, &refused) {
		switch refused.Kind {
		case listing.Invalid:
			return codes.InvalidArgument
		case listing.Unknown:
			return codes.NotFound
		case listing.Withheld:
		}
	}
	return codes.FailedPrecondition
}

// forward makes a call about devices missing from the plan to the earlier server
// that listed them. The kubelet makes such a call after choosing the devices just
// before it received the first list of this process. The IDs are grouped by
// container. The error is fs.ErrNotExist if the call is not for the earlier server.
func (s *service) forward(
	ctx context.Context, l listing.List, ids [][]string, call func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	all := slices.Concat(ids...)
	if len(all) == 0 || slices.ContainsFunc(all, func(id string) bool { return !l.Resource.Lacks(id) }) {
		return fs.ErrNotExist
	}
	err := s.Registrar.CallEarlier(ctx, s.list.name, call)
	if err == nil {
		s.log.V(2).Info("Forwarded a call to the process that listed the devices", "devices", ids)
	}
	return err
}

// GetPreferredAllocation returns the best available devices for a container. An
// error would fail the pod, so it returns an error only if no answer can be right.
func (s *service) GetPreferredAllocation(ctx context.Context, request *pluginapi.PreferredAllocationRequest) (
	response *pluginapi.PreferredAllocationResponse, err error,
) {
	view := s.list.views.Value()
	var available [][]string
	for _, container := range request.GetContainerRequests() {
		available = append(available, container.GetAvailableDeviceIDs())
	}
	if s.forward(ctx, view.List, available, func(ctx context.Context, earlier pluginapi.DevicePluginClient) error {
		response, err = earlier.GetPreferredAllocation(ctx, request)
		return err
	}) == nil {
		return response, nil
	}
	response = &pluginapi.PreferredAllocationResponse{}
	for _, container := range request.GetContainerRequests() {
		ids, err := view.Prefer(container.GetAvailableDeviceIDs(), container.GetMustIncludeDeviceIDs(),
			int(container.GetAllocationSize()))
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "prefer devices of %s: %v", s.list.name, err)
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// inspectTimeout bounds an inspection. The kubelet waits up to 30 s, and the container with it.
const inspectTimeout = 5 * time.Second

// PreStartContainer refuses a container whose devices must not be used now. The
// kubelet also calls it for restarting containers.
func (s *service) PreStartContainer(ctx context.Context, request *pluginapi.PreStartContainerRequest) (
	*pluginapi.PreStartContainerResponse, error,
) {
	if !s.inspect {
		return &pluginapi.PreStartContainerResponse{}, nil
	}
	view := s.list.views.Value()
	devices := make([]resource.Device, 0, len(request.GetDevicesIds()))
	for _, id := range request.GetDevicesIds() {
		device, known := view.PossiblyHeld(id)
		if !known {
			return nil, s.refuse(view.Unknown(id))
		}
		if device.Sharing == resource.Percentage {
			return &pluginapi.PreStartContainerResponse{}, nil // its ID names no GPU
		}
		devices = append(devices, device)
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	if err := s.Inspector.Inspect(ctx, devices); err != nil {
		return nil, s.refuse(err)
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

// refuse says in the pod's events why the container does not start and what helps,
// because the kubelet retries with the same devices forever.
func (s *service) refuse(err error) error {
	return status.Errorf(codeOf(err), "start a container on %s: %v; the kubelet retries on the same device for as "+
		"long as the pod is there: delete the pod to get another", s.list.name, err)
}

// answer translates container edits into the kubelet's API.
func answer(e containeredits.Edits) *pluginapi.ContainerAllocateResponse {
	response := &pluginapi.ContainerAllocateResponse{Envs: e.Env, Annotations: e.Annotations}
	for _, m := range e.Mounts {
		response.Mounts = append(response.Mounts,
			&pluginapi.Mount{ContainerPath: m.ContainerPath, HostPath: m.HostPath})
	}
	for _, n := range e.Nodes {
		response.Devices = append(response.Devices,
			&pluginapi.DeviceSpec{ContainerPath: n.ContainerPath, HostPath: n.HostPath, Permissions: n.Permissions})
	}
	for _, name := range e.CDIDevices {
		response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: name})
	}
	return response
}

// freeMemory returns the memory of large requests to the system soon after the
// answer. The Go runtime alone keeps it for minutes.
func freeMemory(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	response, err := handle(ctx, request)
	if message, ok := request.(proto.Message); ok && proto.Size(message) > largeRequest {
		time.AfterFunc(time.Second, debug.FreeOSMemory)
	}
	return response, err
}

// noteAllocations tells the accountant about calls that allocate devices.
func noteAllocations(a Accountant) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		switch info.FullMethod {
		case pluginapi.DevicePlugin_GetPreferredAllocation_FullMethodName:
			defer a.Allocating()(true) // Allocate follows
		case pluginapi.DevicePlugin_Allocate_FullMethodName:
			defer a.Allocating()(false)
		}
		return handle(ctx, request)
	}
}

// recoverCalls turns a panic in a call into a status and a log line: one bad
// request must not end the daemon.
func recoverCalls(log klog.Logger) grpc.UnaryServerInterceptor {
	return func(
		ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
	) (response any, err error) {
		defer func() { err = recovered(log, recover(), info.FullMethod, err) }()
		return handle(ctx, request)
	}
}

// recoverStreams does for streams what recoverCalls does for calls.
func recoverStreams(log klog.Logger) grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
		handle grpc.StreamHandler) (err error) {
		defer func() { err = recovered(log, recover(), info.FullMethod, err) }()
		return handle(server, stream)
	}
}

func recovered(log klog.Logger, panicked any, method string, err error) error {
	if panicked == nil {
		return err
	}
	log.Error(fmt.Errorf("panic: %v", panicked), "Call failed", "method", method, "stack", string(debug.Stack()))
	return status.Errorf(codes.Internal, "%s failed inside the plugin; its log has the details", method)
}
