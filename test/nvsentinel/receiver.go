// Package nvsentinel is a stand-in for NVSentinel's platform connector: a server of the contract on a
// real socket, which decodes the messages independently of the program's own encoding. Check has the
// cases that hold the stand-in to the real connector.
package nvsentinel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Node is the name of the node that events are about.
const Node = "node-1"

// contract describes the messages of NVSentinel's health_event.proto as the receiver has them, with
// the enums as numbers and without the fields that the program does not send.
func contract(t testing.TB) protoreflect.MessageDescriptor {
	t.Helper()
	type kind = descriptorpb.FieldDescriptorProto_Type
	const (
		text    = descriptorpb.FieldDescriptorProto_TYPE_STRING
		number  = descriptorpb.FieldDescriptorProto_TYPE_UINT32
		truth   = descriptorpb.FieldDescriptorProto_TYPE_BOOL
		message = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE
	)
	field := func(name string, n int32, k kind, of string, many bool) *descriptorpb.FieldDescriptorProto {
		label := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
		if many {
			label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED
		}
		f := &descriptorpb.FieldDescriptorProto{Name: new(name), Number: new(n), Type: k.Enum(), Label: label.Enum()}
		if of != "" {
			f.TypeName = new(of)
		}
		return f
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: new("health_event.proto"), Package: new("datamodels"), Syntax: new("proto3"),
		Dependency: []string{"google/protobuf/timestamp.proto"},
		MessageType: []*descriptorpb.DescriptorProto{
			{Name: new("HealthEvents"), Field: []*descriptorpb.FieldDescriptorProto{
				field("version", 1, number, "", false), field("events", 2, message, ".datamodels.HealthEvent", true),
			}},
			{Name: new("Entity"), Field: []*descriptorpb.FieldDescriptorProto{
				field("entityType", 1, text, "", false), field("entityValue", 2, text, "", false),
			}},
			{Name: new("HealthEvent"), Field: []*descriptorpb.FieldDescriptorProto{
				field("version", 1, number, "", false), field("agent", 2, text, "", false),
				field("componentClass", 3, text, "", false), field("checkName", 4, text, "", false),
				field("isFatal", 5, truth, "", false), field("isHealthy", 6, truth, "", false),
				field("message", 7, text, "", false), field("recommendedAction", 8, number, "", false),
				field("errorCode", 9, text, "", true),
				field("entitiesImpacted", 10, message, ".datamodels.Entity", true),
				field("generatedTimestamp", 12, message, ".google.protobuf.Timestamp", false),
				field("nodeName", 13, text, "", false), field("processingStrategy", 16, number, "", false),
			}},
		},
	}, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	_ = timestamppb.File_google_protobuf_timestamp_proto // registers the dependency
	return file.Messages().ByName("HealthEvents")
}

// A Receiver is a server of the contract. Create it with New; its methods are safe for concurrent
// use, except Start, Kill and Stop.
type Receiver struct {
	// Socket is the path of the socket.
	Socket string

	t        testing.TB
	contract protoreflect.MessageDescriptor
	server   *grpc.Server
	serving  sync.WaitGroup

	mu     sync.Mutex // guards the following fields
	events []protoreflect.Message
	fault  func(context.Context) error // called before an answer
	loses  bool                        // accepts, and answers with an error
}

// New returns a Receiver that is not started. It stops at the end of the test.
func New(t testing.TB) *Receiver {
	t.Helper()
	dir, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &Receiver{t: t, Socket: filepath.Join(dir, "s"), contract: contract(t)}
	t.Cleanup(r.Stop)
	return r
}

// Start starts a process of the receiver, with a new socket and without events. An earlier process is
// killed.
func (r *Receiver) Start() {
	r.t.Helper()
	r.Kill()
	if err := os.Remove(r.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		r.t.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.Socket, Net: "unix"})
	if err != nil {
		r.t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	r.server = grpc.NewServer()
	r.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "datamodels.PlatformConnector", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "HealthEventOccurredV1", Handler: r.handle}},
	}, r)
	r.mu.Lock()
	r.events = nil
	r.mu.Unlock()
	server := r.server
	r.serving.Go(func() { _ = server.Serve(listener) })
}

// Kill ends the process at once. Its socket stays, and refuses connections.
func (r *Receiver) Kill() {
	if r.server != nil {
		r.server.Stop()
		r.serving.Wait()
		r.server = nil
	}
}

