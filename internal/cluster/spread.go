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

// What all nodes of a cluster do at once, each does after a random time. The limit of that time
// grows with the cluster, so that nodesPerSecond do it in a second. One node waits 20 ms, each of
// 5,000 up to 100 s.
const (
	nodesPerSecond = 50
	maxSpread      = 5 * time.Minute
	// pagesPerSecond is how many pages of ResourceClaims all nodes together list in a second. A page
	// costs the API server 12 ms of CPU time.
	pagesPerSecond = 10
	// maxListing is how long the lists of all nodes together may take. The GPUs that they are about
	// are idle for as long.
	maxListing = 2 * time.Minute
	// unknownNodes is the number of nodes where they may not be counted.
	unknownNodes = 1000
	// countPatience is how long the first requests wait for the number of nodes.
	countPatience = 15 * time.Second
	// recount is how often the nodes are counted again, give or take a half.
	recount = 24 * time.Hour
)

// A spread is how the requests of a process that starts are spread, so that nodes that start
// together do not ask together. All tasks share one. Make it with newSpread.
//
// The first request of a process waits where all nodes may have been started, or where the number
// of nodes was never known. Otherwise it is this process that was started again: its requests begin
// at once, and its first write waits.
type spread struct {
	stateDir string // empty for none
	boot     string // boot ID of the node; empty if it is not known

	// one holds a value while a task reads or counts, and guards all following fields. Counting waits
	// for the API server.
	one   chan struct{}
	due   time.Time // when the first request may be made; zero before that is known
	over  bool      // the first write does not wait, because the first request did
	nodes int       // 0 before they are counted
}

func newSpread() spread { return spread{one: make(chan struct{}, 1)} }

// lock waits until no other task reads or counts. The caller calls the function that it returns, or
// gets an error because ctx has ended.
func (s *spread) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case s.one <- struct{}{}:
		return func() { <-s.one }, nil
	}
}

// A counter counts the nodes of the cluster.
type counter interface {
	NodeCount(ctx context.Context) (int, error)
}

// begin waits until the first request may be made, or ctx ends. It may count the nodes.
func (s *spread) begin(ctx context.Context, c counter) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return
	}
	if s.due.IsZero() {
		s.due = time.Now().Add(s.first(ctx, c))
	}
	wait := time.Until(s.due)
	unlock()
	select {
	case <-ctx.Done():
	case <-time.After(wait):
	}
}

// first returns how long the first request waits.
func (s *spread) first(ctx context.Context, c counter) time.Duration {
	last, err := withPatience(ctx, s.stateDir, readSize)
	if err != nil {
		klog.FromContext(ctx).Info("Cannot use the size of the cluster that was known last", "reason", err.Error())
	}
	switch {
	case last != nil:
		s.nodes = last.Nodes
		s.over = s.boot == "" || s.boot != last.Boot
	default:
		s.nodes = countFirst(ctx, c)
		s.over = s.nodes > 0 // else the API server is away, and nodes that wait for it ask it at different times
	}
	if !s.over {
		return 0
	}
	limit := spreadOf(s.nodes)
	klog.FromContext(ctx).V(2).Info("The first requests are spread over the cluster", "nodes", s.nodes, "within",
		limit.String())
	return rand.N(limit)
}

// countFirst counts the nodes before the first request. An API server that has too much to do is
// asked again later; without an answer it returns 0.
func countFirst(ctx context.Context, c counter) int {
	for failures := 1; ; failures++ {
		asking, cancel := context.WithTimeout(ctx, countPatience)
		nodes, err := countNodes(asking, c)
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
		case <-time.After(kubeapi.Pause(err, failures)):
		}
	}
}

// countNodes counts the nodes; where that is not allowed it returns unknownNodes.
func countNodes(ctx context.Context, c counter) (int, error) {
	nodes, err := c.NodeCount(ctx)
	if kubeapi.IsDenied(err) || kubeapi.IsWrong(err) {
		return unknownNodes, nil
	}
	return max(nodes, 1), err
}

// spreadOf returns the limit for so many nodes.
func spreadOf(nodes int) time.Duration {
	return min(time.Duration(nodes)*time.Second/nodesPerSecond, maxSpread)
}

// of returns how long the first write waits at most. It returns an error if that depends on the
// number of nodes, and they cannot be counted for now.
func (s *spread) of(ctx context.Context, c counter) (time.Duration, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if s.over {
		return 0, nil
	}
	err = s.count(ctx, c)
	return spreadOf(s.nodes), err
}

// pause waits a random time, as all nodes do that begin the same at once, or until ctx ends.
func (s *spread) pause(ctx context.Context, c counter) error {
	nodes, err := s.size(ctx, c)
	if err != nil {
		return err
	}
	return wait(ctx, rand.N(spreadOf(nodes)))
}

// errTooManyPages is the error of a list that would take all nodes together too long.
var errTooManyPages = errors.New("the cluster has too many nodes and ResourceClaims for a list of all claims by each node")

// pauseForPages waits a random time before a list of so many pages, which all nodes make, or until
// ctx ends. It returns errTooManyPages at once if all nodes together need longer than maxListing.
func (s *spread) pauseForPages(ctx context.Context, c counter, pages int) error {
	nodes, err := s.size(ctx, c)
	switch most := int(maxListing.Seconds()) * pagesPerSecond; {
	case err != nil:
		return err
	case pages <= 1: // as little as the pause before it is for
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

// count counts the nodes if their number is not known.
func (s *spread) count(ctx context.Context, c counter) (err error) {
	if s.nodes == 0 {
		s.nodes, err = countNodes(ctx, c)
	}
	if err != nil {
		s.nodes = 0
	}
	return err
}

// keep saves the size of the cluster for the next process, and counts the nodes from time to time,
// until ctx ends.
func (s *spread) keep(ctx context.Context, c counter) {
	for failures, old := 0, false; s.stateDir != ""; {
		unlock, err := s.lock(ctx)
		if err != nil {
			return
		}
		if old {
			s.nodes = 0
		}
		wait := recount/2 + rand.N(recount)
		if err := s.count(ctx, c); err != nil {
			failures++
			wait = kubeapi.Pause(err, failures)
		} else {
			failures = 0
			s.save(ctx)
		}
		old = failures == 0
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
	_, err := withPatience(ctx, s.stateDir, func(dir string) (any, error) {
		return nil, statefile.WriteState(filepath.Join(dir, sizeFile), size)
	})
	if err != nil {
		klog.FromContext(ctx).Info("Cannot save the size of the cluster; after a restart of the node it is asked for",
			"reason", err.Error())
	}
}

// The file with the size of the cluster in the state directory.
const (
	sizeFile    = "cluster.json"
	sizeVersion = 1
	maxSize     = 64 << 10
)

// A clusterSize is how many nodes the cluster had, so that a process knows it before its first
// request.
type clusterSize struct {
	Version int `json:"version"`
	Nodes   int `json:"nodes"`
	// Boot is the boot ID of the node then.
	Boot string `json:"boot"`
}

// readSize returns the size that a state directory has; nil if there is none.
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
