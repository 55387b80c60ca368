package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	// maxThreads and maxCPU bound what the daemon may need: a fault must not make it spin, or pile up
	// threads.
	maxThreads = 40
	maxCPU     = 0.05 // of a core, besides startCPU
	startCPU   = 500 * time.Millisecond
	// maxEnd is how long the daemon may take to end: two seconds, and some for a busy machine.
	maxEnd = 3 * time.Second
)

// A play is one fault on a node of its own, and what was seen of it.
type play struct {
	fault  fault
	when   string
	acts   []act
	first  []simulator.Fault // have happened before the daemon starts, as has place
	place  deed
	daemon string
	played bool
	steps  []step
	err    error // what is wrong
}

// A step is an act that was played.
type step struct{ did, seen, after string }

// plays returns the plays of a fault.
func (f fault) plays(daemon string) []*play {
	var plays []*play
	if f.start != nil {
		o := *f.start
		if o.within == 0 {
			o.within = starting
		}
		acts := append([]act{{wait, o}}, f.then...)
		plays = append(plays, &play{fault: f, when: "at start", acts: acts, first: f.inject, place: f.place, daemon: daemon})
	}
	if f.refused != "" {
		plays = append(plays, &play{fault: f, when: "at start", place: f.place, daemon: daemon})
	}
	if f.run != nil {
		happens := inject(f.inject...)
		for _, d := range []deed{f.place, f.do} {
			if d.do != nil {
				happens = both(happens, d)
			}
		}
		acts := append([]act{{happens, *f.run}}, f.then...)
		plays = append(plays, &play{fault: f, when: "at run time", acts: acts, daemon: daemon})
	}
	return plays
}

// A stage is the node of a play.
type stage struct {
	*node.Node
	machine machine
	muted   bool              // there is no control socket
	had     map[string]string // the devices that the node had before the last deed: index → UUID
}

// run plays. What comes of it is in p.
func (p *play) run(ctx context.Context) {
	p.played = true
	if p.err = ctx.Err(); p.err != nil {
		return
	}
	profile := p.fault.machine.profile
	if profile == "" {
		profile = "dgx-h100"
	}
	setup := node.Setup{Daemon: p.daemon, Profile: profile, Args: p.fault.machine.args}
	if p.fault.machine.unread {
		reader, writer, err := os.Pipe()
		if err != nil {
			p.err = err
			return
		}
		defer func() { _ = errors.Join(reader.Close(), writer.Close()) }()
		setup.Stderr = writer
	}
	n, err := node.Open(setup)
	if err != nil {
		p.err = err
		return
	}
	s := &stage{Node: n, machine: p.fault.machine}
	if p.err = p.playOn(ctx, s); p.err != nil {
		p.err = fmt.Errorf("%w\nthe daemon's log ends with:\n%s", p.err, n.Logged())
	}
	p.err = errors.Join(p.err, n.Close())
}

func (p *play) playOn(ctx context.Context, s *stage) error {
	if p.fault.machine.config != "" {
		file := s.Path("config.yaml")
		if err := os.WriteFile(file, []byte("version: v1\n"+p.fault.machine.config), 0o600); err != nil {
			return err
		}
		s.Args = append(s.Args, "--config-file", file)
	}
	profile := s.Profile
	if p.place.do != nil {
		if err := p.place.do(ctx, s); err != nil {
			return err
		}
	}
	if p.acts == nil {
		return p.refuses(s)
	}
	s.muted = s.machine.mute && p.place.do != nil
	began := time.Now()
	if err := s.startOn(ctx, profile, p.first); err != nil {
		return err
	}
	if s.muted {
		began = time.Now() // what it may take to start was seen
	}
	if p.when == "at run time" {
		wanted, err := s.wanted(ctx, outcome{})
		if err == nil {
			_, err = s.await(ctx, began, starting, wanted)
		}
		if err != nil {
			return fmt.Errorf("before anything happens: %w", err)
		}
		began = time.Now()
	}
	for _, a := range p.acts {
		done, err := p.playAct(ctx, s, a, began)
		p.steps = append(p.steps, done)
		if err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
		began = time.Now()
	}
	return s.end()
}

// refuses starts the daemon, which does not want to.
func (p *play) refuses(s *stage) error {
	began := time.Now()
	if err := s.StartDaemon(); err != nil {
		return err
	}
	daemon := s.Running()
	select {
	case <-daemon.Ended():
	case <-time.After(starting):
		return errors.New("the daemon goes on")
	}
	_ = s.StopDaemon() // says again how it ended
	p.steps = []step{{seen: "an error", after: short(time.Since(began))}}
	if logged := s.Logged(); daemon.Err() == nil || !regexp.MustCompile(p.fault.refused).MatchString(logged) {
		return fmt.Errorf("the daemon ended with %w", daemon.Err())
	}
	return nil
}

// playAct does what there is to do and waits for its outcome.
func (p *play) playAct(ctx context.Context, s *stage, a act, began time.Time) (step, error) {
	done := step{did: a.name, after: "-"}
	if err := a.do(ctx, s); err != nil {
		return done, err
	}
	wanted, err := s.wanted(ctx, a.outcome)
	if err != nil {
		return done, err
	}
	within := a.within
	if within == 0 {
		within = atOnce
	}
	took, err := s.await(ctx, began, within, wanted)
	if err == nil {
		done.after = short(took)
	}
	if err == nil && a.hold > 0 {
		done.after += ", for " + short(a.hold)
		err = s.hold(ctx, a.hold, wanted)
	}
	if err == nil { // kubelet hears of it first; what is said of it may come a little later
		err = node.Poll(ctx, atOnce, s.Running(), func(ctx context.Context) error { return s.said(ctx, a.says) })
	}
	done.seen = s.seen(ctx)
	return done, err
}

// start starts the daemon on the machine, to which faults have happened.
func (s *stage) start(ctx context.Context, faults []simulator.Fault) error {
	return s.startOn(ctx, strings.TrimSuffix(filepath.Base(s.Profile), ".yaml"), faults)
}

// startOn writes a profile with faults, starts the daemon on it, and waits until it answers.
func (s *stage) startOn(ctx context.Context, name string, faults []simulator.Fault) error {
	profile, err := simulator.Load(name)
	if err != nil {
		return err
	}
	profile.Faults = faults
	text, err := yaml.Marshal(profile)
	if err != nil {
		return err
	}
	s.Profile = s.Path(name + ".yaml") // the GPUs are named after it
	if err := os.WriteFile(s.Profile, text, 0o600); err != nil {
		return err
	}
	if err := s.StartDaemon(); err != nil {
		return err
	}
	if s.muted {
		if err := unmute(ctx, s); err != nil {
			return err
		}
	}
	return node.Poll(ctx, starting, s.Running(), func(ctx context.Context) error {
		had, err := s.devices(ctx)
		s.had = had
		return err
	})
}

// call makes a call at the daemon's control socket.
func (s *stage) call(ctx context.Context, name string, arguments, result any) error {
	return control.Call(ctx, s.ControlSocket(), name, arguments, result)
}

// end ends the daemon and looks at what it needed.
func (s *stage) end() error {
	needed := s.need()
	began := time.Now()
	if err := errors.Join(needed, s.StopDaemon()); err != nil {
		return err
	}
	if took := time.Since(began); took > maxEnd {
		return fmt.Errorf("the daemon took %s to end", short(took))
	}
	return nil
}

func short(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}
