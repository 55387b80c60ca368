package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// Requests that all nodes of a cluster make together are spread by a random delay. Its limit grows
// with the cluster, so that nodesPerSecond nodes start in a second: a single node waits up to 20
// ms, each of 5,000 nodes up to 100 s.
const (
	nodesPerSecond = 50
	maxSpread      = 5 * time.Minute
	// pagesPerSecond limits the pages of ResourceClaims that all nodes together list in a second. A
	// page costs the API server 12 ms of CPU time.
	pagesPerSecond = 10
	// maxListTime limits the duration of the lists of all nodes together. The GPUs concerned are idle
	// for that long.
	maxListTime = 2 * time.Minute
	// unknownNodes is the assumed number of nodes if they may not be counted.
	unknownNodes = 1000
	// countTimeout limits the wait of the first requests for the number of nodes.
	countTimeout = 15 * time.Second
	// recount is how often the nodes are counted again, plus or minus half.
	recount = 24 * time.Hour
)

// A spread delays the requests of a starting process, so that nodes that start together do not send
// requests together. All tasks share one spread. Create it with newSpread.
//
// The first request waits if all nodes may have started together, or if the number of nodes was
// never known. Otherwise only this process restarted: its requests start at once, and its first
// write waits.
type spread struct {
	stateDir string // empty for none
	boot     string // boot ID of the node; empty if unknown

	// semaphore is held while a task reads or counts, and guards all following fields. Counting waits
	// for the API server.
	semaphore    chan struct{}
	firstRequest time.Time // earliest time of the first request; zero until it is known
	writeFree    bool      // the first write does not wait, because the first request did
	nodes        int       // 0 until counted
}

func newSpread() spread { return spread{semaphore: make(chan struct{}, 1)} }

// lock waits until no other task reads or counts. The caller must call unlock. The error says that
// ctx has ended.
func (s *spread) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case s.semaphore <- struct{}{}:
		return func() { <-s.semaphore }, nil
	}
}

// A counter counts the nodes of the cluster.
type counter interface {
	NodeCount(ctx context.Context) (int, error)
}

// awaitStart waits until the first request may be sent, or ctx ends. It may count the nodes.
func (s *spread) awaitStart(ctx context.Context, c counter) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return
	}
	if s.firstRequest.IsZero() {
		s.firstRequest = time.Now().Add(s.firstDelay(ctx, c))
	}
	wait := time.Until(s.firstRequest)
	unlock()
	select {
	case <-ctx.Done():
	case <-time.After(wait):
	}
}

// firstDelay returns the delay of the first request.
func (s *spread) firstDelay(ctx context.Context, c counter) time.Duration {
	last, err := withTimeout(ctx, s.stateDir, readSize)
	if err != nil {
		klog.FromContext(ctx).Info("Cannot read the saved size of the cluster", "reason", err.Error())
	}
	switch {
	case last != nil:
		s.nodes = last.Nodes
		s.writeFree = s.boot == "" || s.boot != last.Boot
	default:
		s.nodes = countFirst(ctx, c)
		s.writeFree = s.nodes > 0 // with 0 nodes the API server is unavailable, and retries are spread by their backoff
	}
	if !s.writeFree {
		return 0
	}
	limit := spreadLimit(s.nodes)
	klog.FromContext(ctx).V(2).Info("The first requests are spread over the cluster", "nodes", s.nodes, "within",
		limit.String())
	return rand.N(limit)
}

// countFirst counts the nodes before the first request. If the API server is overloaded, it
// retries; without a response it returns 0.
func countFirst(ctx context.Context, c counter) int {
	for failures := 1; ; failures++ {
		limited, cancel := context.WithTimeout(ctx, countTimeout)
		nodes, err := countNodes(limited, c)
		cancel()
		switch {
		case err == nil:
			return nodes
		case !kubeapi.IsBusy(err):
			return 0
		}
		select {
		case <-ctx.Done():
			return 0
		case <-time.After(kubeapi.Backoff(err, failures)):
		}
	}
}

// countNodes returns the number of nodes, or unknownNodes if they may not be counted.
func countNodes(ctx context.Context, c counter) (int, error) {
	nodes, err := c.NodeCount(ctx)
	if kubeapi.IsInaccessible(err) || kubeapi.IsInvalid(err) {
		return unknownNodes, nil
	}
	return max(nodes, 1), err
}

// spreadLimit returns the limit of the delay for a number of nodes.
func spreadLimit(nodes int) time.Duration {
	return min(time.Duration(nodes)*time.Second/nodesPerSecond, maxSpread)
}

