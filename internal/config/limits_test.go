package config_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// each returns what line writes of 0 to n-1.
func each(n int, line func(i int) string) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(line(i))
	}
	return b.String()
}

// threadTime returns how long the thread has been on a processor: what else the machine does is not
// in it.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// TestHostileFiles: no file takes long, and no list of what is wrong is long. A file with want is
// refused with it.
func TestHostileFiles(t *testing.T) {
	const limit = 10 * time.Second // a second without the race detector
	for name, tt := range map[string]struct {
		file string
		want string // the last problem, or the last warning of a file that is accepted
	}{
		"unknown keys": {
			file: each(60_000, func(i int) string { return fmt.Sprintf("k%d: 1\n", i) }) + "version: v1\n",
			want: "file: has 59950 more of these; they are not listed",
		},
		"one unknown key too many to list": {
			file: each(51, func(i int) string { return fmt.Sprintf("k%d: 1\n", i) }) + "version: v1\n",
			want: "file: has 1 more of these; they are not listed",
		},
		"as many unknown keys as are listed": {
			file: each(50, func(i int) string { return fmt.Sprintf("k%d: 1\n", i) }) + "version: v1\n",
			want: "line 50: k49: unknown key, ignored; known keys: version, flags, resources, sharing, imex, selectors, " +
				"units, health, driver, features, mig, rollout, dra",
		},
		"a key of a megabyte": {file: "version: v1\n? " + strings.Repeat("k", 1_000_000) + "\n: 1\n", want: "…"},
		"a name of a megabyte": {
			file: "flags: {migStrategy: " + strings.Repeat("k", 1_000_000) + "}", want: "…",
		},
		"selectors": {
			file: "selectors:\n" + each(2000, func(i int) string { return fmt.Sprintf("- {indices: [%d], exclude: true}\n", i) }),
		},
		"selectors of one GPU": {
			file: "selectors:\n" + each(2000, func(int) string { return "- {indices: [0], exclude: true}\n" }),
			want: "file: has 1949 more of these; they are not listed",
		},
		"selectors of one model": {
			file: "selectors:\n" + each(2000, func(int) string { return "- {models: ['*'], exclude: true}\n" }),
			want: "file: has 1949 more of these; they are not listed",
		},
		"as many models as may be": {
			file: "selectors:\n" + each(2048, func(i int) string {
				return fmt.Sprintf("- {models: ['%d*%s'], exclude: true}\n", 1000+i, strings.Repeat("x", 450))
			}),
		},
		"models": {
			file: "selectors:\n" + each(2049, func(i int) string { return fmt.Sprintf("- {models: [%d], exclude: true}\n", i) }),
			want: "line 2: selectors: have more than 2048 models together",
		},
		"two selectors of many GPUs": {
			file: "selectors:\n" + each(2, func(i int) string {
				return "- {exclude: true, indices: [" + each(60_000, func(j int) string { return fmt.Sprintf("%d,", 2*j+i) }) +
					"]}\n"
			}),
		},
		"rules": {
			file: "sharing: {timeSlicing: {resources: [" + each(15_000,
				func(i int) string { return fmt.Sprintf("{name: gpu, replicas: 2, devices: [%d]},", i) }) + "]}}",
		},
		"rules for all GPUs": {
			file: "sharing: {timeSlicing: {resources: [" + each(15_000,
				func(int) string { return "{name: gpu, replicas: 2}," }) + "]}}",
			want: "file: has 14949 more of these; they are not listed",
		},
		"strategies": {
			file: "flags: {plugin: {deviceListStrategy: '" + each(130_000,
				func(i int) string { return fmt.Sprintf("s%d,", i) }) + "'}}",
			want: "…",
		},
		"a merge bomb": {
			file: "a: &a {" + each(1000, func(i int) string { return fmt.Sprintf("k%d: 1,", i) }) + "}\nb: &b {<<: [" +
				strings.Repeat("*a, ", 1000) +
				"]}\nflags: {<<: [" + strings.Repeat("*b, ", 1000) + "]}\n",
			want: "file: has more than 131072 values; aliases count as often as they are used",
		},
		"a bomb for a key that takes several forms": {
			file: "a: &a [0,0,0,0,0,0,0,0,0,0]\nb: &b [" + strings.Repeat("*a,", 100) + "]\nc: &c [" + strings.Repeat("*b,",
				100) + "]\n" +
				"sharing: {timeSlicing: {resources: [" + each(1000, func(int) string { return "{devices: *c}," }) + "]}}",
			want: "file: has more than 131072 values; aliases count as often as they are used",
		},
		"nested lists":      {file: strings.Repeat("[", 1_000_000), want: "exceeded max depth"},
		"an endless string": {file: "a: \"" + strings.Repeat("a", 1_000_000), want: "unexpected end of stream"},
		"separators":        {file: strings.Repeat("---\n", 260_000)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			began := threadTime(t)
			_, warnings, err := config.Sources{}.Resolve("", []byte(tt.file))
			took := threadTime(t) - began
			if t.Logf("it took %v", took); took > limit {
				t.Errorf("it took %v", took)
			}
			said := warnings
			if invalid := (*config.Invalid)(nil); errors.As(err, &invalid) {
				said = invalid.Problems
			}
			if len(said) > 51 || len(warnings) > 51 {
				t.Errorf("%d problems, or %d warnings", len(said), len(warnings))
			}
			last := ""
			if len(said) > 0 {
				last = said[len(said)-1].String()
			}
			// What is there only once may be anywhere among other problems.
			if !slices.ContainsFunc(said, func(r config.Remark) bool { return strings.Contains(r.String(), tt.want) }) &&
				(tt.want != "" || last != "") {
				t.Errorf("it says last %.200q, want %q", last, tt.want)
			}
			for _, r := range said {
				if len(r.String()) > 2100 {
					t.Errorf("a sentence of %d bytes", len(r.String()))
				}
			}
		})
	}
}

// TestNonFiles: what is no regular file, or too large, is an error at once.
func TestNonFiles(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	fifo, large := filepath.Join(folder, "fifo"), filepath.Join(folder, "large")
	if err := errors.Join(syscall.Mkfifo(fifo, 0o600), os.WriteFile(large, make([]byte, 10<<20), 0o600)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		fifo: "is a FIFO, not a regular file", folder: "is a folder, not a regular file",
		large:       "is larger than 1048576 bytes",
		"/dev/zero": "is a device, not a regular file",
	} {
		if _, _, err := (config.Sources{}).LoadFile(path); err == nil || !strings.Contains(err.Error(), path+": "+want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
