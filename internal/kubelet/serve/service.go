package serve

import (
	"cmp"
	"context"
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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A service answers kubelet in one life of a server: each method reads the list's latest view,
// decides by it, and translates.
type service struct {
	pluginapi.UnimplementedDevicePluginServer
	*life
	log     klog.Logger
	inspect bool // what kubelet was told when it registered us
	// The first stream is kubelet's: nobody else knows the socket's name before kubelet does.
	first sync.Once
	began chan struct{} // closed when it begins
	// oneClient says that kubelet takes the end of any stream for that of the server that registered
	// last. It is known when began is closed.
	oneClient bool
	used      atomic.Bool // kubelet allocated in this life
}

func newService(l *life, log klog.Logger) *service {
	return &service{life: l, log: log, inspect: l.list.views.Value().options.Inspect, began: make(chan struct{})}
}

func (s *service) GetDevicePluginOptions(ctx context.Context, _ *pluginapi.Empty) (*pluginapi.DevicePluginOptions,
	error) {
	if token := kubelet.Leaves(ctx); token != "" {
		switch again, soon := s.seesLeave(token); {
		case again:
			kubelet.RegistersAgain(ctx)
		case soon:
			kubelet.RegistersSoon(ctx)
		}
		return s.options(), nil
	}
	s.connections.called(ctx)
	return s.options(), nil
}

// options are what kubelet learns of a server when it registers; kubelet never asks again.
func (s *service) options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: s.inspect}
}

// ListAndWatch sends the list, and again whenever it changed, until kubelet or the life ends the
// stream.
func (s *service) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	s.connections.called(stream.Context())
	s.first.Do(func() {
		header, _ := metadata.FromIncomingContext(stream.Context())
		s.oneClient = s.KeepsOneClient(strings.Join(header.Get("user-agent"), ""))
		close(s.began)
		context.AfterFunc(stream.Context(), func() { s.end(errStreamEnded) })
	})
	var sent *pluginapi.ListAndWatchResponse
	repeated := s.again.Value()
	for {
		view, changed := s.list.views.Latest()
		repeat, again := s.again.Latest()
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
			return status.Error(codes.Unavailable, "this socket is being closed; the plugin registers again if it stays")
		case <-changed:
		}
	}
}

// streamed reports whether kubelet's stream has begun.
func (s *service) streamed() bool {
	select {
	case <-s.began:
		return true
	default:
		return false
	}
}

// Allocate says what each container of the request gets for its devices.
func (s *service) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (response *pluginapi.AllocateResponse, err error) {
	view := s.allocating(request)
	var ids []string
	for _, container := range request.GetContainerRequests() {
		ids = append(ids, container.GetDevicesIds()...)
	}
	if !view.withholds(ids) {
		err := s.forward(ctx, view, [][]string{ids}, func(ctx context.Context,
			earlier pluginapi.DevicePluginClient) (err error) {
			response, err = earlier.Allocate(ctx, request)
			return err
		})
		if err == nil {
			return response, nil
		}
		// the earlier server knows the devices, and says why it does not give them
		if status.Code(err) == codes.FailedPrecondition {
			return nil, err
		}
	}
	if len(request.GetContainerRequests()) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: the request names no container", s.list.name)
	}
	response = &pluginapi.AllocateResponse{
		ContainerResponses: make([]*pluginapi.ContainerAllocateResponse, 0, len(request.GetContainerRequests())),
	}
	for _, container := range request.GetContainerRequests() {
		devices, err := view.lookUp(container.GetDevicesIds())
		if err != nil {
			return nil, status.Errorf(status.Code(err), "allocate %s: %s", s.list.name, status.Convert(err).Message())
		}
		if err := s.mayGive(devices); err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: %v", s.list.name, err)
		}
		e, err := containeredits.For(devices, view.options.Edits)
		if err != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: %v", s.list.name, err)
		}
		if view.resource.InUnits() { // for the receipt: kubelet keeps the answer as long as the container
			e.Annotations = maps.Clone(e.Annotations)
			if e.Annotations == nil {
				e.Annotations = map[string]string{}
			}
			e.Annotations[containeredits.AllocatedKey] = s.Clock.Now().UTC().Format(time.RFC3339)
		}
		response.ContainerResponses = append(response.ContainerResponses, answer(e))
		s.log.V(2).Info("Allocated", "devices", container.GetDevicesIds())
	}
	s.used.Store(true)
	return response, nil
}

// mayGive returns why the GPUs of these devices must not be given to a pod now; nil if they may.
func (s *service) mayGive(devices []resource.Device) error {
	if s.MayGive == nil {
		return nil
	}
	return s.MayGive(devices)
}

