package driverhost

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// status returns what the host knows.
func (h *Host) status(ctx context.Context) (driverapi.Status, error) {
	release, err := h.kernel.Release()
	if err != nil {
		return driverapi.Status{}, err
	}
	state, err := h.kernel.State()
	if err != nil {
		return driverapi.Status{}, err
	}
	s := driverapi.Status{Kernel: release, BootID: h.boot, LoadedVersion: state.Version}
	v, err := h.judgeInTime(ctx)
	if err != nil {
		return driverapi.Status{}, err
	}
	s.Refusals = v.refusals
	if s.Current, err = h.store.Current(); err != nil {
		s.Refusals = append(s.Refusals, err.Error())
	}
	if h.fetcher != nil {
		s.Download = h.fetcher.Status()
	}
	s.Folders = h.folders(v)
	h.mu.Lock()
	defer h.mu.Unlock()
	if state.Version != "" {
		s.LoadedDigest = h.loaded()
	}
	if c := h.Change; c != nil {
		s.Change = &driverapi.Change{From: c.From, To: c.To, Step: c.Step, Percent: h.percent, Since: c.Since,
			Reason: c.Reason, Holders: h.holders, Loads: c.Loads, Note: c.Note}
		if h.reason != "" {
			s.Change.Reason = strings.TrimPrefix(c.Reason+"; "+h.reason, "; ")
		}
		switch c.Step {
		case driverapi.StepUnproven, driverapi.StepNextBoot:
			if s.Change.Percent = 100; c.BootID != h.boot { // the first act in this boot
				s.Change.Step, s.Change.Percent = driverapi.StepLoading, 0
			}
		case driverapi.StepFailed:
			s.Change.Percent = 100
		default:
		}
	}
	return s, nil
}

// folders returns the folders of the directory and of the sources, in the order of version and digest.
func (h *Host) folders(v judged) []driverapi.Folder {
	all := map[string]driverapi.Folder{}
	add := func(f driverstore.Folder, edit func(*driverapi.Folder)) {
		one, known := all[f.Digest]
		if !known {
			one = driverapi.Folder{Digest: f.Digest, Version: f.Manifest.Version, Kernels: f.Manifest.Releases(),
				Problem: v.problems[f.Digest]}
		}
		edit(&one)
		all[f.Digest] = one
	}
	archives := h.store.Archives()
	here, _ := h.store.Folders()                // an unreadable directory has none
	sources, _ := driverstore.Find(h.o.Sources) // the log has the errors
	for _, f := range here {
		add(f, func(one *driverapi.Folder) { one.IsHere, one.Archives = true, archives[f.Digest] })
	}
	for _, f := range sources {
		add(f, func(one *driverapi.Folder) { one.Source = f.Path })
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for digest, problem := range h.problems {
		if one, known := all[digest]; known && one.Problem == "" {
			one.Problem = problem
			all[digest] = one
		}
	}
	for digest, percent := range h.placing {
		if one, known := all[digest]; known {
			one.Percent = percent
			all[digest] = one
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b driverapi.Folder) int {
		return strings.Compare(a.Version+" "+a.Digest, b.Version+" "+b.Digest)
	})
}

// factsAge is how old the facts of a status may be. Reading them takes up to factsLimit.
const factsAge = time.Minute

// judged is what the node says about the folders and about the owner of its driver.
type judged struct {
	at       time.Time
	refusals []string
	problems map[string]string // why a folder cannot be loaded, by digest
	sources  string            // errors of the sources
	// nextKernel is the release of the kernel of the next boot; empty if the node does not tell it.
	nextKernel string
}

// factsLimit limits the time for reading facts. It is long because a busy node is slow, and a change of
// the driver must not fail or miss a user of the driver for that.
const factsLimit = 20 * time.Second

// places are the locations of the node's files.
func (h *Host) places() driverfacts.Places {
	return driverfacts.Places{Kernel: h.kernel.Files(), Host: h.kernel.Files(), Limit: factsLimit, Readers: &h.readers}
}

// errReading is the error of a call that ends before the facts are read.
var errReading = errors.New("gpu-driver is still reading the files of the node: the node is very busy, or a file " +
	"system hangs; run the command again")

// judgeInTime returns the facts for a status. Near the deadline of ctx, older facts do.
func (h *Host) judgeInTime(ctx context.Context) (judged, error) {
	waiting := ctx
	if deadline, limited := ctx.Deadline(); limited {
		var cancel context.CancelFunc
		waiting, cancel = context.WithDeadline(ctx, deadline.Add(-time.Second))
		defer cancel()
	}
	v, err := h.judge(waiting, factsAge)
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		if v = h.judged; !v.at.IsZero() {
			err = nil
		}
	}
	return v, err
}

// judgeNow returns facts whose reading ended after the begin of this call, or of the calls before it that
// ended without facts. So a node that needs longer than each call changes its driver all the same.
func (h *Host) judgeNow(ctx context.Context) (judged, error) {
	began, age := time.Now(), time.Duration(0)
	if !h.lateSince.IsZero() {
		began, age = h.lateSince, min(time.Since(h.lateSince), factsAge)
	}
	v, err := h.judge(ctx, age)
	if h.lateSince = (time.Time{}); err != nil {
		h.lateSince = began
	}
	return v, err
}

