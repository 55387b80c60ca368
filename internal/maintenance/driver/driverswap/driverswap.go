// Package driverswap changes the driver of the node by the program gpu-driver, by the rules of
// plan/driverchange. It has no journal of its own: each step follows from what gpu-driver and the
// node are like, so a process that starts in the middle of a change goes on.
package driverswap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

const (
	// stepInterval is the time between two steps of a change, and waitInterval while it waits.
	// doneInterval is the time between two looks while nothing is to be done.
	stepInterval = time.Second
	waitInterval = 5 * time.Second
	doneInterval = 30 * time.Second
	// settleTime is the time after GPUs are withheld until the kubelet gives them to no pod.
	settleTime = 5 * time.Second
	// callTimeout limits a call of gpu-driver, and actTimeout another act.
	callTimeout = 5 * time.Second
	actTimeout  = 30 * time.Second
)

// A User is a pod that has a GPU, or a prepared claim. A claim has no namespace.
type User struct{ Namespace, Name string }

func (u User) String() string {
	if u.Namespace == "" {
		return u.Name
	}
	return u.Namespace + "/" + u.Name
}

func (u User) pod() eviction.Pod { return eviction.Pod{Namespace: u.Namespace, Name: u.Name} }

// A Wanted is what the configuration says about the driver.
type Wanted struct {
	Version string // such as 580.95.05, or a digest such as sha256:0a…; empty for none
	Pods    policy.Pods
	// Source is the URL of the driver's archive, and SHA256 its digest; empty if gpu-driver has the driver
	// from elsewhere.
	Source, SHA256 string
}

// Options are the parts of the daemon used by Swaps.
type Options struct {
	// Wanted returns what is configured. The channel is closed when the answer may have changed.
	Wanted func() (w Wanted, changed <-chan struct{})
	// Refused returns why the driver must not be changed, according to the Node; empty if it may.
	Refused func() string
	// Socket is the control socket of gpu-driver, in its directory; empty if the node can have none.
	// BootID is the ID of the node's boot.
	Socket, BootID string
	// Admit returns since when the node has its slot of the cluster, or why it has none.
	Admit func(change string) (since time.Time, err error)
	// Users returns the users of GPUs that the kubelet and the claims know. Evict evicts a pod within
	// its disruption budget.
	Users func(ctx context.Context) ([]User, error)
	Evict func(ctx context.Context, pod eviction.Pod) error
	// Released reports whether Release (here), or quiesce or a request on the Node (elsewhere), has
	// released the driver. Use uses the driver again.
	Released     func(ctx context.Context) (here, elsewhere bool, err error)
	Release, Use func(ctx context.Context) error
	// Healthy returns the UUIDs of the GPUs that work.
	Healthy func() []string
	// Problem returns why a driver of this version does not work; empty if it works. before are the UUIDs
	// of the GPUs that worked with the previous driver.
	Problem func(ctx context.Context, version string, before []string) string
	// Clock is the clock of waits; nil means the real one.
	Clock clock.Clock
}

// Swaps changes the driver of a node. Create it with New.
type Swaps struct {
	options Options
	status  *feed.Feed[policy.Status]

	// Used by Run alone.
	withheld  time.Time // since when GPUs are withheld; zero if they are not
	tried     time.Time // since when a new driver is tried; zero if none is
	silent    time.Time // begin of Facts.SilentFor; zero if it is zero
	evictions eviction.Evictions
	noFetch   string // why gpu-driver has refused to download the driver; empty if it has not
	lastAct   policy.Act
	lastState policy.State
}

// New returns Swaps that do nothing yet. During a change, GPUs are withheld from the start.
func New(o Options) *Swaps {
	o.Clock = cmp.Or[clock.Clock](o.Clock, clock.RealClock{})
	first := policy.Status{Withholds: o.Socket != "" && driverapi.IsUnderWay(filepath.Dir(o.Socket), o.BootID)}
	return &Swaps{options: o, status: feed.New(first)}
}

// Status is the feed of the progress. It is not Known before the first answer of gpu-driver, and after
// the end of the lead. While another process leads, its status is published here.
func (s *Swaps) Status() *feed.Feed[policy.Status] { return s.status }

// Run changes the driver until ctx ends, and then returns nil. Only the leading process may call Run.
func (s *Swaps) Run(ctx context.Context) error {
	defer func() { s.status.Publish(policy.Status{Withholds: s.status.Value().Withholds}) }()
	s.tried, s.silent = time.Time{}, time.Time{}
	if s.withheld = (time.Time{}); s.status.Value().Withholds {
		s.withheld = s.options.Clock.Now()
	}
	s.lastAct, s.lastState = policy.Nothing, policy.Off
	for ctx.Err() == nil {
		wanted, wantedChanged := s.options.Wanted()
		var again <-chan time.Time
		if wanted.Version != "" || s.isChanging() {
			again = s.options.Clock.After(s.step(ctx, wanted))
		} else {
			s.publish(ctx, policy.Step{}, "", policy.Facts{})
		}
		select {
		case <-wantedChanged:
		case <-again:
		case <-ctx.Done():
		}
	}
	return nil
}

