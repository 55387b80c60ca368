package hardware_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A footprint is what a process uses.
type footprint struct {
	cpu         time.Duration // since its start
	rss, anon   float64       // MB of 1,000,000 bytes, the latter of its own
	threads     int
	descriptors int
	nvidia      []string // what of the driver is open
}

func (f footprint) String() string {
	return fmt.Sprintf("%.1f MB resident, %.1f MB of it its own, %d threads, %d descriptors, %d of them of the driver",
		f.rss, f.anon, f.threads, f.descriptors, len(f.nvidia))
}

// footprintOf reads what a process uses now.
func footprintOf(t *testing.T, pid int) (f footprint) {
	t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	text, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, rest, _ := strings.Cut(line, ":")
		n, _ := number(strings.TrimSpace(rest))
		switch name {
		case "VmRSS":
			f.rss = n * 1024 / 1e6
		case "RssAnon":
			f.anon = n * 1024 / 1e6
		case "Threads":
			f.threads = int(n)
		}
	}
	links, _ := filepath.Glob(filepath.Join(proc, "fd", "*"))
	for _, l := range links {
		to, err := os.Readlink(l)
		if err != nil {
			continue // it was closed meanwhile
		}
		f.descriptors++
		if strings.HasPrefix(to, "/dev/nvidia") {
			f.nvidia = append(f.nvidia, to)
		}
	}
	tasks, _ := filepath.Glob(filepath.Join(proc, "task", "*", "schedstat"))
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		var ns int64
		if _, scanned := fmt.Sscan(string(text), &ns); err == nil && scanned == nil {
			f.cpu += time.Duration(ns)
		}
	}
	return f
}
