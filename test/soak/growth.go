package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// A sample is what a daemon needs at one moment.
type sample struct {
	at time.Duration
	// resident and anonymous are memory in MB: all pages, and those that are not of files.
	resident, anonymous              float64
	threads, descriptors, goroutines float64
	cpu                              time.Duration
	pid                              int
}

// kB is the unit of sizes in proc(5), in MB.
const kB = 1.024e-3

// take measures a process.
func take(pid int) (sample, error) {
	s := sample{pid: pid}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return s, err
	}
	s.resident, s.threads = field(string(status), "VmRSS:")*kB, field(string(status), "Threads:")
	s.anonymous = field(string(status), "RssAnon:") * kB
	descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return s, err
	}
	s.descriptors = float64(len(descriptors))
	s.cpu, err = cpu(pid)
	return s, err
}

// field returns the number after a name.
func field(text, name string) float64 {
	_, rest, found := strings.Cut(text, name)
	if !found {
		return 0
	}
	value, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	if err != nil {
		return 0
	}
	return value
}

// clockTick is the unit of times in proc(5)'s stat: USER_HZ is 100 on every architecture that Go
// runs on.
const clockTick = 10 * time.Millisecond

// cpu returns the CPU time that a process has used.
func cpu(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var sum time.Duration
	for _, at := range []int{11, 12} { // utime and stime, counted from the field after the name
		ticks, err := strconv.ParseInt(fields[at], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(ticks) * clockTick
	}
	return sum, nil
}

// measure takes samples of the first daemon until ctx ends.
func (s *stage) measure(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if now, ok := s.sampleNow(); ok {
			s.mu.Lock()
			s.samples = append(s.samples, now)
			s.mu.Unlock()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *stage) sampleNow() (sample, bool) {
	daemons := s.running()
	if len(daemons) == 0 {
		return sample{}, false
	}
	process := daemons[0].Running()
	if process == nil {
		return sample{}, false
	}
	now, err := take(process.Pid)
	if text, scrapeErr := s.scrape(context.Background(), daemons[0], "/metrics"); scrapeErr == nil {
		now.goroutines = field("\n"+text, "\ngo_goroutines ")
	}
	now.at = time.Since(s.began)
	return now, err == nil
}

// A limit is how much a figure may grow.
type limit struct {
	name string
	unit string
	of   func(sample) float64
	// perHour is the steepest slope that is allowed, once as many samples as slopeNeeds were taken in
	// equal states; rise is how far the last may be over the first otherwise.
	perHour, rise float64
}

var limits = []limit{
	{"resident memory", "MB", func(s sample) float64 { return s.resident }, 4, 12},
	{"anonymous memory", "MB", func(s sample) float64 { return s.anonymous }, 4, 12},
	{"threads", "", func(s sample) float64 { return s.threads }, 12, 12},
	{"descriptors", "", func(s sample) float64 { return s.descriptors }, 4, 12},
	{"goroutines", "", func(s sample) float64 { return s.goroutines }, 6, 25},
}

// slopeNeeds is how many samples in equal states make a slope, and for how long they have to be
// apart. Go keeps its threads and most of its memory: both follow the busiest moment so far, which
// rises in steps that become rarer. A slope of a short time tells nothing of that. Threads have
// twice the slope of goroutines for that reason: one that does not come back from a call holds its
// goroutine, so the limit of goroutines finds it.
const (
	slopeNeeds = 6
	slopeSpan  = 30 * time.Minute
)

// growth returns a line for each figure, and what has grown too much. The first samples, up to a
// fifth of the time, are those of a process that still warms up.
func growth(samples []sample) (lines, wrong []string) {
	if len(samples) < 2 {
		return nil, nil
	}
	warm := samples
	for len(warm) > 2 && warm[0].at < samples[len(samples)-1].at/5 {
		warm = warm[1:]
	}
	first, last := warm[0], warm[len(warm)-1]
	for _, l := range limits {
		if l.of(last) == 0 {
			continue // it is not told
		}
		line := fmt.Sprintf("%-20s %6.1f → %6.1f %s", l.name, l.of(first), l.of(last), l.unit)
		if len(warm) >= slopeNeeds && last.at-first.at >= slopeSpan {
			perHour := slope(warm, l.of) * 3600
			line += fmt.Sprintf(", slope %+.2f an hour of at most %.0f, from %d samples", perHour, l.perHour, len(warm))
			if perHour > l.perHour {
				wrong = append(wrong, fmt.Sprintf("%s grows by %.2f %s an hour", l.name, perHour, l.unit))
			}
		} else if rise := l.of(last) - l.of(first); rise > l.rise {
			wrong = append(wrong, fmt.Sprintf("%s grew by %.1f %s in %s", l.name, rise, l.unit, short(last.at-first.at)))
		}
		lines = append(lines, line)
	}
	return lines, wrong
}

// slope returns the slope of a figure a second, by least squares.
func slope(samples []sample, of func(sample) float64) float64 {
	n := float64(len(samples))
	var sumX, sumY, sumXX, sumXY float64
	for _, s := range samples {
		x, y := s.at.Seconds(), of(s)
		sumX, sumY, sumXX, sumXY = sumX+x, sumY+y, sumXX+x*x, sumXY+x*y
	}
	below := n*sumXX - sumX*sumX
	if below == 0 {
		return 0
	}
	return (n*sumXY - sumX*sumY) / below
}
