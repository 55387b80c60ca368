package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// A plan says what is done on a stage.
type plan struct {
	name    string
	version standin.Version
	// enduring says that one process of the daemon lives from the beginning to the end.
	enduring bool
}

// A stage is a node with a kubelet, one daemon or two, pods, and what must be true of all of it.
type stage struct {
	*node.Node
	plan
	options options
	began   time.Time
	random  *rand.Rand // of the actions
	mirror  *simulator.Node
	all     []setting

	// Used by the goroutine of the actions alone.
	strategies string

	mu         sync.Mutex // guards all following fields
	daemons    []*node.Node
	metrics    map[*node.Node]string // addresses
	gpus       []*gpu
	owners     map[string]int // UUID of each GPU and MIG device that there was → slot of the GPU
	setting    setting
	pods       map[string][]held
	stopping   map[*node.Daemon]bool // may end
	settled    time.Time             // from when on kubelet must see the whole node as it is here, unless busy
	busy       bool
	extras     map[key]time.Time    // since when a device is listed that nobody needs
	unserved   map[string]time.Time // since when kubelet has no device of a resource whose devices pods hold
	recent     []string
	counts     map[string]int
	violations []violation
	samples    []sample
	equal      []sample // taken in equal states
}

// fast is a clock by which kubelet forgets within half a minute a resource that nobody serves any
// more, and not within five.
type fast struct{ began time.Time }

const faster = 10

func (c fast) Now() time.Time                  { return c.began.Add(time.Since(c.began) * faster) }
func (c fast) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// A violation is something that must not be.
type violation struct {
	at     time.Duration
	text   string
	recent []string
}

func newStage(o options, p plan, seed uint64) (*stage, error) {
	profile, err := simulator.Load(profileName)
	if err != nil {
		return nil, err
	}
	n, err := node.Open(node.Setup{Daemon: o.daemon, Version: p.version, Clock: fast{time.Now()}})
	if err != nil {
		return nil, err
	}
	s := &stage{
		Node: n, plan: p, options: o, began: time.Now(), random: rand.New(rand.NewPCG(seed,
			1)), mirror: simulator.New(profile),
		owners: map[string]int{}, metrics: map[*node.Node]string{}, stopping: map[*node.Daemon]bool{},
		pods: map[string][]held{}, extras: map[key]time.Time{}, unserved: map[string]time.Time{},
		counts: map[string]int{}, busy: true,
	}
	for _, g := range s.mirror.List() {
		s.gpus, s.owners[g.UUID] = append(s.gpus, &gpu{slot: g.Index, uuid: g.UUID}), g.Index
	}
	s.all = settings(s.gpus)
	s.setting = s.all[0]
	for _, folder := range []string{"config", "state", "cdi"} {
		if err := os.Mkdir(n.Path(folder), 0o700); err != nil {
			return nil, errors.Join(err, n.Close())
		}
	}
	return s, nil
}

func (s *stage) configFile() string { return s.Path("config/config.yaml") }

// writeProfile writes the machine as it is now, for a daemon that starts.
func (s *stage) writeProfile() error {
	profile, err := simulator.Load(profileName)
	if err != nil {
		return err
	}
	s.mu.Lock()
	for _, g := range s.gpus {
		at := fmt.Sprint(g.slot)
		if len(g.layout) > 0 {
			profile.Faults = append(profile.Faults, simulator.Fault{Kind: simulator.KindMIG, GPU: at, Profiles: g.layout})
		}
		if g.problem != nil {
			profile.Faults = append(profile.Faults, g.problem.on(g)...)
		}
		if g.removed {
			profile.Faults = append(profile.Faults, simulator.Fault{Kind: simulator.KindRemove, GPU: at})
		}
	}
	s.mu.Unlock()
	text, err := yaml.Marshal(profile)
	if err != nil {
		return err
	}
	return replace(s.profile(), string(text))
}

// profile is the path of the machine; the GPUs are named after it.
func (s *stage) profile() string { return s.Path(profileName + ".yaml") }