// writeLimit returns the limit of the delay before the first write. It returns an error if the
// nodes must be counted and this fails.
func (s *spread) writeLimit(ctx context.Context, c counter) (time.Duration, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if s.writeFree {
		return 0, nil
	}
	err = s.count(ctx, c)
	return spreadLimit(s.nodes), err
}

// awaitWrite waits until the first write may be sent, or ctx ends. It may count the nodes, and
// returns an error if they cannot be counted now.
func (s *spread) awaitWrite(ctx context.Context, c counter) error {
	limit, err := s.writeLimit(ctx, c)
	if err != nil {
		return err
	}
	return wait(ctx, rand.N(limit+1))
}

// pauseRandomly waits for a random time before a request that all nodes make together, or until ctx
// ends.
func (s *spread) pauseRandomly(ctx context.Context, c counter) error {
	nodes, err := s.size(ctx, c)
	if err != nil {
		return err
	}
	return wait(ctx, rand.N(spreadLimit(nodes)))
}

// errTooManyPages is the error of a list that would take too long on all nodes together.
var errTooManyPages = errors.New("the cluster has too many nodes and ResourceClaims for a list of all claims by " +
	"each node")

// pauseForPages waits for a random time before a list of this number of pages, which all nodes
// make, or until ctx ends. It returns errTooManyPages at once if all nodes together need longer
// than maxListTime.
func (s *spread) pauseForPages(ctx context.Context, c counter, pages int) error {
	nodes, err := s.size(ctx, c)
	switch most := int(maxListTime.Seconds()) * pagesPerSecond; {
	case err != nil:
		return err
	case pages <= 1: // covered by the delay before the count
		return nil
	case nodes > most/pages:
		return errTooManyPages
	}
	return wait(ctx, rand.N(time.Duration(nodes*pages)*time.Second/pagesPerSecond))
}

// size returns the number of nodes. It may count them.
func (s *spread) size(ctx context.Context, c counter) (int, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	err = s.count(ctx, c)
	return s.nodes, err
}

// wait returns nil after a time, or the error of ctx.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// count counts the nodes if their number is unknown.
func (s *spread) count(ctx context.Context, c counter) (err error) {
	if s.nodes == 0 {
		s.nodes, err = countNodes(ctx, c)
	}
	if err != nil {
		s.nodes = 0
	}
	return err
}

// maintain saves the size of the cluster for the next process, and counts the nodes from time to
// time, until ctx ends.
func (s *spread) maintain(ctx context.Context, c counter) {
	for failures, expired := 0, false; s.stateDir != ""; {
		unlock, err := s.lock(ctx)
		if err != nil {
			return
		}
		if expired {
			s.nodes = 0
		}
		wait := recount/2 + rand.N(recount)
		if err := s.count(ctx, c); err != nil {
			failures++
			wait = kubeapi.Backoff(err, failures)
		} else {
			failures = 0
			s.save(ctx)
		}
		expired = failures == 0
		unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (s *spread) save(ctx context.Context) {
	size := clusterSize{sizeVersion, s.nodes, s.boot}
	_, err := withTimeout(ctx, s.stateDir, func(dir string) (any, error) {
		return nil, statefile.WriteState(filepath.Join(dir, sizeFile), size)
	})
	if err != nil {
		log := klog.FromContext(ctx)
		log.Info("Cannot save the size of the cluster; it is counted again after a restart of the node",
			"reason", err.Error())
	}
}

// The file with the size of the cluster in the state directory.
const (
	sizeFile    = "cluster.json"
	sizeVersion = 1
	maxSize     = 64 << 10
)

// A clusterSize is the saved number of nodes. The next process needs it before its first request.
type clusterSize struct {
	Version int `json:"version"`
	Nodes   int `json:"nodes"`
	// Boot is the boot ID of the node at that time.
	Boot string `json:"boot"`
}

// readSize returns the size saved in a state directory; nil if there is none.
func readSize(dir string) (*clusterSize, error) {
	if dir == "" {
		return nil, nil
	}
	s := &clusterSize{}
	found, err := statefile.ReadState(filepath.Join(dir, sizeFile), maxSize, sizeVersion, s)
	if err == nil && found && s.Nodes < 1 {
		err = fmt.Errorf("its number of nodes is %d", s.Nodes)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", sizeFile, err)
	case !found:
		return nil, nil
	}
	return s, nil
}
