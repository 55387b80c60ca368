package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const (
	nodeName = "node-1"
	// theirTaint and theirCondition belong to others.
	theirTaint = "theirs"
	ourTaint   = "gpu-device-plugin.github.io/no-healthy-gpu"
	// patience is how long a test waits for something, by the time of its bubble.
	patience = 30 * time.Minute
)

// A stage is a node at a stand-in API server. All of it is in a bubble of testing/synctest: time
// goes on when nobody has anything to do.
type stage struct {
	*testing.T
	server *apiserver.Server
	real   bool // by real time, outside of a bubble: for tests with sockets
}

// onStage runs a test on a stage of its own, beside other tests.
func onStage(t *testing.T, test func(*stage)) {
	t.Helper()
	t.Parallel()
	onNewStage(t, test)
}

// onNewStage runs a part of a test on a stage of its own.
func onNewStage(t *testing.T, test func(*stage)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server, err := apiserver.StartInMemory(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Stop)
		s := &stage{T: t, server: server}
		s.change(func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: theirTaint, Effect: corev1.TaintEffectNoSchedule}}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		})
		test(s)
	})
}

// change changes the node, or makes it.
func (s *stage) change(with func(*corev1.Node)) {
	s.Helper()
	if err := s.server.ChangeNode(nodeName, with); err != nil {
		s.Fatal(err)
	}
}

// node is the node as the API server has it; an empty one if it has none.
func (s *stage) node() *corev1.Node {
	n, err := s.server.Node(nodeName)
	if err != nil {
		return &corev1.Node{}
	}
	return n
}

// until waits until something is so.
func (s *stage) until(what string, is func() bool) {
	s.Helper()
	if !s.becomes(is) {
		s.Fatalf("never: %s; condition %q, taints %v, labels %v, Events %v, pool %s, requests %v",
			what, s.condition(), s.taints(), s.node().Labels, s.events(), s.pool(), s.server.Requests())
	}
}

func (s *stage) becomes(is func() bool) bool {
	for late := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		if !s.real {
			synctest.Wait()
		}
		if is() {
			return true
		}
		if time.Now().After(late) {
			return false
		}
	}
}

// pass lets so much time go by.
func (s *stage) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// writes counts the requests that change objects, while something is done.
func (s *stage) writes(while func()) int {
	before := s.server.Writes()
	while()
	return s.server.Writes() - before
}

// requests counts all requests.
func (s *stage) requests() int {
	n := 0
	for _, count := range s.server.Requests() {
		n += count
	}
	return n
}

// during does something while the API server has a fault, and has it wrong for some time more.
func (s *stage) during(fault apiserver.NamedFault, do func()) {
	s.Helper()
	if err := fault.Begin(s.server); err != nil {
		s.Fatal(err)
	}
	do()
	s.pass(time.Minute)
	if err := fault.End(s.server); err != nil {
		s.Fatal(err)
	}
}

// throughFaults runs a test for each fault of the API server.
func throughFaults(t *testing.T, test func(*stage, apiserver.NamedFault)) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) { onStage(t, func(s *stage) { test(s, fault) }) })
	}
}

// A process is what gpu-node-agent runs for the API server, with what the rest of the program would
// tell it.
type process struct {
	daemon.View
	s       *stage
	cluster *cluster.Cluster
	chosen  *feed.Feed[config.Chosen] // the configuration file; nil where no label chooses it
	log     ktesting.Underlier
	stop    func()
	leads   *feed.Feed[bool] // whether this process leads
	// observes says that there are no outputs.
	observes bool
	ready    func(context.Context) (bool, string) // nil without a task that says so
	// requested, if it is not nil, is called after each request.
	requested func(verb, resource string, code int)

	mu      sync.Mutex // guards all following fields
	status  status.Status
	asked   int // how often the status was read
	dropped map[string]int
	made    map[string]int // requests, by verb, resource and code
}

// new returns a process with this configuration that does nothing yet.
func (s *stage) new(c config.Config) *process {
	c.Kubeconfig, c.NodeName = s.server.Kubeconfig(), nodeName
	p := &process{s: s, leads: feed.New(true), dropped: map[string]int{}, made: map[string]int{}, stop: func() {}}
	p.status = status.Status{Version: "v1"}
	p.View = daemon.View{ConfigView: daemon.ConfigView{Startup: c.Startup, Configs: feed.New(c), ConfigErrors: feed.New[error](nil)}, Snapshots: feed.New(inventory.Snapshot{}), Offered: feed.New(resource.Plan{}), MaintenanceView: daemon.MaintenanceView{Repairs: feed.New(repair.Status{}), DriverChange: feed.New(driverchange.Status{})}, LabelView: daemon.LabelView{Labels: feed.New[map[string]string](nil), LabelsProblem: feed.New[error](nil)}, Lead: lead.New(lead.Options{}), Status: func(context.Context) (status.Status, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.asked++
		now := p.status
		if now.Driver != "" {
			now.Looked = time.Now()
		}
		return now, nil
	}, CountView: daemon.CountView{EventDropped: func(cause string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.dropped[cause]++
	}, APIRequested: p.count}, ShrinkView: daemon.ShrinkView{PendingShrink: feed.New(uint64(0)), ApproveShrink: func(uint64) {}, Listed: func() map[string]int { return nil }}}
	return p
}