// Stop ends the process, which removes its socket.
func (r *Receiver) Stop() {
	if r.server == nil {
		return
	}
	r.Kill()
	if err := os.Remove(r.Socket); err != nil {
		r.t.Error(err)
	}
}

// handle is the method of the contract.
//
//nolint:revive // grpc.MethodHandler has this order
func (r *Receiver) handle(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor,
) (any, error) {
	batch := dynamicpb.NewMessage(r.contract)
	if err := decode(batch); err != nil {
		return nil, err
	}
	events := messages(batch)
	for _, e := range events {
		switch get(e, "nodeName").String() {
		case "":
			e.Set(e.Descriptor().Fields().ByName("nodeName"), protoreflect.ValueOfString(Node))
		case Node:
		default: // no event of the batch counts
			return nil, status.Error(codes.PermissionDenied, "an event of another node")
		}
	}
	r.mu.Lock()
	fault, loses := r.fault, r.loses
	r.mu.Unlock()
	if fault != nil {
		if err := fault(ctx); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, events...)
	if loses {
		return nil, status.Error(codes.Unavailable, "the answer is lost")
	}
	return &emptypb.Empty{}, nil
}

// Break makes the receiver faulty: fault is called before each answer and may return an error; nil for
// none. If loses is true, the receiver takes the events and answers with an error.
func (r *Receiver) Break(fault func(context.Context) error, loses bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault, r.loses = fault, loses
}

// Received returns the events of the present process, each in words such as
// "store action 2 XID 48 GPU_UUID=GPU-0 PCI=0000:00:00.0" or "store healthy GPU_UUID=GPU-0 ...". An
// event of another agent, class, check or node than this program's on Node has further words.
func (r *Receiver) Received() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := []string{}
	for _, e := range r.events {
		all = append(all, inWords(e))
	}
	return all
}

// Raw returns the last event as encoded; empty for none.
func (r *Receiver) Raw() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == 0 {
		return ""
	}
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(r.events[len(r.events)-1].Interface())
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}

// Times returns the times of all events.
func (r *Receiver) Times() []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []time.Time
	for _, e := range r.events {
		at := get(e, "generatedTimestamp").Message().Interface()
		text, err := proto.Marshal(at)
		stamp := &timestamppb.Timestamp{}
		if err != nil || proto.Unmarshal(text, stamp) != nil {
			r.t.Fatalf("the time %v", at)
		}
		all = append(all, stamp.AsTime())
	}
	return all
}

// messages returns the events of a batch.
func messages(batch *dynamicpb.Message) (all []protoreflect.Message) {
	list := batch.Get(batch.Descriptor().Fields().ByName("events")).List()
	for i := range list.Len() {
		all = append(all, list.Get(i).Message())
	}
	return all
}

func get(m protoreflect.Message, field protoreflect.Name) protoreflect.Value {
	return m.Get(m.Descriptor().Fields().ByName(field))
}

func number(m protoreflect.Message, field protoreflect.Name) uint64 { return get(m, field).Uint() }

// inWords describes an event, and says what is wrong about a field that all events share.
func inWords(e protoreflect.Message) string {
	strategy := map[uint64]string{0: "execute", 1: "execute", 2: "store"}[number(e, "processingStrategy")]
	words := fmt.Sprintf("%s action %d", strategy, number(e, "recommendedAction"))
	if get(e, "isHealthy").Bool() {
		words = strategy + " healthy"
	}
	codesOf := get(e, "errorCode").List()
	for i := range codesOf.Len() {
		words += " XID " + codesOf.Get(i).String()
	}
	entities := get(e, "entitiesImpacted").List()
	for i := range entities.Len() {
		words += " " + get(entities.Get(i).Message(), "entityType").String() + "=" +
			get(entities.Get(i).Message(), "entityValue").String()
	}
	for field, want := range map[protoreflect.Name]string{
		"agent": "gpu-device-plugin", "componentClass": "GPU", "checkName": "GpuDevicePluginHealth", "nodeName": Node,
	} {
		if got := get(e, field).String(); got != want {
			words += fmt.Sprintf(" %s %q", field, got)
		}
	}
	if get(e, "isFatal").Bool() == get(e, "isHealthy").Bool() || number(e, "version") != 1 ||
		get(e, "message").String() == "" || len(e.GetUnknown()) > 0 {
		words += " malformed"
	}
	return words
}
