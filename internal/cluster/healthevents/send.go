package healthevents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// method is the full name of the contract's only method.
const method = "/datamodels.PlatformConnector/HealthEventOccurredV1"

// maxReason bounds the text of a refusal, in bytes: it appears in the log.
const maxReason = 500

// instance identifies the process that listens on a socket: each start of a receiver makes a new
// file. The error says why the socket cannot be used.
func instance(socket string) (string, error) {
	info, err := os.Stat(socket)
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%s does not exist", socket)
	}
	if err != nil {
		return "", err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode().Type() != os.ModeSocket {
		return "", fmt.Errorf("%s is not a socket", socket)
	}
	return fmt.Sprintf("%d-%d-%d.%09d", stat.Dev, stat.Ino, stat.Ctim.Sec, stat.Ctim.Nsec), nil
}

// send delivers a message by a connection of its own. On success, the receiver has accepted the
// whole message.
func send(ctx context.Context, socket string, message []byte) error {
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	conn, err := grpc.NewClient("passthrough:///nvsentinel", grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the answer has arrived
	err = conn.Invoke(ctx, method, message, new([]byte), grpc.ForceCodec(bytesCodec{}))
	switch s := status.Convert(err); s.Code() {
	case codes.OK:
		return nil
	case codes.DeadlineExceeded:
		return errors.New("the receiver did not answer in time")
	case codes.Unimplemented:
		return errors.New("the receiver does not serve datamodels.PlatformConnector/HealthEventOccurredV1; it is not " +
			"NVSentinel's platform connector, or an old one")
	default:
		return fmt.Errorf("%s: %.*s", s.Code(), maxReason, s.Message())
	}
}

// bytesCodec passes encoded messages on as they are.
type bytesCodec struct{}

// Marshal implements encoding.Codec for []byte.
func (bytesCodec) Marshal(v any) ([]byte, error) {
	message, ok := v.([]byte)
	if !ok {
		return nil, fmt.Errorf("a message of type %T", v)
	}
	return message, nil
}

// Unmarshal implements encoding.Codec. The only answer of the contract is empty.
func (bytesCodec) Unmarshal([]byte, any) error { return nil }

// Name implements encoding.Codec: the receiver decodes protobuf.
func (bytesCodec) Name() string { return "proto" }