// forward makes a call about devices that are none of the plan's to the earlier server that listed
// them. Kubelet makes such a call when it chose the devices just before it received our first list.
// The IDs are by container. The error is fs.ErrNotExist if the call is not for that server.
func (s *service) forward(
	ctx context.Context, v *view, ids [][]string, call func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	asked := 0
	for _, container := range ids {
		if slices.ContainsFunc(container, func(id string) bool { return !v.resource.Lacks(id) }) {
			return fs.ErrNotExist
		}
		asked += len(container)
	}
	if asked == 0 {
		return fs.ErrNotExist
	}
	err := s.Registrar.CallEarlier(ctx, s.list.name, call)
	if err == nil {
		s.log.V(2).Info("Forwarded a call to the process that listed the devices", "devices", ids)
	}
	return err
}

// withholds reports whether one of the devices left the plan and must not be given to a pod, by no
// process.
func (v *view) withholds(ids []string) bool {
	return slices.ContainsFunc(ids, func(id string) bool {
		d, departing := v.departing[id]
		return !departing || !d.device.Healthy
	})
}

// lookUp returns the devices of the given IDs, or a status that says which ID is wrong and why.
func (v *view) lookUp(ids []string) ([]resource.Device, error) {
	switch {
	case len(ids) == 0:
		return nil, status.Error(codes.InvalidArgument, "a container asks for no device")
	case v.refusal != "":
		return nil, status.Error(codes.FailedPrecondition, v.refusal)
	}
	devices := make([]resource.Device, 0, len(ids))
	seen := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		device, known := v.resource.Device(id)
		if !known {
			device, known = v.left(id)
		}
		if !known {
			return nil, v.unknown(id)
		}
		if !device.Healthy {
			return nil, status.Errorf(codes.FailedPrecondition, "device %s is not healthy: %s", id, device.Reason)
		}
		if _, twice := seen[id]; twice {
			return nil, status.Errorf(codes.InvalidArgument, "device %s is asked for twice", id)
		}
		seen[id] = struct{}{}
		devices = append(devices, device)
	}
	if err := v.resource.Admit(devices); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return devices, nil
}

// left returns a device that left the plan, as a pod is given it; false if no pod is.
func (v *view) left(id string) (resource.Device, bool) {
	d, departing := v.departing[id]
	switch {
	case !departing || !d.device.Healthy:
		return d.device, false
	case resource.UnitMiB(v.resource.Name) > 0:
		return v.asPlanned(d.device)
	}
	return d.device, true
}

// asPlanned returns a unit that left the plan as the units of its GPU are now. It is false if the
// GPU is not in these units any more: nothing may hold the limit then.
func (v *view) asPlanned(left resource.Device) (resource.Device, bool) {
	i := slices.IndexFunc(v.resource.Devices, func(d resource.Device) bool { return d.UUID == left.UUID })
	if i < 0 {
		return left, false
	}
	unit := v.resource.Devices[i]
	unit.ID = left.ID
	return unit, true
}

// given returns a device that a pod may have been given: of the plan, or one that left it since.
func (v *view) given(id string) (resource.Device, bool) {
	if device, planned := v.resource.Device(id); planned {
		return device, true
	}
	d, departing := v.departing[id]
	return d.device, departing
}

// maxShown bounds what an error tells of an ID that is not known, in bytes.
const maxShown = 200

// unknown returns why a device that is not of the plan is not given out.
func (v *view) unknown(id string) error {
	if id == "" {
		return status.Error(codes.InvalidArgument, "a container asks for a device with an empty ID")
	}
	if d, departing := v.departing[id]; departing {
		return status.Errorf(codes.FailedPrecondition, "device %s cannot be given out: %s", id,
			cmp.Or(d.device.Reason, d.reason))
	}
	if len(id) > maxShown { // gRPC keeps as much memory for each connection as the longest error took
		id = strings.ToValidUTF8(id[:maxShown], "") + fmt.Sprintf("... (%d bytes)", len(id))
	}
	// The words of NVIDIA's plugin, for which people's alerts may look.
	return status.Errorf(codes.NotFound, "invalid allocation request for %q: invalid request: unknown device: %s",
		v.resource.Name, id)
}

