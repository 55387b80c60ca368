package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"
)

// maxPodResources bounds one answer of PodResources, in bytes: gRPC's own 4 MiB are too few for a large node.
const maxPodResources = 16 << 20

// reconnect is the pace at which a kubelet that went away is looked for. gRPC's own pace ends at two minutes, far beyond
// the time a kubelet takes to restart.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}

// PodResources is a client of kubelet's account of the node's devices. It connects when it is first asked, and again
// when kubelet came back.
type PodResources struct {
	socket            string
	allocatable, held question

	mu     sync.Mutex // guards all following fields
	client podresources.PodResourcesListerClient
	conn   *grpc.ClientConn
}

// NewPodResources returns a client of the PodResources service at the given socket. Where that is empty, every question
// is answered with an error. A nil clock means the real one.
func NewPodResources(socket string, c clock.PassiveClock) *PodResources {
	if c == nil {
		c = clock.RealClock{}
	}
	return &PodResources{socket: socket, allocatable: newQuestion(c), held: newQuestion(c)}
}

// Close gives the connection back.
func (p *PodResources) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn, p.client = nil, nil
	return err
}

// Allocatable returns, for each resource, the IDs of the devices that kubelet would give to pods or has given: those it
// holds for healthy.
func (p *PodResources) Allocatable(ctx context.Context) (map[string][]string, error) {
	return p.allocatable.ask(ctx, func() (map[string][]string, error) {
		client, err := p.connect()
		if err != nil {
			return nil, err
		}
		answer, err := client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask kubelet for allocatable devices: %w", err)
		}
		ids := map[string][]string{}
		add(ids, answer.GetDevices())
		return ids, nil
	})
}

// Held returns, for each resource, the IDs of the devices that a pod holds.
func (p *PodResources) Held(ctx context.Context) (map[string][]string, error) {
	return p.held.ask(ctx, func() (map[string][]string, error) {
		client, err := p.connect()
		if err != nil {
			return nil, err
		}
		answer, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask kubelet for the devices of pods: %w", err)
		}
		ids := map[string][]string{}
		for _, pod := range answer.GetPodResources() {
			for _, container := range pod.GetContainers() {
				add(ids, container.GetDevices())
			}
		}
		return ids, nil
	})
}

// freshFor is how long an answer serves all who ask: the servers of many resources ask at the same moments, and kubelet
// refuses more than ten questions at once.
const freshFor = 20 * time.Millisecond

// A question is one of kubelet's account, put once for all who ask at about the same time.
type question struct {
	clock    clock.PassiveClock
	turn     chan struct{} // holds a token while somebody asks; guards all following fields
	answered time.Time
	ids      map[string][]string
}

func newQuestion(c clock.PassiveClock) question {
	return question{clock: c, turn: make(chan struct{}, 1)}
}

// ask returns an answer of its own to each caller.
func (q *question) ask(ctx context.Context, put func() (map[string][]string, error)) (map[string][]string, error) {
	select {
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("ask kubelet for its account: %w", ctx.Err())
	}
	if q.clock.Since(q.answered) > freshFor {
		ids, err := put()
		if err != nil {
			return nil, err
		}
		q.ids, q.answered = ids, q.clock.Now()
	}
	own := make(map[string][]string, len(q.ids))
	for resource, ids := range q.ids {
		own[resource] = slices.Clone(ids)
	}
	return own, nil
}

// add adds devices to ids: kubelet lists a resource once for each NUMA node, or once for each device.
func add(ids map[string][]string, devices []*podresources.ContainerDevices) {
	for _, d := range devices {
		ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
	}
}

func (p *PodResources) connect() (podresources.PodResourcesListerClient, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client != nil {
		return p.client, nil
	}
	if p.socket == "" {
		return nil, errors.New("kubelet's account is not asked for: --pod-resources-socket is empty")
	}
	conn, err := grpc.NewClient("passthrough:///kubelet",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", p.socket) // as a URL a path with % is another one
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: reconnect.MaxDelay}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPodResources)))
	if err != nil {
		return nil, fmt.Errorf("use PodResources socket %s: %w", p.socket, err)
	}
	p.conn, p.client = conn, podresources.NewPodResourcesListerClient(conn)
	return p.client, nil
}
