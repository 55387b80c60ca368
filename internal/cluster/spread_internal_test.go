package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestSpreadOfFirstWrites: 50 nodes write in a second, whatever the size of the cluster.
func TestSpreadOfFirstWrites(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	waits := func() time.Duration {
		t.Helper()
		var last time.Duration
		for range 50 {
			c := &stepping{now: time.Now()}
			began := c.now
			l := &labeler{clock: c, spread: &spread{}, client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})}
			if err := l.admit(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			last = max(last, c.now.Sub(began))
		}
		return last
	}
	if last := waits(); last > 20*time.Millisecond {
		t.Errorf("one node waits %v", last)
	}
	for i := range 299 {
		if err := r.server.ChangeNode(fmt.Sprint("other-", i), func(*corev1.Node) {}); err != nil {
			t.Fatal(err)
		}
	}
	if last := waits(); last < 2*time.Second || last > 6*time.Second {
		t.Errorf("of 300 nodes the last of 50 waits %v, want up to 6 s", last)
	}
	shared, lists := &spread{}, r.server.Requests()[apiserver.Request{Verb: "list", Resource: "nodes"}]
	for range 3 {
		limit, err := shared.of(t.Context(), kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"}))
		if err != nil || limit != 6*time.Second {
			t.Errorf("the limit of 300 nodes is %v (%v), want 6 s", limit, err)
		}
	}
	if n := r.server.Requests()[apiserver.Request{Verb: "list", Resource: "nodes"}] - lists; n != 1 {
		t.Errorf("three that share a spread counted the nodes %d times", n)
	}
	r.server.SetFault(apiserver.Fault{Status: 403})
	if last := waits(); last < 10*time.Second || last > 20*time.Second {
		t.Errorf("of nodes that may not be counted the last of 50 waits %v, want up to 20 s", last)
	}
	r.server.SetFault(apiserver.Fault{Status: 503})
	l := &labeler{clock: &stepping{}, spread: &spread{}, client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})}
	if err := l.admit(t.Context(), false); err == nil {
		t.Error("an API server that is not ready is written to")
	}
}

// counting counts nodes. An error is returned as often as there are some.
type counting struct {
	mu     sync.Mutex
	nodes  int
	errs   []error
	counts int
}

func (c *counting) NodeCount(context.Context) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts++
	if len(c.errs) > 0 {
		err := c.errs[0]
		c.errs = c.errs[1:]
		return 0, err
	}
	return c.nodes, nil
}

func (c *counting) set(nodes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = nodes
}

func (c *counting) asked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