func (p *process) count(verb, resource string, code int) {
	if p.requested != nil {
		p.requested(verb, resource, code)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made[fmt.Sprint(verb, " ", resource, " ", code)]++
}

// requests says which requests were made, and how often.
func (p *process) requests() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for _, request := range slices.Sorted(maps.Keys(p.made)) {
		all = append(all, fmt.Sprint(request, ": ", p.made[request]))
	}
	return strings.Join(all, ", ")
}

// connect has the process know its API server, and choose its configuration file.
func (p *process) connect(ctx context.Context) {
	o := cluster.Options{Dial: p.s.server.Dial}
	if p.s.real {
		o.Dial = nil
	}
	p.cluster = cluster.New(o)
	p.chosen = p.cluster.Choose(ctx, p.Startup)
}

// logging returns a context whose log is kept.
func (p *process) logging() context.Context {
	logger := ktesting.NewLogger(p.s, ktesting.NewConfig(ktesting.BufferLogs(true)))
	p.log = logger.GetSink().(ktesting.Underlier)
	return klog.NewContext(context.Background(), logger)
}

// start runs the tasks until stop is called, or the test ends.
func (p *process) start() *process { return p.startOn("boot") }

// startOn runs them on a node that was started with this boot ID.
func (p *process) startOn(boot string) *process {
	ctx, cancel := context.WithCancel(p.logging())
	p.connect(ctx)
	observing, end := context.WithCancel(ctx)
	var observation, outputs sync.WaitGroup
	for _, task := range p.cluster.Observation(p.Configs, boot) {
		observation.Go(func() { _ = task.Run(observing) })
	}
	acting, finish := context.WithCancel(ctx)
	tasks := p.cluster.Outputs(p.View)
	if p.observes {
		tasks = nil
	}
	for _, task := range tasks {
		if task.Ready != nil {
			p.ready = task.Ready
		}
		run := task.Run
		if task.Lead {
			run = func(ctx context.Context) error { return p.while(ctx, task.Run) }
		}
		outputs.Go(func() {
			if err := run(acting); err != nil {
				p.s.Errorf("%s: %v", task.Name, err)
			}
		})
	}
	p.stop = sync.OnceFunc(func() { // outputs end first
		finish()
		outputs.Wait()
		end()
		observation.Wait()
		cancel()
	})
	p.s.Cleanup(p.stop)
	return p
}

// while runs a task as long as this process leads, as package lead does.
func (p *process) while(ctx context.Context, run func(context.Context) error) error {
	for ctx.Err() == nil {
		leads, changed := p.leads.Latest()
		if leads {
			term, end := context.WithCancel(ctx)
			var running sync.WaitGroup
			var err error
			running.Go(func() { err = run(term) })
			feed.WaitAny(ctx, changed)
			end()
			if running.Wait(); err != nil {
				return err
			}
			continue
		}
		feed.WaitAny(ctx, changed)
	}
	return nil
}

// logged reports whether the log has a text.
func (p *process) logged(text string) int { return strings.Count(p.log.GetBuffer().String(), text) }

// configure puts another configuration in force.
func (p *process) configure(change func(*config.Config)) {
	c := p.Configs.Value()
	change(&c)
	p.Configs.Publish(c)
}

// set changes what the daemon knows.
func (p *process) set(change func(*status.Status)) {
	p.mu.Lock()
	change(&p.status)
	p.mu.Unlock()
	p.Snapshots.Publish(inventory.Snapshot{})
}

// gpus has the daemon know these GPUs.
func (p *process) gpus(gpus ...status.Device) {
	p.set(func(s *status.Status) { s.Driver, s.Stale, s.GPUs = "580", "", gpus })
}

// reads says how often the status was read.
func (p *process) reads() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

func (p *process) drops(cause string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dropped[cause]
}

// stateDir returns a state directory in which the cluster had so many nodes when the node had this
// boot ID.
func (s *stage) stateDir(nodes int, boot string) string {
	s.Helper()
	dir := s.TempDir()
	text := fmt.Sprintf(`{"version":1,"nodes":%d,"boot":%q}`, nodes, boot)
	if err := os.WriteFile(filepath.Join(dir, "cluster.json"), []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
	return dir
}