// isChanging reports whether a change may be in progress although none is configured any more. Such a
// change is completed. Without gpu-driver, this looks for two files, once.
func (s *Swaps) isChanging() bool {
	if s.options.Socket == "" || s.status.Value().Known && s.status.Value().State == policy.Off {
		return false
	}
	_, err := os.Stat(s.options.Socket)
	return err == nil || driverapi.IsUnderWay(filepath.Dir(s.options.Socket), s.options.BootID)
}

// step takes the next step, and returns the time until the following one.
func (s *Swaps) step(ctx context.Context, wanted Wanted) time.Duration {
	version := wanted.Version
	f, users, note := s.facts(ctx, wanted)
	step := policy.Next(f)
	if !step.Withholds {
		s.withheld = time.Time{}
	} else if s.withheld.IsZero() {
		s.withheld = s.options.Clock.Now()
	}
	s.publish(ctx, step, version, f)
	err := s.act(ctx, step, wanted, users, note)
	if step.Act == policy.Fetch {
		if s.noFetch = ""; err != nil {
			s.noFetch = err.Error()
		}
		return waitInterval
	}
	if err != nil {
		if ctx.Err() == nil {
			klog.FromContext(ctx).Info("Cannot do the next step of a change of the driver", "step", step.Act.String(),
				"reason", err.Error())
			step.Reason = fmt.Sprintf("cannot %s: %v", step.Act, err)
			s.publish(ctx, step, version, f)
		}
		return waitInterval
	}
	switch {
	case step.State == policy.Changing:
		return stepInterval
	case step.State == policy.Done || step.State == policy.Off:
		return doneInterval
	}
	return waitInterval
}

// facts returns the inputs of the next step, the users of GPUs, and the UUIDs of the GPUs that worked
// before the change.
func (s *Swaps) facts(ctx context.Context, w Wanted) (f policy.Facts, users []User, before []string) {
	f = policy.Facts{Wanted: w.Version, Archive: w.SHA256, Pods: w.Pods, Refused: s.options.Refused(),
		Now: s.options.Clock.Now(), Withheld: !s.withheld.IsZero()}
	f.Settled = f.Withheld && s.options.Clock.Since(s.withheld) >= settleTime
	told, err := s.call(ctx, driverapi.CallStatus, driverapi.Arguments{})
	if err != nil {
		f.Silent, f.HasSlot = err.Error(), s.status.Value().NeedsSlot
		f.Released, _, _ = s.options.Released(ctx) // an error is as if it were not
		f.SilentFor = s.silentFor(f.Released, f.Now)
		return f, nil, nil
	}
	s.silent = time.Time{}
	f.Host = hostOf(told)
	if s.noFetch != "" {
		f.Host.Download = &policy.Download{Archive: w.SHA256, Problem: s.noFetch, IsFinal: true}
	}
	if policy.Next(f).NeedsSlot {
		f.SlotSince, err = s.options.Admit(change(w.Version))
		if f.HasSlot = err == nil; err != nil {
			f.NoSlot = err.Error()
		}
	}
	if f.Released, f.ReleasedByOthers, err = s.options.Released(ctx); err != nil {
		f.Host, f.Silent = nil, "the state of this program is not known: "+err.Error()
		return f, nil, nil
	}
	isUnproven := told.Change != nil && told.Change.Step == driverapi.StepUnproven
	if !isUnproven || f.Released || f.ReleasedByOthers {
		s.tried = time.Time{}
	} else if s.tried.IsZero() {
		s.tried = f.Now
	}
	switch {
	case told.Change == nil && f.HasSlot:
		if users, err = s.options.Users(ctx); err != nil {
			f.Unknown = err.Error()
		}
		for _, u := range users {
			text := u.String()
			if refusal := s.evictions.Refusal(u.pod()); refusal != "" {
				text += " (" + refusal + ")"
			}
			f.Users = append(f.Users, text)
		}
		before = s.options.Healthy()
	case !s.tried.IsZero():
		f.Tried = f.Now.Sub(s.tried)
		if told.Change.Note != "" {
			before = strings.Split(told.Change.Note, ",")
		}
		f.Problem = s.options.Problem(ctx, told.LoadedVersion, before)
	}
	return f, users, before
}

