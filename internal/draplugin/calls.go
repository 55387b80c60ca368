package draplugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
)

// answerTimeout limits a call: kubelet waits for 45 s.
const answerTimeout = 40 * time.Second

// A service answers kubelet's DRA manager.
type service struct {
	drav1.UnsafeDRAPluginServer
	*Plugin
	log klog.Logger
}

// NodePrepareResources prepares claims, side by side. The error of one is in its answer, and is nothing to the others.
func (s *service) NodePrepareResources(
	ctx context.Context, request *drav1.NodePrepareResourcesRequest,
) (*drav1.NodePrepareResourcesResponse, error) {
	answers := each(ctx, s, "NodePrepareResources", request.GetClaims(), s.prepare)
	response := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for uid, a := range answers {
		response.Claims[uid] = &drav1.NodePrepareResourceResponse{Devices: a.devices, Error: message(a.err)}
	}
	return response, nil
}

// NodeUnprepareResources is the same for claims that no pod uses any more.
func (s *service) NodeUnprepareResources(
	ctx context.Context, request *drav1.NodeUnprepareResourcesRequest,
) (*drav1.NodeUnprepareResourcesResponse, error) {
	answers := each(ctx, s, "NodeUnprepareResources", request.GetClaims(), func(ctx context.Context, c *drav1.Claim) ([]*drav1.Device, error) {
		return nil, s.o.Claims.Unprepare(ctx, c.GetUid(), c.GetNamespace(), c.GetName())
	})
	response := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for uid, a := range answers {
		response.Claims[uid] = &drav1.NodeUnprepareResourceResponse{Error: message(a.err)}
	}
	return response, nil
}

// message returns the text of an error, which may quote the driver or the API server. gRPC sends no text that is not UTF-8.
func message(err error) string {
	if err == nil {
		return ""
	}
	return strings.ToValidUTF8(err.Error(), "\uFFFD")
}

// prepare reads a claim and prepares it.
func (s *service) prepare(ctx context.Context, c *drav1.Claim) ([]*drav1.Device, error) {
	claim, err := s.o.Reader.Claim(ctx, c.GetNamespace(), c.GetName())
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the claim: %w", err)
	case claim.UID != c.GetUid():
		return nil, fmt.Errorf("the claim was deleted and made again: its UID is %s, and not %s", claim.UID, c.GetUid())
	case len(claim.Results) == 0:
		return nil, errors.New("no device of this driver is allocated to the claim")
	}
	prepared, err := s.o.Claims.Prepare(ctx, claim)
	if err != nil {
		return nil, err
	}
	devices := make([]*drav1.Device, len(prepared))
	for i, p := range prepared {
		devices[i] = &drav1.Device{RequestNames: p.Requests, PoolName: p.Pool, DeviceName: p.Device, CdiDeviceIds: p.CDIDeviceIDs}
		if p.ShareID != "" {
			devices[i].ShareId = &p.ShareID
		}
	}
	return devices, nil
}

// An answer is what came of one claim.
type answer struct {
	devices []*drav1.Device
	err     error
	took    time.Duration
}

// each does something for each claim of a call, and returns the answers by UID when all are there, or when the time for the call is over.
// What is not done then goes on: until it has ended, a further call for the claim waits for it.
func each(
	ctx context.Context, s *service, method string, claims []*drav1.Claim, do func(context.Context, *drav1.Claim) ([]*drav1.Device, error),
) map[string]answer {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, fmt.Errorf("it has not ended within %v", answerTimeout))
	defer cancel()
	began := s.o.Clock.Now()
	pending := make([]chan answer, len(claims))
	for i, c := range claims {
		pending[i] = make(chan answer, 1)
		go func() {
			a := s.one(ctx, c, do)
			a.took = s.o.Clock.Since(began)
			pending[i] <- a
		}()
	}
	answers := map[string]answer{}
	for i, c := range claims {
		a := await(ctx, pending[i])
		answers[c.GetUid()] = a
		log := s.log.WithValues("claim", c.GetNamespace()+"/"+c.GetName(), "uid", c.GetUid(), "call", method)
		if a.err != nil {
			log.Info("A call for a claim failed; kubelet makes it again", "reason", a.err.Error())
		} else {
			log.V(2).Info("Answered a call for a claim", "took", a.took.Round(time.Millisecond).String())
		}
	}
	return answers
}

// await returns an answer: also after the end of ctx, if it is there then.
func await(ctx context.Context, pending <-chan answer) answer {
	select {
	case a := <-pending:
		return a
	case <-ctx.Done():
	}
	select {
	case a := <-pending:
		return a
	default:
		return answer{err: context.Cause(ctx)}
	}
}

// one does something for one claim, as soon as nothing else is done for it.
func (s *service) one(
	ctx context.Context, c *drav1.Claim, do func(context.Context, *drav1.Claim) ([]*drav1.Device, error),
) (a answer) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error(fmt.Errorf("%v", r), "A call for a claim panicked", "uid", c.GetUid())
			a = answer{err: errors.New("the driver failed; its log has the reason")}
		}
	}()
	unlock, err := s.locks.lock(ctx, c.GetUid())
	if err != nil {
		return answer{err: fmt.Errorf("wait for the end of an earlier call for the claim: %w", err)}
	}
	defer unlock()
	devices, err := do(ctx, c)
	return answer{devices: devices, err: err}
}

// locks are one for each claim that something is done for. The zero value is ready for use.
type locks struct {
	mu   sync.Mutex // guards held
	held map[string]*claimLock
}

// A claimLock is that of one claim.
type claimLock struct {
	token chan struct{} // holds a value while nobody has the lock
	users int           // who have it or wait for it
}

// lock takes the lock of a claim, and returns what gives it back. An error says that ctx ended.
func (l *locks) lock(ctx context.Context, uid string) (unlock func(), err error) {
	l.mu.Lock()
	if l.held == nil {
		l.held = map[string]*claimLock{}
	}
	c := l.held[uid]
	if c == nil {
		c = &claimLock{token: make(chan struct{}, 1)}
		c.token <- struct{}{}
		l.held[uid] = c
	}
	c.users++
	l.mu.Unlock()
	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if c.users--; c.users == 0 {
			delete(l.held, uid)
		}
	}
	select {
	case <-c.token:
		return func() { c.token <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
