package serve

import (
	"io"
	"strings"

	"google.golang.org/grpc/grpclog"
	"k8s.io/klog/v2"
)

// LogGRPC writes the errors that gRPC itself logs to the logger. By default gRPC
// writes them to standard error, which may block and knows no JSON. Call it before
// the first use of gRPC.
func LogGRPC(logger klog.Logger) {
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, grpcErrors{logger}))
}

// grpcErrors logs each line that is written to it.
type grpcErrors struct{ klog.Logger }

func (l grpcErrors) Write(line []byte) (int, error) {
	l.Info("gRPC reports an error", "line", strings.TrimSpace(string(line)))
	return len(line), nil
}