// silentFor returns Facts.SilentFor. Without working GPUs nobody misses them: gpu-driver may be about to
// load a driver, as after a restart of the node.
func (s *Swaps) silentFor(released bool, now time.Time) time.Duration {
	switch {
	case !released && len(s.options.Healthy()) == 0:
		s.silent = time.Time{}
		return 0
	case s.silent.IsZero():
		s.silent = now
	}
	return now.Sub(s.silent)
}

func change(version string) string { return "driver " + version }

// act performs the act of a step.
func (s *Swaps) act(ctx context.Context, step policy.Step, w Wanted, users []User, before []string) error {
	if step.Act == policy.EvictPods {
		s.evict(ctx, w.Version, users)
		return nil
	}
	s.evictions = eviction.Evictions{}
	ctx, cancel := context.WithTimeout(ctx, actTimeout)
	defer cancel()
	call := func(name string, a driverapi.Arguments) error {
		a.Digest = step.Digest
		_, err := s.call(ctx, name, a)
		return err
	}
	switch step.Act {
	case policy.Fetch:
		return call(driverapi.CallFetch, driverapi.Arguments{Source: w.Source, Archive: w.SHA256})
	case policy.Swap:
		return call(driverapi.CallSwap, driverapi.Arguments{Note: strings.Join(before, ",")})
	case policy.Release:
		return s.options.Release(ctx)
	case policy.ChangeAtNextBoot:
		return call(driverapi.CallNextBoot, driverapi.Arguments{})
	case policy.UseDriver:
		return s.options.Use(ctx)
	case policy.Confirm:
		return call(driverapi.CallConfirm, driverapi.Arguments{})
	case policy.Revert:
		return call(driverapi.CallRevert, driverapi.Arguments{Reason: step.Reason})
	case policy.Forget:
		return call(driverapi.CallCancel, driverapi.Arguments{})
	case policy.Nothing, policy.TakeSlot, policy.Withhold, policy.EvictPods: // done by facts and publish
	}
	return nil
}

// evict evicts the pods among the users. The status names refusals with the pod.
func (s *Swaps) evict(ctx context.Context, version string, users []User) {
	var pods []eviction.Pod
	for _, u := range users {
		if u.Namespace != "" {
			pods = append(pods, u.pod())
		}
	}
	s.evictions.Evict(ctx, s.options.Clock.Now(), change(version), pods, s.options.Evict)
}

var errNoSocket = errors.New("its socket is in the folder of --state-dir, which is empty")

func (s *Swaps) call(ctx context.Context, name string, a driverapi.Arguments) (driverapi.Status, error) {
	if s.options.Socket == "" {
		return driverapi.Status{}, errNoSocket
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return driverapi.Call(ctx, s.options.Socket, name, a)
}

// publish publishes the progress, and logs each new state and act.
func (s *Swaps) publish(ctx context.Context, step policy.Step, version string, f policy.Facts) {
	now := policy.Status{Known: f.Host != nil || f.Silent == "", Wanted: version, State: step.State,
		Reason:  step.Reason,
		Percent: step.Percent, Digest: step.Digest, Withholds: step.Withholds, NeedsSlot: step.NeedsSlot,
		Reboot: step.Reboot}
	if f.Host != nil {
		now.Loaded = f.Host.LoadedVersion
		if f.Host.Change != nil {
			now.Holders = f.Host.Change.Holders
		}
	}
	last := s.status.Value()
	if now.Since = last.Since; now.State != last.State || now.Since.IsZero() {
		now.Since = s.options.Clock.Now()
	}
	if step.State != s.lastState || step.Act != s.lastAct && step.Act != policy.Nothing {
		klog.FromContext(ctx).Info("Change of the driver", "wanted", version, "state", string(step.State), "step",
			step.Act.String(), "reason", step.Reason)
	}
	s.lastState, s.lastAct = step.State, step.Act
	if !now.Equal(last) {
		s.status.Publish(now)
	}
}

// hostOf converts a status of gpu-driver to the types of the plan.
func hostOf(told driverapi.Status) *policy.Host {
	h := &policy.Host{LoadedVersion: told.LoadedVersion, LoadedDigest: told.LoadedDigest, Current: told.Current,
		Folders: told.Folders, Refusals: told.Refusals, Download: told.Download}
	if c := told.Change; c != nil {
		h.Change = &policy.Change{To: c.To, Phase: c.Step, Percent: c.Percent, Since: c.Since,
			Reason: c.Reason}
		for _, holder := range c.Holders {
			h.Change.Holders = append(h.Change.Holders, holder.Kind+" "+holder.Name)
		}
	}
	return h
}
