package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/question"
)

// maxPodResources bounds one answer of PodResources, in bytes. The default of gRPC, 4 MiB, is too
// small for a large node: 18 MB were seen.
const maxPodResources = 64 << 20

// reconnect is the pace of reconnecting to a stopped kubelet. The default pause of gRPC grows to
// two minutes, and a restart of the kubelet takes much less.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}

// ErrNoPodResources says that the PodResources service is not available: this process is
// configured without the service, the service's folder is not mounted, as under NVIDIA's
// manifests, or the mounted folder belongs to no kubelet. A stopped kubelet leaves its
// socket in its folder.
var ErrNoPodResources = errors.New("the kubelet is not asked which pods hold devices")

// PodResources is a client of the kubelet's PodResources service. It connects at the first
// question, and again after a restart of the kubelet.
type PodResources struct {
	socket      string
	allocatable *question.Question[map[string][]string]
	containers  *question.Question[listing]
	listings    pace
	connections atomic.Uint64

	mu     sync.Mutex // guards all following fields
	client podresources.PodResourcesListerClient
	conn   *grpc.ClientConn
}

// NewPodResources returns a client of the PodResources service at the given socket. With an empty
// socket, every question returns an error. A nil clock means the real one.
func NewPodResources(socket string, c clock.Clock) *PodResources {
	c = cmp.Or[clock.Clock](c, clock.RealClock{})
	p := &PodResources{socket: socket, listings: pace{clock: c},
		allocatable: question.New[map[string][]string](c, freshFor, nil)}
	p.containers = question.New[listing](c, 0, p.listings.begin)
	return p
}

// Close closes the connection.
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

// Connections returns how often the client has connected to a kubelet. It connects again after a
// restart of the kubelet.
func (p *PodResources) Connections() uint64 { return p.connections.Load() }

// Allocatable returns the IDs of the devices that the kubelet considers Healthy, by resource,
// whether pods hold them or not. The caller owns the answer.
func (p *PodResources) Allocatable(ctx context.Context) (map[string][]string, error) {
	ids, err := p.allocatable.Ask(ctx, func() (map[string][]string, error) {
		client, err := p.connect()
		if err != nil {
			return nil, err
		}
		answer, err := client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask the kubelet for allocatable devices: %w", err)
		}
		ids := map[string][]string{} // the answer has a resource once for each of its devices
		for _, d := range answer.GetDevices() {
			ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
		}
		return ids, nil
	})
	own := make(map[string][]string, len(ids))
	for resource, of := range ids {
		own[resource] = slices.Clone(of)
	}
	return own, err
}

// freshFor is how long an answer about allocatable devices is reused. The servers of many resources
// ask at the same moments, and the kubelet refuses more than ten questions at once.
const freshFor = 20 * time.Millisecond

func (p *PodResources) connect() (podresources.PodResourcesListerClient, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client != nil {
		return p.client, nil
	}
	if p.socket == "" {
		return nil, fmt.Errorf("%w: --pod-resources-socket is empty", ErrNoPodResources)
	}
	if _, err := os.Stat(p.socket); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s does not exist", ErrNoPodResources, p.socket)
	}
	conn, err := grpc.NewClient("passthrough:///kubelet",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(shortenErrors),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			// As part of a URL, a % in the path would be an escape.
			c, err := (&net.Dialer{}).DialContext(ctx, "unix", p.socket)
			if err == nil {
				p.connections.Add(1)
			}
			return c, err
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: reconnect.MaxDelay}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPodResources)))
	if err != nil {
		return nil, fmt.Errorf("use PodResources socket %s: %w", p.socket, err)
	}
	p.conn, p.client = conn, podresources.NewPodResourcesListerClient(conn)
	return p.client, nil
}
