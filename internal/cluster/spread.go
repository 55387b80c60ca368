package cluster

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// The first write of a process waits a random time, of which the limit grows with the cluster: it is such that writesPerSecond nodes
// write in a second if all begin at once. A cluster of one node waits 10 ms, one of 5,000 nodes 50 s.
const (
	writesPerSecond = 100
	maxSpread       = 5 * time.Minute
	// unknownNodes is the number of nodes where they may not be counted.
	unknownNodes = 1000
)

// A spread is how long the first writes of a process wait at most. The zero value has not counted the nodes. All that write share one.
type spread struct {
	mu    sync.Mutex
	limit time.Duration // 0 before the nodes are counted
}

// A counter counts the nodes of the cluster.
type counter interface {
	NodeCount(ctx context.Context) (int, error)
}

// of returns the limit. It counts the nodes once; it returns an error if they cannot be counted for now.
func (s *spread) of(ctx context.Context, c counter) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.limit > 0 {
		return s.limit, nil
	}
	nodes, err := c.NodeCount(ctx)
	var refused *kubeapi.Refused
	if errors.As(err, &refused) && refused.RetryAfter == 0 && refused.Code < 500 {
		nodes, err = unknownNodes, nil
	}
	if err != nil {
		return 0, err
	}
	s.limit = min(time.Duration(max(nodes, 1))*time.Second/writesPerSecond, maxSpread)
	klog.FromContext(ctx).V(2).Info("The first writes are spread over the cluster", "nodes", nodes, "within", s.limit.String())
	return s.limit, nil
}
