package cli_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestCheckAndDaemonAgree: config check, a starting daemon and a daemon that rereads its file agree
// on every file.
func TestCheckAndDaemonAgree(t *testing.T) {
	folder := t.TempDir()
	good := filepath.Join(folder, "good.yaml")
	if err := os.WriteFile(good, []byte("version: v1\nflags: {migStrategy: mixed}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"good":            "version: v1\nflags: {migStrategy: single}\n",
		"warnings":        "flags: {gfd: {oneshot: true}}\nnothing: 1\n",
		"problems":        "flags: {migStrategy: many, gdsEnabled: 3}\n",
		"two documents":   "version: v1\n---\nversion: v1\n",
		"text after JSON": `{"version": "v1"} {}`,
		"ignored by NVIDIA": "sharing: {timeSlicing: {resources: [{name: gpu, rename: a, devices: [0], replicas: 2}, " +
			"{name: gpu, replicas: 3}]}}\n",
		"ignored here": "flags: {compatibility: nvidia}\nresources: {gpus: [{pattern: '', name: a}]}\n" +
			"sharing: {timeSlicing: {resources: [{name: gpu, devices: [], replicas: 2}]}}\n",
		"refused by NVIDIA": "imex: {channelIDs: [0, 0]}\nsharing: {timeSlicing: }\n" +
			"resources: {gpus: [{pattern: '*', name: 123}]}\n",
		"a relative path":    "flags: {nvidiaDriverRoot: run}\n",
		"JSON":               `{"version": "v1", "flags": {"migStrategy": "single"}}`,
		"duration, no unit":  "health: {unknownGrace: 10}\n",
		"tab":                "\tversion: v1\n",
		"bytes":              "\x00\xff\xfe",
		"a megabyte":         "version: v1\n" + strings.Repeat("#", 1<<20-12),
		"a byte more":        "version: v1\n" + strings.Repeat("#", 1<<20-11),
		"a link in the file": "a: &a [*a]\n",
		"unknown keys":       unknownKeys(60_000),
		"a merge bomb": "a: &a {b: 1}\nb: &b {<<: [" + strings.Repeat("*a, ", 400) + "]}\nflags: {<<: [" +
			strings.Repeat("*b, ", 400) + "]}\n",
		"selectors":     "selectors:\n" + strings.Repeat("- {indices: [0], exclude: true}\n", 2000),
		"ten megabytes": strings.Repeat("#", 10<<20),
		"FIFO":          "",
		"folder":        "",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(folder, name)
			var err error
			switch name {
			case "FIFO":
				err = syscall.Mkfifo(path, 0o600)
			case "folder":
				err = os.Mkdir(path, 0o700)
			default:
				err = os.WriteFile(path, []byte(text), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			printed, checked := run(t, "config", "check", path)
			_, warnings, started := config.Sources{}.LoadFile(path)
			for _, w := range warnings {
				if !strings.Contains(printed, w.String()) {
					t.Errorf("check printed %q, and the daemon says %q", printed, w)
				}
			}
			if said := strings.Count(printed, "\n"); started == nil && said > len(warnings)+1 {
				t.Errorf("check printed %d lines, and the daemon has %d warnings:\n%s", said, len(warnings), printed)
			}
			if same, other := problems(checked), problems(started); same != other {
				t.Errorf("check says %q, a daemon that starts %q", same, other)
			}
			if same, other := problems(started), problems(readAgain(t, good, path)); same != other {
				t.Errorf("a daemon that starts says %q, one that reads it again %q", same, other)
			}
		})
	}
}

func unknownKeys(n int) string {
	var file strings.Builder
	for i := range n {
		fmt.Fprintf(&file, "k%d: 1\n", i)
	}
	return file.String()
}

// readAgain returns the errors of a Watcher with the configuration of one file that reads another
// in its place.
func readAgain(t *testing.T, first, second string) error {
	t.Helper()
	link := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.Symlink(first, link); err != nil {
		t.Fatal(err)
	}
	c, _, err := config.Sources{}.LoadFile(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(link), os.Symlink(second, link)); err != nil {
		t.Fatal(err)
	}
	w := config.NewWatcher(config.Sources{}, c, clock.RealClock{})
	_, published := w.Configs().Latest()
	_, failed := w.Errors().Latest()
	go func() { _ = w.Run(t.Context()) }()
	select {
	case <-published:
	case <-failed:
	case <-time.After(time.Minute):
		t.Fatal("the Watcher says nothing")
	}
	return w.Errors().Value()
}

// problems returns the problems of a file without their formatting.
func problems(err error) string {
	if invalid := (*config.Invalid)(nil); errors.As(err, &invalid) {
		var texts []string
		for _, p := range invalid.Problems {
			texts = append(texts, p.String())
		}
		return strings.Join(texts, "\n")
	}
	if err == nil {
		return ""
	}
	_, what, _ := strings.Cut(err.Error(), ": is ") // the path differs
	return "it is " + what
}
