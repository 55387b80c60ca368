package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// devices returns the devices that the node has for kubelet, index → UUID: GPUs that are plugged
// in, and in place of those in multi-instance mode their MIG devices.
func (s *stage) devices(ctx context.Context) (map[string]string, error) {
	var gpus []simulator.Status
	if err := s.call(ctx, "simulate.list", nil, &gpus); err != nil {
		return nil, err
	}
	devices := map[string]string{}
	for _, g := range gpus {
		switch {
		case g.State == "removed":
		case len(g.MIG) == 0:
			devices[strconv.Itoa(g.Index)] = g.UUID
		default:
			for _, m := range g.MIG {
				devices[fmt.Sprintf("%d:%d", g.Index, m.Index)] = m.UUID
			}
		}
	}
	return devices, nil
}

// wanted returns the devices that kubelet has to have: ID → true if Healthy.
func (s *stage) wanted(ctx context.Context, o outcome) (map[string]bool, error) {
	if o.none {
		return map[string]bool{}, nil
	}
	has, err := s.devices(ctx)
	if err != nil {
		return nil, err
	}
	wanted := map[string]bool{}
	add := func(uuid string, healthy bool) {
		if s.machine.replicas == 0 {
			wanted[uuid] = healthy
		}
		for i := range s.machine.replicas {
			wanted[fmt.Sprintf("%s::%d", uuid, i)] = healthy
		}
	}
	for index, uuid := range has {
		gpu, _, _ := strings.Cut(index, ":")
		if !slices.Contains(o.gone, index) && !slices.Contains(o.gone, gpu) {
			add(uuid, !o.all && !slices.Contains(o.bad, index))
		}
	}
	for index, uuid := range s.had {
		if o.leaving && has[index] != uuid {
			add(uuid, false)
		}
	}
	s.had = has
	return wanted, nil
}

// kubelet returns the devices that kubelet has, of all resources: ID → true if Healthy.
func (s *stage) kubelet() map[string]bool {
	devices := map[string]bool{}
	for resource := range s.Resources() {
		maps.Copy(devices, s.Devices(resource))
	}
	return devices
}

// await waits until kubelet has what it has to, and returns how long after began that was.
func (s *stage) await(ctx context.Context, began time.Time, within time.Duration,
	wanted map[string]bool) (time.Duration, error) {
	ctx, cancel := context.WithDeadline(ctx, began.Add(within))
	defer cancel()
	if s.WaitFor(ctx, func() bool { return maps.Equal(s.kubelet(), wanted) }) != nil {
		return 0, fmt.Errorf("not within %s: %s", short(within), s.difference(wanted))
	}
	return time.Since(began), nil
}

// hold watches that kubelet goes on having what it has to.
func (s *stage) hold(ctx context.Context, during time.Duration, wanted map[string]bool) error {
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	if s.WaitFor(ctx, func() bool { return !maps.Equal(s.kubelet(), wanted) }) == nil {
		return fmt.Errorf("it did not stay so: %s", s.difference(wanted))
	}
	return nil
}

// difference says what kubelet has that it should not, and the other way round.
func (s *stage) difference(wanted map[string]bool) string {
	word := func(devices map[string]bool, id string) string {
		healthy, ok := devices[id]
		switch {
		case !ok:
			return "missing"
		case healthy:
			return "Healthy"
		}
		return "Unhealthy"
	}
	has := s.kubelet()
	var different []string
	for _, id := range slices.Sorted(maps.Keys(has)) {
		if is, want := word(has, id), word(wanted, id); is != want {
			different = append(different, fmt.Sprintf("%s is %s and not %s", id, is, want))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		if _, ok := has[id]; !ok {
			different = append(different, id+" is missing")
		}
	}
	return strings.Join(different, ", ")
}

// A status is what is needed of what the daemon's status says.
type status struct {
	Stale   string   `json:"stale"`
	Node    string   `json:"node"`
	Quiet   bool     `json:"quiet"`
	LeftOut []string `json:"leftOut"`
	Config  string   `json:"configError"`
	GPUs    []struct {
		Index  string   `json:"index"`
		State  string   `json:"state"`
		Reason string   `json:"reason"`
		Remedy string   `json:"cure"`
		Events []string `json:"events"`
	} `json:"gpus"`
}

// sayings returns what the status says of devices, by index, and of the node, at "".
func (s *stage) sayings(ctx context.Context) (map[string]string, error) {
	var now status
	if err := s.call(ctx, "status", nil, &now); err != nil {
		return nil, err
	}
	said := map[string]string{"": fmt.Sprintf("node: %s; stale: %s; quiet: %t; configuration: %s; left out: %s",
		now.Node, now.Stale, now.Quiet, now.Config, strings.Join(now.LeftOut, "; "))}
	for _, g := range now.GPUs {
		said[g.Index] = fmt.Sprintf("%s (%s): %s; %s", g.State, g.Remedy, g.Reason, strings.Join(g.Events, "; "))
	}
	return said, nil
}

// said is an error as long as the status does not say what it has to.
func (s *stage) said(ctx context.Context, patterns map[string]string) error {
	if len(patterns) == 0 {
		return nil
	}
	said, err := s.sayings(ctx)
	if err != nil {
		return err
	}
	for index, pattern := range patterns {
		if !regexp.MustCompile(pattern).MatchString(said[index]) {
			return fmt.Errorf("the status says %q of %q, and not %q", said[index], index, pattern)
		}
	}
	return nil
}

// seen says what kubelet has now: how many of its devices are Healthy, and what the status says of
// the others.
func (s *stage) seen(ctx context.Context) string {
	devices := s.kubelet()
	if len(devices) == 0 {
		return "nothing"
	}
	healthy := 0
	for _, ok := range devices {
		if ok {
			healthy++
		}
	}
	text := fmt.Sprintf("%d of %d", healthy, len(devices))
	said, err := s.sayings(ctx)
	if err != nil {
		return text
	}
	delete(said, "")
	for _, index := range slices.Sorted(maps.Keys(said)) {
		if state, _, _ := strings.Cut(said[index], ":"); !strings.HasPrefix(state, "Healthy") {
			return text + ", " + index + " " + state
		}
	}
	return text
}

// need is an error if the daemon needs more than it may.
func (s *stage) need() error {
	pid := s.Running().Pid
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return err
	}
	if len(threads) > maxThreads {
		err = fmt.Errorf("the daemon has %d threads", len(threads))
	}
	used, lived, cpuErr := times(pid)
	if may := startCPU + time.Duration(maxCPU*float64(lived)); cpuErr == nil && used > may {
		cpuErr = fmt.Errorf("the daemon used %s of CPU in %s", short(used), short(lived))
	}
	return errors.Join(err, cpuErr)
}

// clockTick is the unit of times in proc(5)'s stat: USER_HZ is 100 on every architecture that Go
// runs on.
const clockTick = 10 * time.Millisecond

// times returns how much CPU a process has used and how long it has lived.
func times(pid int) (used, lived time.Duration, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	uptime, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, 0, err
	}
	up, err := strconv.ParseFloat(strings.Fields(string(uptime))[0], 64)
	if err != nil {
		return 0, 0, err
	}
	// The program's name, in parentheses, may hold blanks. Behind it: utime, stime and starttime are
	// fields 14, 15 and 22.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks [3]time.Duration
	for i, field := range []int{14, 15, 22} {
		n, err := strconv.ParseInt(fields[field-3], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		ticks[i] = time.Duration(n) * clockTick
	}
	return ticks[0] + ticks[1], time.Duration(up*float64(time.Second)) - ticks[2], nil
}
