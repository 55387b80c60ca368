package nvsentinel

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A Process is a platform connector that a test starts and ends: a Receiver, or the real program.
type Process interface {
	// Start starts a process with a new socket and without events. An earlier one is killed.
	Start()
	// Kill ends the process at once.
	Kill()
	// Stop ends the process by SIGTERM.
	Stop()
	// Received returns the events of the present process, as Receiver.Received does.
	Received() []string
}

const (
	service = "/datamodels.PlatformConnector/"
	method  = service + "HealthEventOccurredV1"
)

// event returns an event in JSON, with fields beside those that all events of this program have.
func event(fields string) string {
	return `{"version": 1, "agent": "gpu-device-plugin", "componentClass": "GPU", "checkName": "GpuDevicePluginHealth",
		"message": "m", "generatedTimestamp": "2026-11-28T12:00:00Z", ` + fields + `}`
}

// fault and healthy are the fields of events of one GPU.
const (
	fault = `"isFatal": true, "recommendedAction": 2, "errorCode": ["48"],
		"entitiesImpacted": [{"entityType": "GPU_UUID", "entityValue": "GPU-0"},
			{"entityType": "PCI", "entityValue": "0000:00:00.0"}]`
	healthy = `"isHealthy": true, "entitiesImpacted": [{"entityType": "GPU_UUID", "entityValue": "GPU-1"}]`
	here    = `, "nodeName": "node-1"`
	store   = `, "processingStrategy": 2`
	execute = `, "processingStrategy": 1`
)

// cases are calls, and what the connector answers and receives.
var cases = []struct {
	name   string
	events []string // in JSON
	code   codes.Code
	want   []string
}{
	{"no event", nil, codes.OK, nil},
	{
		"a fault and a recovery", []string{event(fault + here + execute), event(healthy + here + store)}, codes.OK,
		[]string{"execute action 2 XID 48 GPU_UUID=GPU-0 PCI=0000:00:00.0", "store healthy GPU_UUID=GPU-1"},
	},
	{
		"the same event twice", []string{event(fault + here + store), event(fault + here + store)}, codes.OK,
		[]string{
			"store action 2 XID 48 GPU_UUID=GPU-0 PCI=0000:00:00.0", "store action 2 XID 48 GPU_UUID=GPU-0 PCI=0000:00:00.0",
		},
	},
	{
		"no strategy is the one that acts", []string{event(healthy + here)}, codes.OK,
		[]string{"execute healthy GPU_UUID=GPU-1"},
	},
	{"no node is this one", []string{event(healthy + store)}, codes.OK, []string{"store healthy GPU_UUID=GPU-1"}},
	{
		"an event of another node refuses its batch",
		[]string{event(healthy + here + store), event(fault + store + `, "nodeName": "node-2"`)}, codes.PermissionDenied, nil,
	},
	{
		"a batch that is too large",
		[]string{event(healthy + here + `, "errorCode": ["` + strings.Repeat("x", 5<<20) + `"]`)},
		codes.ResourceExhausted, nil,
	},
}

// Check holds a platform connector for the node Node to the contract: its answers, the events that it
// receives, and its socket over the life of its processes.
func Check(t *testing.T, socket string, p Process) {
	t.Helper()
	p.Start()
	for _, c := range cases {
		batch := dynamicpb.NewMessage(contract(t))
		text := `{"version": 1, "events": [` + strings.Join(c.events, ", ") + `]}`
		if err := protojson.Unmarshal([]byte(text), batch); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		before := len(p.Received())
		if got := call(t, socket, method, batch); got != c.code {
			t.Errorf("%s: the answer is %v, want %v", c.name, got, c.code)
		}
		if diff := cmp.Diff(append([]string{}, c.want...), p.Received()[before:]); diff != "" {
			t.Errorf("%s: received (-want +got):\n%s", c.name, diff)
		}
	}
	if got := call(t, socket, method, undecodable{}); got != codes.Internal {
		t.Errorf("a message that is no batch: the answer is %v, want %v", got, codes.Internal)
	}
	if got := call(t, socket, service+"HealthEventOccurredV9", &emptypb.Empty{}); got != codes.Unimplemented {
		t.Errorf("another method: the answer is %v, want %v", got, codes.Unimplemented)
	}

	first := identity(t, socket)
	p.Kill()
	if got := identity(t, socket); got != first {
		t.Errorf("the socket of a killed process is %s and was %s", got, first)
	}
	if got := call(t, socket, method, &emptypb.Empty{}); got != codes.Unavailable {
		t.Errorf("the answer of a killed process is %v, want %v", got, codes.Unavailable)
	}
	p.Start()
	second := identity(t, socket)
	if second == first || len(p.Received()) != 0 {
		t.Errorf("a new process has the socket %s and received %q; the earlier one had %s", second, p.Received(), first)
	}
	p.Stop()
	poll.Until(t, "the socket is gone", func() bool {
		_, err := os.Stat(socket)
		return errors.Is(err, os.ErrNotExist)
	})
	p.Start()
	if third := identity(t, socket); third == first || third == second {
		t.Errorf("the processes have the sockets %s, %s and %s", first, second, third)
	}
}

// identity returns what a socket is known by: its inode, and when that changed.
func identity(t *testing.T, socket string) string {
	t.Helper()
	info, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode().Type() != os.ModeSocket {
		t.Fatalf("%s is no socket", socket)
	}
	return fmt.Sprintf("%d of %s", stat.Ino, time.Unix(stat.Ctim.Unix()).Format(time.RFC3339Nano))
}

// call calls a method by a connection of its own, and returns the code of the answer.
func call(t *testing.T, socket, method string, message any) codes.Code {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var options []grpc.CallOption
	if _, is := message.(undecodable); is {
		options = append(options, grpc.ForceCodec(undecodable{}))
	}
	return status.Code(conn.Invoke(t.Context(), method, message, &emptypb.Empty{}, options...))
}

// undecodable is a message that no receiver can decode, and its codec.
type undecodable struct{}

func (undecodable) Marshal(any) ([]byte, error) { return []byte("no batch"), nil }
func (undecodable) Unmarshal([]byte, any) error { return nil }
func (undecodable) Name() string                { return proto.Name }

// Logged returns the events that the real connector wrote to its log, in the words of Received.
func Logged(t testing.TB, log []byte) []string {
	t.Helper()
	all := []string{}
	for line := range strings.Lines(string(log)) {
		var entry struct {
			Msg    string
			Events json.RawMessage
		}
		if json.Unmarshal([]byte(line), &entry) != nil || entry.Msg != "Health events received" {
			continue
		}
		all = append(all, decodeLogged(t, entry.Events)...)
	}
	return all
}

// decodeLogged returns the events of a batch in the log, in words. The log has each time as a number of
// seconds.
func decodeLogged(t testing.TB, text []byte) (all []string) {
	t.Helper()
	var batch struct {
		Version int              `json:"version"`
		Events  []map[string]any `json:"events"`
	}
	if err := json.Unmarshal(text, &batch); err != nil {
		t.Fatal(err)
	}
	for _, e := range batch.Events {
		delete(e, "generatedTimestamp")
	}
	text, err := json.Marshal(batch)
	if err != nil {
		t.Fatal(err)
	}
	decoded := dynamicpb.NewMessage(contract(t))
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, decoded); err != nil {
		t.Fatal(err)
	}
	for _, e := range messages(decoded) {
		all = append(all, inWords(e))
	}
	return all
}
