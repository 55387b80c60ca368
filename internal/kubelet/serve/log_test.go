package serve_test

import (
	"strings"
	"testing"

	"google.golang.org/grpc/grpclog"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
)

// TestWhatGRPCLogs: errors of gRPC itself are lines of the daemon's log. It is not parallel,
// because gRPC has one logger.
func TestWhatGRPCLogs(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	serve.LogGRPC(logger)
	grpclog.Error("something broke")
	grpclog.Info("nothing happened")
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if !strings.Contains(log, "something broke") || strings.Contains(log, "nothing happened") {
		t.Errorf("the log has %q, want the error alone", log)
	}
}
