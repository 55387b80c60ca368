package plugin

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2/ktesting"
)

func TestAPanicEndsTheCallAlone(t *testing.T) {
	log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	_, err := recoverCalls(log)(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/Allocate"},
		func(context.Context, any) (any, error) { panic("index out of range") })
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "/Allocate") {
		t.Errorf("a call that panics returns %v, want Internal", err)
	}
	err = recoverStreams(log)(nil, nil, &grpc.StreamServerInfo{FullMethod: "/ListAndWatch"},
		func(any, grpc.ServerStream) error { panic("index out of range") })
	if status.Code(err) != codes.Internal {
		t.Errorf("a stream that panics returns %v, want Internal", err)
	}
	logged := log.GetSink().(ktesting.Underlier).GetBuffer().String()
	if !strings.Contains(logged, "index out of range") || !strings.Contains(logged, "service_internal_test.go") {
		t.Errorf("the log has no cause and stack:\n%s", logged)
	}
}