// GetPreferredAllocation says which of the available devices a container is best given. An error
// would fail the pod, so there is one only where no answer can be right.
func (s *service) GetPreferredAllocation(ctx context.Context, request *pluginapi.PreferredAllocationRequest) (
	response *pluginapi.PreferredAllocationResponse, err error,
) {
	view := s.list.views.Value()
	var available [][]string
	for _, container := range request.GetContainerRequests() {
		available = append(available, container.GetAvailableDeviceIDs())
	}
	if s.forward(ctx, view, available, func(ctx context.Context, earlier pluginapi.DevicePluginClient) error {
		response, err = earlier.GetPreferredAllocation(ctx, request)
		return err
	}) == nil {
		return response, nil
	}
	response = &pluginapi.PreferredAllocationResponse{}
	for _, container := range request.GetContainerRequests() {
		ids, err := view.prefer(container.GetAvailableDeviceIDs(), container.GetMustIncludeDeviceIDs(),
			int(container.GetAllocationSize()))
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "prefer devices of %s: %v", s.list.name, err)
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// prefer returns which `size` of the available devices a container is best given. Devices that are
// not of the plan come last: they left it, or kubelet chose among them in the moment before it
// received the list. Also one that must be included is no error: kubelet would refuse the pod for
// good. The Allocate that follows decides, and names an ID that it does not know.
func (v *view) prefer(available, required []string, size int) ([]string, error) {
	if v.resource.InUnits() {
		return v.resource.Prefer(available, required, size) // those that left are of one GPU with the others, or not given
	}
	must, others := v.split(required)
	wanted := max(0, size-len(others))
	ids, err := v.resource.Prefer(available, must, wanted)
	if known, few := resource.TooFew(err); few { // asked last: there may be thousands of replicas
		_, unknown := v.split(available)
		unknown = slices.DeleteFunc(unknown, func(id string) bool { return slices.Contains(others, id) })
		if missing := wanted - known; missing <= len(unknown) {
			others = append(others, unknown[:missing]...)
			ids, err = v.resource.Prefer(available, must, known)
		}
	}
	return append(ids, others...), err
}

// split returns which of the IDs are of the plan, and the others, sorted.
func (v *view) split(ids []string) (planned, others []string) {
	for _, id := range ids {
		if v.resource.Lacks(id) {
			others = append(others, id)
		} else {
			planned = append(planned, id)
		}
	}
	slices.Sort(others)
	return planned, slices.Compact(others)
}

// inspectTimeout bounds an inspection: kubelet itself waits for 30 s, and the container with it.
const inspectTimeout = 5 * time.Second

// PreStartContainer refuses a container whose devices must not be used now. Kubelet calls it for
// containers that start again, too.
func (s *service) PreStartContainer(ctx context.Context, request *pluginapi.PreStartContainerRequest) (
	*pluginapi.PreStartContainerResponse, error,
) {
	if !s.inspect {
		return &pluginapi.PreStartContainerResponse{}, nil
	}
	view := s.list.views.Value()
	devices := make([]resource.Device, 0, len(request.GetDevicesIds()))
	for _, id := range request.GetDevicesIds() {
		device, known := view.given(id)
		if !known {
			return nil, s.refuse(view.unknown(id))
		}
		if device.Sharing == resource.Percentage {
			return &pluginapi.PreStartContainerResponse{}, nil // no GPU is known by it
		}
		devices = append(devices, device)
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	if err := s.Inspector.Inspect(ctx, devices); err != nil {
		return nil, s.refuse(status.Error(codes.FailedPrecondition, err.Error()))
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

// refuse says in the pod's events why its container does not start, and what helps: kubelet tries
// again on the same devices for ever.
func (s *service) refuse(err error) error {
	return status.Errorf(status.Code(err), "start a container on %s: %s; kubelet tries again on the same device for as long as the "+
		"pod is there: delete the pod to get another", s.list.name, status.Convert(err).Message())
}

// answer translates container edits into kubelet's words.
func answer(e containeredits.Edits) *pluginapi.ContainerAllocateResponse {
	response := &pluginapi.ContainerAllocateResponse{Envs: e.Env, Annotations: e.Annotations}
	for _, m := range e.Mounts {
		response.Mounts = append(response.Mounts, &pluginapi.Mount{ContainerPath: m.ContainerPath, HostPath: m.HostPath})
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

// freeMemory gives the memory of large requests back to the system soon after they were answered.
// By itself the runtime keeps it for minutes.
func freeMemory(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	response, err := handle(ctx, request)
	if message, ok := request.(proto.Message); ok && proto.Size(message) > largeRequest {
		time.AfterFunc(time.Second, debug.FreeOSMemory)
	}
	return response, err
}

// noteAllocations tells the accountant of the calls by which kubelet allocates devices.
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

// recoverCalls turns a panic in a call into a status and a log line: one bad request must not end
// the daemon.
func recoverCalls(log klog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (response any,
		err error) {
		defer func() { err = recovered(log, recover(), info.FullMethod, err) }()
		return handle(ctx, request)
	}
}

// recoverStreams does for streams what recoverCalls does for calls.
func recoverStreams(log klog.Logger) grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
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