// replace puts a file with a text in the place of the one before.
func replace(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// startDaemon starts a daemon on the node, beside those that run, and waits until it answers.
func (s *stage) startDaemon(ctx context.Context) (*node.Node, error) {
	if err := s.writeProfile(); err != nil {
		return nil, err
	}
	at, err := loopback.Free(ctx)
	if err != nil {
		return nil, err
	}
	other, err := s.Beside(node.Setup{Profile: s.profile(), Args: []string{
		"--state-dir", s.Path("state"), "--cdi-dir", s.Path("cdi"), "--config-file", s.configFile(), "--metrics-address", at,
	}})
	if err != nil {
		return nil, err
	}
	if err := other.StartDaemon(); err != nil {
		return nil, errors.Join(err, other.Close())
	}
	s.mu.Lock()
	s.daemons = append(s.daemons, other)
	s.metrics[other] = at
	s.mu.Unlock()
	process := other.Running()
	if err := node.Poll(ctx, 15*time.Second*s.options.slack, nil, func(ctx context.Context) error {
		return control.Call(ctx, other.ControlSocket(), "simulate.list", nil, nil)
	}); err != nil {
		s.violate("a daemon that was started does not answer: %v", err)
	}
	go func() {
		<-process.Ended()
		s.mu.Lock()
		expected := s.stopping[process]
		s.mu.Unlock()
		if !expected && ctx.Err() == nil {
			s.violate("a daemon ended by itself: %v; its log ends with:\n%s", process.Err(), other.Logged())
		}
	}()
	return other, nil
}

// stopDaemon ends a daemon by a signal.
func (s *stage) stopDaemon(n *node.Node, signal syscall.Signal) error {
	process := n.Running()
	s.mu.Lock()
	s.stopping[process] = true
	delete(s.metrics, n)
	s.daemons = slices.DeleteFunc(s.daemons, func(o *node.Node) bool { return o == n })
	s.mu.Unlock()
	began := time.Now()
	if signal == syscall.SIGKILL {
		_ = process.Kill() // it may have ended
		<-process.Ended()
	}
	err := n.StopDaemon()
	if took := time.Since(began); took > maxEnd*s.options.slack {
		s.violate("a daemon took %s to end after %s", short(took), signal)
	}
	if signal == syscall.SIGTERM && err != nil {
		s.violate("a daemon ended with %v after SIGTERM; its log ends with:\n%s", err, n.Logged())
	}
	s.readLog(n)
	return n.Close()
}

// maxEnd is how long a daemon may take to end: two seconds, and some for a busy machine.
const maxEnd = 5 * time.Second

// readLog looks for what must not be in the log of a daemon.
func (s *stage) readLog(n *node.Node) {
	text, err := os.ReadFile(n.LogPath())
	if err != nil {
		s.violate("read the daemon's log: %v", err)
		return
	}
	for _, word := range []string{"panic:", "fatal error:", "DATA RACE", "goroutine 1 ["} {
		if at := bytes.Index(text, []byte(word)); at >= 0 {
			s.violate("the daemon's log says:\n%s", string(text[at:min(len(text), at+2000)]))
		}
	}
	s.count("log kB", len(text)>>10)
}

// keepLogs copies the logs of the daemons that run, for who looks into a violation.
func (s *stage) keepLogs() {
	if s.options.out == "" {
		return
	}
	for i, n := range s.daemons {
		if text, err := os.ReadFile(n.LogPath()); err == nil {
			_ = os.WriteFile(filepath.Join(s.options.out, fmt.Sprintf("%s-%d-%d.log", s.name, len(s.violations), i)), text,
				0o600)
		}
	}
}

// call makes a call to every daemon.
func (s *stage) call(ctx context.Context, name string, arguments any) error {
	for _, n := range s.running() {
		if err := s.callOne(ctx, n, name, arguments, nil); err != nil {
			return err
		}
	}
	return nil
}

// maxAnswer is how long the daemon may take to answer a call.
const maxAnswer = 5 * time.Second

func (s *stage) callOne(ctx context.Context, n *node.Node, name string, arguments, result any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*maxAnswer*s.options.slack)
	defer cancel()
	began := time.Now()
	err := control.Call(ctx, n.ControlSocket(), name, arguments, result)
	if took := time.Since(began); took > maxAnswer*s.options.slack && context.Cause(ctx) == nil {
		s.violate("a daemon took %s to answer %s", short(took), name)
	}
	return err
}

func (s *stage) running() []*node.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.daemons)
}

// inject makes faults happen to the machine, as every daemon sees it.
func (s *stage) inject(ctx context.Context, faults ...simulator.Fault) error {
	for _, f := range faults {
		if err := s.mirror.Inject(f); err != nil {
			return err
		}
		if err := s.call(ctx, "simulate.inject", f); err != nil {
			return err
		}
	}
	return nil
}

// disturb says that kubelet may see GPUs otherwise than they are, until settle; without GPUs, the
// whole node.
func (s *stage) disturb(gpus ...*gpu) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(gpus) == 0 {
		s.busy = true
	}
	for _, g := range gpus {
		g.busy = true
	}
}

// settle says that what was disturbed must be seen as it is after a time.
func (s *stage) settle(after time.Duration, gpus ...*gpu) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(gpus) == 0 {
		s.busy = false
	}
	for _, g := range gpus {
		g.busy = false
	}
	s.settleLocked(after, gpus...)
}

// settleLocked puts off the time from when on things must be seen as they are.
func (s *stage) settleLocked(after time.Duration, gpus ...*gpu) {
	at := time.Now().Add(after * s.options.slack)
	later := func(t time.Time) time.Time {
		if t.After(at) {
			return t
		}
		return at
	}
	if len(gpus) == 0 {
		s.settled = later(s.settled)
		clear(s.extras)
		clear(s.unserved)
	}
	for _, g := range gpus {
		g.settled = later(g.settled)
	}
}

// pause lets time go by.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// note remembers what was done, for who reads of a violation.
func (s *stage) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recent = append(s.recent, fmt.Sprintf("%8.2f %s", time.Since(s.began).Seconds(), text))
	s.recent = s.recent[max(0, len(s.recent)-40):]
	if s.options.verbose {
		fmt.Printf("%s %8.2f %s\n", s.name, time.Since(s.began).Seconds(), text)
	}
}

func (s *stage) count(what string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what] += n
}

// violate notes that something is as it must not be.
func (s *stage) violate(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violateLocked(format, args...)
}

func (s *stage) violateLocked(format string, args ...any) {
	v := violation{at: time.Since(s.began), text: fmt.Sprintf(format, args...), recent: slices.Clone(s.recent)}
	s.violations = append(s.violations, v)
	fmt.Printf("VIOLATION in %s after %.2f s: %s\n  before it:\n    %s\n", s.name, v.at.Seconds(), v.text,
		strings.Join(v.recent, "\n    "))
	s.keepLogs()
}

func short(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}
