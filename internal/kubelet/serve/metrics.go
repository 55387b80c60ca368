package serve

import (
	"context"
	"errors"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// Metrics counts registrations with the kubelet and calls by the kubelet. Its
// methods return at once, and may be called by several goroutines.
type Metrics interface {
	// Registered counts a registration of a resource, and whether the kubelet
	// accepted it.
	Registered(resource string, accepted bool)
	// StreamEnded counts the end of a stream of lists of a resource. The cause is
	// one of Causes.
	StreamEnded(resource, cause string)
	// Answered counts a call, such as Allocate, and the code of its answer, such as
	// OK.
	Answered(method, code string, took time.Duration)
}

// noMetrics counts nothing.
type noMetrics struct{}

func (noMetrics) Registered(string, bool)                {}
func (noMetrics) StreamEnded(string, string)             {}
func (noMetrics) Answered(string, string, time.Duration) {}

// ends are the errors that end a stream, each with its name.
var ends = []struct {
	err  error
	name string
}{
	{errKubeletLeft, "kubelet-restarted"},
	{errSocketRemoved, "socket-removed"},
	{errStreamEnded, "kubelet-ended-stream"},
	{errOptions, "options-changed"},
	{errDisagrees, "account-differs"},
	{errLaterCame, "another-server"},
	{errOtherEnded, "another-server-ended"},
}

// otherEnd is the name of every other end, such as a failing socket.
const otherEnd = "other"

// Causes returns the possible causes for the end of a stream.
func Causes() []string {
	var causes []string
	for _, e := range ends {
		causes = append(causes, e.name)
	}
	return append(causes, otherEnd)
}

func endOf(cause error) string {
	for _, e := range ends {
		if errors.Is(cause, e.err) {
			return e.name
		}
	}
	return otherEnd
}

// countCalls counts calls after all other interceptors.
func countCalls(m Metrics) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		began := time.Now()
		response, err := handle(ctx, request)
		m.Answered(path.Base(info.FullMethod), status.Code(err).String(), time.Since(began))
		return response, err
	}
}