// TestSpreadOfFirstRequests: where all nodes may have been started together, the first request of a process waits, and its first write does
// not wait again. All tasks have one turn.
func TestSpreadOfFirstRequests(t *testing.T) {
	t.Parallel()
	refused := func(code int) error { return &kubeapi.Refused{Code: code} }
	for name, tt := range map[string]struct {
		file         string // cluster.json; none if it is empty
		boot         string
		nodes        int // what the API server says
		errs         []error
		limit, write time.Duration // the limits of the first request and of the first write
		counts       int
	}{
		"the node was restarted":              {file: `{"version":1,"nodes":1000,"boot":"b"}`, boot: "c", limit: 20 * time.Second},
		"the process was restarted":           {file: `{"version":1,"nodes":1000,"boot":"b"}`, boot: "b", write: 20 * time.Second},
		"no boot ID":                          {file: `{"version":1,"nodes":1000,"boot":""}`, limit: 20 * time.Second},
		"so many nodes":                       {file: `{"version":1,"nodes":1000000,"boot":"b"}`, boot: "c", limit: 5 * time.Minute},
		"the first start":                     {boot: "b", nodes: 500, limit: 10 * time.Second, counts: 1},
		"no state of this version":            {file: `{"version":2,"nodes":1000}`, boot: "b", nodes: 500, limit: 10 * time.Second, counts: 1},
		"nonsense":                            {file: `{"version":1,"nodes":-5}`, boot: "b", nodes: 500, limit: 10 * time.Second, counts: 1},
		"may not be counted":                  {boot: "b", errs: []error{refused(403)}, limit: 20 * time.Second, counts: 1},
		"the API server is away":              {boot: "b", nodes: 500, errs: []error{errors.New("refused")}, write: 10 * time.Second, counts: 2},
		"the API server starts":               {boot: "b", nodes: 500, errs: []error{refused(503)}, write: 10 * time.Second, counts: 2},
		"the API server has too much to do":   {boot: "b", nodes: 500, errs: []error{refused(429), refused(429)}, limit: 13 * time.Second, counts: 3},
		"more nodes than were known at first": {file: `{"version":1,"nodes":1,"boot":"b"}`, boot: "c", nodes: 5000, limit: 20 * time.Millisecond},
	} {
		var longest time.Duration
		for range 30 {
			s := spread{stateDir: t.TempDir(), boot: tt.boot}
			if tt.file != "" {
				if err := os.WriteFile(filepath.Join(s.stateDir, sizeFile), []byte(tt.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			timer, api := &stepping{now: time.Now()}, &counting{nodes: tt.nodes, errs: tt.errs}
			began := timer.now
			s.begin(t.Context(), patientDisk{timer}, api)
			took := timer.now.Sub(began)
			longest = max(longest, took)
			s.begin(t.Context(), patientDisk{timer}, api)
			if now := timer.now.Sub(began); now != took {
				t.Errorf("%s: the second task waits %v more", name, now-took)
			}
			if write, err := s.of(t.Context(), api); err != nil || write != tt.write {
				t.Errorf("%s: the first write waits up to %v (%v), want %v", name, write, err, tt.write)
			}
			if n := api.asked(); n != tt.counts {
				t.Errorf("%s: the nodes were counted %d times, want %d", name, n, tt.counts)
			}
		}
		if longest > tt.limit || longest < tt.limit/2 {
			t.Errorf("%s: the last of 30 waits %v, want up to %v", name, longest, tt.limit)
		}
	}
}

// A patientDisk waits for the disk as long as real time lets it.
type patientDisk struct{ *stepping }

func (p patientDisk) After(d time.Duration) <-chan time.Time {
	if d == firstAnswer {
		return nil
	}
	return p.stepping.After(d)
}

// TestSizeOfTheCluster: what the next process will know is the number of nodes as it was about a day ago at most.
func TestSizeOfTheCluster(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		saved := func() clusterSize {
			t.Helper()
			synctest.Wait()
			size, err := readSize(dir)
			if err != nil || size == nil {
				t.Fatalf("the size is %v: %v", size, err)
			}
			return *size
		}
		start := func(boot string, api *counting) (*spread, func()) {
			s := &spread{stateDir: dir, boot: boot}
			ctx, cancel := context.WithCancel(t.Context())
			s.begin(ctx, clock.RealClock{}, api)
			var running sync.WaitGroup
			running.Go(func() { s.keep(ctx, clock.RealClock{}, api) })
			return s, func() { cancel(); running.Wait() }
		}
		api := &counting{nodes: 3, errs: []error{errors.New("refused"), errors.New("refused")}}
		_, stop := start("b", api)
		time.Sleep(time.Minute) // in synctest's time
		if got := saved(); got != (clusterSize{1, 3, "b"}) {
			t.Errorf("after the first start: %+v", got)
		}
		api.set(5000)
		time.Sleep(36 * time.Hour)
		if got := saved(); got != (clusterSize{1, 5000, "b"}) {
			t.Errorf("after 36 hours: %+v", got)
		}
		asked := api.asked()
		time.Sleep(240 * time.Hour)
		if n := api.asked() - asked; n < 6 || n > 20 {
			t.Errorf("the nodes were counted %d times in 10 days", n)
		}
		stop()

		// The next process counts no nodes at its start, and says that the node was restarted only once.
		api = &counting{nodes: 5000}
		second, stop := start("c", api)
		if got := saved(); got != (clusterSize{1, 5000, "c"}) || api.asked() > 0 || !second.over {
			t.Errorf("after a restart of the node: %+v, counted %d times, waited: %v", got, api.asked(), second.over)
		}
		stop()
		third, stop := start("c", api)
		if api.asked() > 0 || third.over {
			t.Errorf("after a restart of the process: counted %d times, waited: %v", api.asked(), third.over)
		}
		stop()
	})
}

// TestNoRequestBeforeTheTurn: a node of many that were restarted asks nothing of the API server until its turn has come.
func TestNoRequestBeforeTheTurn(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(context.Context, *labelRig, *Cluster, clock.Clock){
		"watch": func(ctx context.Context, _ *labelRig, c *Cluster, timer clock.Clock) { c.follow(ctx, timer) },
		"NodeFeature": func(ctx context.Context, r *labelRig, c *Cluster, timer clock.Clock) {
			r.daemon.Configs.Publish(config.Config{Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
			r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
			c.labelFeature(ctx, r.daemon, timer)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLabelRig(t, config.LabelsOff, nil)
			r.stop()
			before := r.asked()
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, sizeFile), []byte(`{"version":1,"nodes":5000,"boot":"b"}`), 0o600); err != nil {
				t.Fatal(err)
			}
			c := New()
			c.Choose(t.Context(), config.Config{Kubeconfig: r.server.Kubeconfig(), NodeName: "n", StateDir: dir})
			c.Observation(r.daemon.Configs, "c")
			timer := &gate{opened: make(chan time.Time), waiting: make(chan time.Duration, 1)}
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { start(ctx, r, c, timer) })
			t.Cleanup(func() { cancel(); running.Wait() })
			select {
			case wait := <-timer.waiting:
				if wait > 100*time.Second {
					t.Errorf("the first request waits %v", wait)
				}
			case <-time.After(labelPatience):
				t.Fatal("the first request waits for nothing")
			}
			if n := r.asked() - before; n > 0 {
				t.Errorf("%d requests before the turn", n)
			}
			close(timer.opened)
			r.until("the first request", func() bool { return r.asked() > before })
		})
	}
}

