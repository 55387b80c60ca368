package draplugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// answerTimeout limits a call: the kubelet waits for 45 s.
const answerTimeout = 40 * time.Second

// A service answers the kubelet's DRA manager.
type service struct {
	drav1.UnsafeDRAPluginServer
	*Plugin
	log klog.Logger
}

// NodePrepareResources prepares claims concurrently. The error of a claim is part of its answer and
// does not affect the other claims.
func (s *service) NodePrepareResources(
	ctx context.Context, request *drav1.NodePrepareResourcesRequest,
) (*drav1.NodePrepareResourcesResponse, error) {
	answers := answerEach(ctx, s, "NodePrepareResources", request.GetClaims(), s.prepare)
	response := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for uid, a := range answers {
		response.Claims[uid] = &drav1.NodePrepareResourceResponse{Devices: a.devices, Error: message(a.err)}
	}
	return response, nil
}

// NodeUnprepareResources does the same for claims that no pod uses any more.
func (s *service) NodeUnprepareResources(
	ctx context.Context, request *drav1.NodeUnprepareResourcesRequest,
) (*drav1.NodeUnprepareResourcesResponse, error) {
	answers := answerEach(ctx, s, "NodeUnprepareResources", request.GetClaims(), s.unprepare)
	response := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for uid, a := range answers {
		response.Claims[uid] = &drav1.NodeUnprepareResourceResponse{Error: message(a.err)}
	}
	return response, nil
}

// message returns the text of an error, which may quote the driver or the API server, as UTF-8:
// gRPC rejects any other text.
func message(err error) string {
	if err == nil {
		return ""
	}
	return strings.ToValidUTF8(err.Error(), "\uFFFD")
}

// unprepare releases a claim, or forwards the call to the leader.
func (s *service) unprepare(ctx context.Context, c *drav1.Claim) ([]*drav1.Device, error) {
	return s.callLeader(ctx, func(ctx context.Context) ([]*drav1.Device, error) {
		return nil, s.o.Claims.Unprepare(ctx, c.GetUid(), c.GetNamespace(), c.GetName())
	}, func(ctx context.Context, other drav1.DRAPluginClient) ([]*drav1.Device, error) {
		answers, err := other.NodeUnprepareResources(ctx,
			&drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{c}})
		return devicesOf(&drav1.NodePrepareResourceResponse{Error: answers.GetClaims()[c.GetUid()].GetError()}, err)
	})
}

// prepare prepares a claim, or forwards the call to the leader.
func (s *service) prepare(ctx context.Context, c *drav1.Claim) ([]*drav1.Device, error) {
	return s.callLeader(ctx, func(ctx context.Context) ([]*drav1.Device, error) {
		return s.prepareHere(ctx, c)
	}, func(ctx context.Context, other drav1.DRAPluginClient) ([]*drav1.Device, error) {
		answers, err := other.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{c}})
		return devicesOf(answers.GetClaims()[c.GetUid()], err)
	})
}

// prepareHere reads a claim and prepares it.
func (s *service) prepareHere(ctx context.Context, c *drav1.Claim) ([]*drav1.Device, error) {
	prepared, err := s.o.Claims.Prepare(ctx, c.GetUid(), func(ctx context.Context) (dra.Claim, error) {
		return s.o.Reader.Claim(ctx, c.GetNamespace(), c.GetName())
	})
	if err != nil {
		return nil, err
	}
	devices := make([]*drav1.Device, len(prepared))
	for i, p := range prepared {
		devices[i] = &drav1.Device{RequestNames: p.Requests, PoolName: p.Pool, DeviceName: p.Device,
			CdiDeviceIds: p.CDIDeviceIDs}
		if p.ShareID != "" {
			devices[i].ShareId = &p.ShareID
		}
	}
	return devices, nil
}

// A claimResult is the answer for a claim of a call.
type claimResult struct {
	devices []*drav1.Device
	err     error
	took    time.Duration
}

// answerEach calls do for each claim of a call. It returns the answers by UID when all are complete
// or the time for the call is over. Unfinished work continues.
func answerEach(
	ctx context.Context, s *service, method string, claims []*drav1.Claim, do func(context.Context,
		*drav1.Claim) ([]*drav1.Device, error),
) map[string]claimResult {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, fmt.Errorf("it has not ended within %v", answerTimeout))
	defer cancel()
	began := s.o.Clock.Now()
	pending := make([]chan claimResult, len(claims))
	for i, c := range claims {
		pending[i] = make(chan claimResult, 1)
		go func() {
			a := s.answerOne(ctx, c, do)
			a.took = s.o.Clock.Since(began)
			pending[i] <- a
		}()
	}
	answers := map[string]claimResult{}
	for i, c := range claims {
		a := await(ctx, pending[i])
		answers[c.GetUid()] = a
		log := s.log.WithValues("claim", c.GetNamespace()+"/"+c.GetName(), "uid", c.GetUid(), "call", method)
		switch {
		case isNotLead(a.err): // the forwarding process retries soon, and reports if nobody answers
		case a.err != nil:
			log.Info("A call for a claim failed; the kubelet retries it", "reason", a.err.Error())
		default:
			log.V(2).Info("Answered a call for a claim", "took", a.took.Round(time.Millisecond).String())
		}
	}
	return answers
}

// await returns an answer, even after the end of ctx if the answer is ready.
func await(ctx context.Context, pending <-chan claimResult) claimResult {
	select {
	case a := <-pending:
		return a
	case <-ctx.Done():
	}
	select {
	case a := <-pending:
		return a
	default:
		return claimResult{err: context.Cause(ctx)}
	}
}

// answerOne calls do for one claim.
func (s *service) answerOne(
	ctx context.Context, c *drav1.Claim, do func(context.Context, *drav1.Claim) ([]*drav1.Device, error),
) (a claimResult) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error(fmt.Errorf("%v", r), "A call for a claim panicked", "uid", c.GetUid())
			a = claimResult{err: errors.New("the driver failed; its log has the reason")}
		}
	}()
	devices, err := do(ctx, c)
	return claimResult{devices: devices, err: err}
}