// judge returns the facts, which are at most of the given age. A reading in progress goes on after the end
// of ctx, and is the reading of all calls that need one.
func (h *Host) judge(ctx context.Context, age time.Duration) (judged, error) {
	h.mu.Lock()
	last := h.judged
	h.mu.Unlock()
	if age > 0 && time.Since(last.at) < age && !h.hasNew(last) {
		return last, nil
	}
	h.mu.Lock()
	ended := h.reading
	if ended == nil {
		ended = make(chan struct{})
		h.reading = ended
		go h.read(context.WithoutCancel(ctx), last)
	}
	h.mu.Unlock()
	select {
	case <-ended:
	case <-ctx.Done():
		return judged{}, errReading
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.judged, nil
}

// read reads the facts.
func (h *Host) read(ctx context.Context, last judged) {
	facts := h.places().Read(ctx)
	next := judged{at: time.Now(), problems: map[string]string{}}
	if facts.NextBoot.Known() {
		next.nextKernel = facts.NextBoot.Value.Release
	}
	facts.NextBoot.Missing = "The kernel of the next boot is not judged here"
	next.refusals = h.refusals(facts)
	for _, f := range h.everyFolder() {
		if _, known := next.problems[f.Digest]; !known {
			next.problems[f.Digest] = problem(f, facts)
		}
	}
	if _, err := driverstore.Find(h.o.Sources); err != nil {
		if next.sources = err.Error(); next.sources != last.sources {
			klog.FromContext(ctx).Error(err, "A folder among the sources cannot be used")
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.judged = next
	close(h.reading)
	h.reading = nil
}

// nextBootProblem returns why the kernel of the next boot cannot load a folder; empty if it can, or if
// that kernel is not known.
func (h *Host) nextBootProblem(digest string, v judged) string {
	for _, f := range h.everyFolder() {
		if f.Digest == digest && v.nextKernel != "" && !f.Manifest.HasKernel(v.nextKernel) {
			return driverkernel.NoModules(f.Manifest, v.nextKernel).Error()
		}
	}
	return ""
}

// hasNew reports whether a folder is there that was not judged.
func (h *Host) hasNew(v judged) bool {
	return slices.ContainsFunc(h.everyFolder(), func(f driverstore.Folder) bool {
		_, known := v.problems[f.Digest]
		return !known
	})
}

func (h *Host) everyFolder() []driverstore.Folder {
	here, _ := h.store.Folders()
	sources, _ := driverstore.Find(h.o.Sources)
	return append(here, sources...)
}

// problem returns why the running kernel or the GPUs of the node refuse a folder; empty if they do not.
func problem(f driverstore.Folder, facts preflight.Facts) string {
	if release := facts.Kernel.Value; release != "" && !f.Manifest.HasKernel(release) {
		return driverkernel.NoModules(f.Manifest, release).Error()
	}
	facts.Target = driverfacts.Target(f.Path, os.DirFS(f.Path))
	for _, finding := range preflight.ExamineNextBoot(facts) {
		if finding.Severity == diagnosis.Error {
			return finding.Message
		}
	}
	return ""
}

// refusals returns why the driver of the node must not be changed by this program.
func (h *Host) refusals(facts preflight.Facts) (all []string) {
	h.mu.Lock()
	digest := h.loaded()
	h.mu.Unlock()
	state, err := h.kernel.State()
	switch {
	case err != nil:
		all = append(all, fmt.Sprintf("the loaded modules cannot be read: %v", err))
	case state.Nouveau:
		all = append(all, "nouveau is loaded, and has the GPUs: add it to the modules that the kernel must not load "+
			"(blacklist nouveau), and restart the node")
	case len(state.Own) > 0 && digest == "":
		all = append(all, fmt.Sprintf("driver %s is loaded, and gpu-driver has not loaded it: remove what loads it, "+
			"and restart the node", state.Version))
	}
	if nodefiles.HidesProcesses(h.kernel.Files()) {
		all = append(all, hiddenProcesses)
	}
	for _, missing := range []string{facts.Owners.Missing, facts.Sets.Missing} {
		if missing != "" {
			all = append(all, "what installed the driver is not known: "+missing)
		}
	}
	for _, o := range facts.Owners.Value {
		if o.Kind == preflight.Image || o.Kind == preflight.GPUDriver {
			continue // without modules, the image brings no driver
		}
		all = append(all, fmt.Sprintf("the driver of this node belongs to %s (%s): remove it there first", o.Kind,
			o.Evidence))
	}
	for _, set := range facts.Sets.Value {
		i := slices.IndexFunc(set.Files, func(f *preflight.ModuleFile) bool {
			return !strings.HasPrefix(f.Path, driverfacts.CurrentModules)
		})
		if i >= 0 && set.Release == facts.Kernel.Value && len(all) == 0 {
			all = append(all, fmt.Sprintf("the node has a driver of its own, which the next boot may load (%s): "+
				"remove it first", set.Files[i].Path))
		}
	}
	return all
}