// TestSlicesAreSpreadOnce: a node of many that were restarted publishes when its turn has come. What follows does not wait: a kubelet that
// removed the slices, and a fault.
func TestSlicesAreSpreadOnce(t *testing.T) {
	s := newStage(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, sizeFile), []byte(`{"version":1,"nodes":100000,"boot":"b"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	timer := &gate{opened: make(chan time.Time), waiting: make(chan time.Duration, 1)}
	d := s.newSpreadDriver(dir, snapshotOf(2), timer, &spread{stateDir: dir, boot: "c"})
	d.registered(1)
	select {
	case wait := <-timer.waiting:
		if wait > maxSpread {
			t.Errorf("the first request waits %v", wait)
		}
	case <-time.After(patience):
		t.Fatal("the first request waits for nothing")
	}
	if n := d.requestsMade(); n > 0 {
		t.Errorf("%d requests before the turn", n)
	}
	close(timer.opened)
	s.untilPool("1: 0 1")
	if made := d.requests(); made != "GET nodes 200: 1, GET resourceslices 200: 1, POST resourceslices 201: 1, WATCH resourceslices 200: 1" {
		t.Errorf("the first slice took %s", made)
	}
	for i := range 3 { // a further wait would be of minutes
		if err := s.server.WipeSlices(nodeName); err != nil {
			t.Fatal(err)
		}
		d.registered(i + 2)
		s.untilPool("1: 0 1")
	}
	d.fault(1)
	s.untilPool("1: 0 1!xid")
}

// asked counts all requests.
func (r *labelRig) asked() int {
	n := 0
	for _, count := range r.server.Requests() {
		n += count
	}
	return n
}

// A gate is a clock on which the first wait but that for the disk ends when it is opened.
type gate struct {
	clock.RealClock
	opened  chan time.Time
	waiting chan time.Duration
	once    sync.Once
}

func (g *gate) After(d time.Duration) <-chan time.Time {
	if d == firstAnswer || d == yieldPoll || d == idlePoll {
		return g.RealClock.After(time.Minute)
	}
	first := false
	g.once.Do(func() { first = true })
	if !first {
		return g.RealClock.After(d)
	}
	g.waiting <- d
	return g.opened
}
