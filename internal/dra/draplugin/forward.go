package draplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The kubelet calls the driver that registered last: this process, even after the loss of
// the lead, until the new leader registers. This process forwards the calls to the new
// leader, because the kubelet would retry a failed call only after a minute or more.

// forwardPause is the time between two attempts.
const forwardPause = 50 * time.Millisecond

// answersTimeout is how long a process may take to accept a call. The next attempt tries again.
const answersTimeout = time.Second

// forwarded marks a call from another process of this program. Such a call is not forwarded
// again.
const forwarded = "gpu-device-plugin-forwarded"

// errNotLead is the error of a call while no process can answer.
var errNotLead = errors.New("the process of this program that leads on the node now does not answer calls for " +
	"claims yet")

// isNotLead reports whether an error is errNotLead, of this or another process. Another
// process passes only the text.
func isNotLead(err error) bool { return err != nil && err.Error() == errNotLead.Error() }

// leads reports whether this process leads.
func (s *Plugin) leads() bool { return s.o.Leads == nil || s.o.Leads.Value() }

// callLeader calls do if this process leads, and forwards the call otherwise. An error of do
// is ignored if this process has lost or is handing over the lead.
func (s *service) callLeader(
	ctx context.Context, do func(context.Context) ([]*drav1.Device, error),
	elsewhere func(context.Context, drav1.DRAPluginClient) ([]*drav1.Device, error),
) ([]*drav1.Device, error) {
	for {
		if s.leads() {
			devices, err := s.whileLeading(ctx, do)
			if err == nil || ctx.Err() != nil || s.leads() && !errors.Is(err, dra.ErrEnded) {
				return devices, err
			}
		}
		if md, _ := metadata.FromIncomingContext(ctx); len(md.Get(forwarded)) > 0 {
			return nil, errNotLead
		}
		devices, err := s.forward(ctx, elsewhere)
		if !isNotLead(err) {
			return devices, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-s.o.Clock.After(forwardPause):
		}
	}
}

// whileLeading cancels do when this process loses the lead. By then do has finished all work
// that the hand-over waits for.
func (s *service) whileLeading(
	ctx context.Context, do func(context.Context) ([]*drav1.Device, error),
) ([]*drav1.Device, error) {
	if s.o.Leads == nil {
		return do(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		feed.Until(ctx, s.o.Leads, func(leads bool) bool { return !leads })
		cancel()
	}()
	return do(ctx)
}

// forward forwards a call to the leader: it tries the processes with a socket, the latest first.
func (s *service) forward(
	ctx context.Context, call func(context.Context, drav1.DRAPluginClient) ([]*drav1.Device, error),
) ([]*drav1.Device, error) {
	ctx = metadata.AppendToOutgoingContext(ctx, forwarded, "true")
	for _, socket := range s.others() {
		conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		err = errNotLead
		var devices []*drav1.Device
		if answers(ctx, conn) {
			devices, err = call(ctx, drav1.NewDRAPluginClient(conn))
		}
		_ = conn.Close()
		if !isNotLead(err) {
			return devices, err
		}
	}
	return nil, errNotLead
}

// answers reports whether the process at the other end of a connection runs. For a paused
// process, the kernel also accepts connections, but no settings arrive.
func answers(ctx context.Context, conn *grpc.ClientConn) bool {
	ctx, cancel := context.WithTimeout(ctx, answersTimeout)
	defer cancel()
	conn.Connect()
	for {
		switch state := conn.GetState(); {
		case state == connectivity.Ready:
			return true
		case state == connectivity.TransientFailure || !conn.WaitForStateChange(ctx, state):
			return false
		}
	}
}

// others returns the socket paths of the other processes, the latest first.
func (s *service) others() (all []string) {
	entries, _ := os.ReadDir(s.o.RegistryDir) // without the folder there are no sockets
	tokens := map[string]string{}
	for _, e := range entries {
		kind, token, ours := kubelet.ParseSocketName(e.Name())
		if ours && kind == socketKind && token != s.token {
			path := filepath.Join(s.o.RegistryDir, e.Name())
			all, tokens[path] = append(all, path), token
		}
	}
	slices.SortFunc(all, func(a, b string) int { return strings.Compare(tokens[b], tokens[a]) })
	return all
}

// devicesOf returns the answer of another process for one claim.
func devicesOf(a *drav1.NodePrepareResourceResponse, err error) ([]*drav1.Device, error) {
	switch {
	case err != nil:
		return nil, errNotLead // the other process has stopped, and the kubelet's call is still open
	case a.GetError() != "":
		return nil, errors.New(a.GetError())
	}
	return a.GetDevices(), nil
}
