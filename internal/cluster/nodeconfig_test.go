package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const configLabel = "nvidia.com/device-plugin.config"

// A chooser is a process whose configuration file is chosen by a label. It starts on a node with
// the files a and b; b is the default.
type chooser struct {
	*process
	dir, state string
}

func (s *stage) chooser() *chooser {
	s.Helper()
	c := &chooser{dir: s.TempDir(), state: filepath.Join(s.TempDir(), "state")}
	c.process = s.new(config.Config{Startup: config.Startup{StateDir: c.state, NodeConfig: config.NodeConfig{Dir: c.dir, Label: configLabel,
		Default: "b"}}})
	c.add("a")
	c.add("b")
	return c
}

func (c *chooser) add(name string) {
	c.s.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), nil, 0o600); err != nil {
		c.s.Fatal(err)
	}
}

// begin starts the process. Every chosen file except invalid is a valid configuration.
func (c *chooser) begin() *chooser {
	c.start()
	go func() {
		for c.s.Context().Err() == nil {
			chosen, changed := c.chosen.Latest()
			if !strings.HasSuffix(chosen.File, "invalid") {
				c.configure(func(now *config.Config) { now.File = chosen.File })
			}
			feed.WaitAny(c.s.Context(), changed)
		}
	}()
	return c
}

// label sets the label of the Node; empty removes it.
func (c *chooser) label(value string) {
	c.s.Helper()
	c.s.change(func(n *corev1.Node) {
		if n.Labels = map[string]string{configLabel: value}; value == "" {
			n.Labels = nil
		}
	})
}

// after waits, and checks the choice.
func (c *chooser) after(wait time.Duration, file, problem string) {
	c.s.Helper()
	c.s.pass(wait)
	want := ""
	if file != "" {
		want = filepath.Join(c.dir, file)
	}
	got := c.chosen.Value()
	if got.File != want || (problem == "") != (got.Err == nil) || !strings.Contains(fmt.Sprint(got.Err), problem) {
		c.s.Errorf("chosen is %q, %v, want %q, %q", got.File, got.Err, file, problem)
	}
}

// save writes the choice of an earlier process.
func (c *chooser) save(text string) {
	c.s.Helper()
	if err := errors.Join(os.MkdirAll(c.state, 0o700), os.WriteFile(filepath.Join(c.state, "node-config.json"),
		[]byte(text), 0o600)); err != nil {
		c.s.Fatal(err)
	}
}

// saved checks the choice that the next process starts with.
func (c *chooser) saved(want string) {
	c.s.Helper()
	text, err := os.ReadFile(filepath.Join(c.state, "node-config.json"))
	if err != nil || !strings.Contains(string(text), fmt.Sprintf("%q", want)) {
		c.s.Errorf("saved is %s, %v, want %q", text, err, want)
	}
}

// The first choice is the saved choice if the file still exists; otherwise the choice of the API
// server if it responds in time; otherwise that of a node without the label.
func TestFirstChoice(t *testing.T) {
	last := func(name string) string { return fmt.Sprintf(`{"version":1,"file":%q}`, name) }
	for name, tt := range map[string]struct {
		last    string // empty for none
		label   string
		begin   func(*stage)
		want    string
		problem string
		wait    time.Duration
	}{
		"the last one":                      {last: last("a"), want: "a"},
		"the last one, which was no file":   {last: last(""), want: ""},
		"the last one is gone":              {last: last("c"), label: "a", want: "a"},
		"the last one cannot be read":       {last: "{", label: "a", want: "a"},
		"the last one is of another kind":   {last: `{"version":2,"file":"b"}`, label: "a", want: "a"},
		"what the API server says":          {label: "a", want: "a"},
		"no label":                          {want: "b"},
		"a label that names no file":        {label: "c", want: "b", problem: configLabel + "=c"},
		"a label that leaves the directory": {label: "..", want: "b", problem: "no such file"},
		"no answer": {
			begin: func(s *stage) { s.server.SetBlackHole(true) }, want: "b", problem: "is not known", wait: 2 * time.Second,
		},
		"no answer, and the last one is gone": {
			last: last("c"), begin: func(s *stage) { s.server.SetBlackHole(true) }, want: "b", problem: "is not known",
			wait: 2 * time.Second,
		},
		"no right": {begin: func(s *stage) { s.server.SetFault(apiserver.Fault{Status: 403}) }, want: "b", problem: "403"},
		"no node yet": {begin: func(s *stage) {
			if err := s.server.DeleteNode(nodeName); err != nil {
				s.Fatal(err)
			}
		}, want: "b", problem: "no such node"},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				c := s.chooser()
				c.label(tt.label)
				if tt.last != "" {
					c.save(tt.last)
				}
				if tt.begin != nil {
					tt.begin(s)
				}
				began := time.Now()
				c.connect(s.Context())
				if took := time.Since(began); took != tt.wait {
					s.Errorf("the start took %v, want %v", took, tt.wait)
				}
				c.after(0, tt.want, tt.problem)
				damaged, err := os.ReadFile(filepath.Join(c.state, "node-config.json.damaged"))
				if set := strings.HasPrefix(tt.last, "{\"version\":2") || tt.last == "{"; set != (err == nil) ||
					string(damaged) != tt.last && set {
					s.Errorf("set aside is %q, %v", damaged, err)
				}
				s.server.SetBlackHole(false)
			})
		})
	}
}

// Of several changes within two seconds, the last one counts. With an unknown name the file in
// force stays, until the named file exists. An invalid file is chosen, but not saved for the next
// process.
func TestConfigLabel(t *testing.T) {
	onStage(t, func(s *stage) {
		c := s.chooser()
		c.label("a")
		c.begin()
		c.after(time.Minute, "a", "")
		c.saved("a")
		c.label("b")
		c.after(0, "b", "")
		c.saved("b")

		c.label("c")
		c.after(time.Second, "b", "")
		c.label("invalid")
		c.after(0, "b", "")
		c.label("a")
		c.after(999*time.Millisecond, "b", "")
		c.after(time.Millisecond, "a", "")
		c.saved("a")
		c.after(2*time.Second, "a", "")

		c.label("c")
		c.after(0, "a", configLabel+"=c")
		c.saved("a")
		c.after(time.Hour, "a", configLabel+"=c")
		c.add("c")
		c.after(10*time.Second, "c", "")
		c.saved("c")

		c.add("invalid")
		c.label("invalid")
		c.after(2*time.Second, "invalid", "")
		c.saved("c")
		c.label("d") // nor is it what an unknown name goes back to
		c.after(2*time.Second, "c", configLabel+"=d")
		c.saved("c")

		c.label("")
		c.after(2*time.Second, "b", "")
		c.saved("b")
	})
}

// The last value of the label stays in force while the API server is unavailable or the Node is
// deleted, also during a pending change.
func TestConfigLabelOfDeletedNode(t *testing.T) {
	onStage(t, func(s *stage) {
		c := s.chooser()
		c.save(`{"version":1,"file":"a"}`)
		s.server.Stop()
		c.begin()
		c.after(time.Hour, "a", "")
		c.label("b")
		if err := s.server.Resume(); err != nil {
			s.Fatal(err)
		}
		c.after(6*time.Minute, "b", "")
		c.label("a")
		c.after(3*time.Second, "a", "")
		c.label("b")
		c.after(0, "b", "")
		c.label("a")
		if err := s.server.DeleteNode(nodeName); err != nil {
			s.Fatal(err)
		}
		c.after(time.Hour, "b", "")
		c.label("a")
		c.after(0, "a", "")
	})
}

// A full disk does not prevent changes by the label. The choice is saved later.
func TestConfigLabelWithFullDisk(t *testing.T) {
	onStage(t, func(s *stage) {
		c := s.chooser()
		if err := os.WriteFile(c.state, nil, 0o600); err != nil {
			s.Fatal(err)
		}
		c.label("a")
		c.begin()
		c.after(time.Minute, "a", "")
		c.label("b")
		c.after(2*time.Second, "b", "")
		if err := os.Remove(c.state); err != nil {
			s.Fatal(err)
		}
		c.after(10*time.Second, "b", "")
		c.saved("b")
	})
}

// A missing directory of configurations is reported, and the file in force stays.
func TestNoDirectoryOfConfigurations(t *testing.T) {
	onStage(t, func(s *stage) {
		c := s.chooser()
		c.label("a")
		c.begin()
		c.after(time.Minute, "a", "")
		if err := os.Rename(c.dir, c.dir+".moved"); err != nil {
			s.Fatal(err)
		}
		c.after(10*time.Second, "a", "no such file")
		c.connect(s.Context()) // a process that starts now
		c.after(0, "", "no such file")
		if err := os.Rename(c.dir+".moved", c.dir); err != nil {
			s.Fatal(err)
		}
	})
}

// A process without a node name follows no label: its configuration is rejected.
func TestNoNodeName(t *testing.T) {
	onStage(t, func(s *stage) {
		c := s.chooser()
		c.Startup.NodeName = ""
		began := time.Now()
		if c.connect(s.Context()); c.chosen.Value() != (config.Chosen{}) || s.requests() > 0 || time.Since(began) > 0 {
			s.Errorf("chosen is %+v", c.chosen.Value())
		}
	})
}

// The file of a node by its label, the default and the fallbacks.
func TestChoose(t *testing.T) {
	all := []config.Fallback{config.FallbackNamed, config.FallbackSingle, config.FallbackEmpty}
	var many []string
	for i := range 300 {
		many = append(many, fmt.Sprint(1000+i))
	}
	for name, tt := range map[string]struct {
		label, byDefault string
		fallbacks        []config.Fallback
		files            []string
		want             string
		problem          string
	}{
		"the label's": {label: "a", byDefault: "b", files: []string{"a", "b"}, want: "a"},
		"no label":    {byDefault: "b", fallbacks: all, files: []string{"a", "b", "default"}, want: "b"},
		"no label, an unknown default": {byDefault: "c", fallbacks: all, files: []string{"a"},
			problem: "the default configuration is c"},
		"the named one":                 {fallbacks: all, files: []string{"a", "default"}, want: "default"},
		"the single one":                {fallbacks: all, files: []string{"a"}, want: "a"},
		"none of several":               {fallbacks: all, files: []string{"a", "b"}},
		"none of none":                  {fallbacks: all},
		"single, and there are several": {fallbacks: all[:2], files: []string{"a", "b"}, problem: "no fallback is possible"},
		"empty before named":            {fallbacks: []config.Fallback{"empty", "named"}, files: []string{"default"}},
		"an unknown fallback": {fallbacks: []config.Fallback{"named", "last"}, files: []string{"a"},
			problem: `"last" is not one of: named`},
		"an unknown one comes too late": {fallbacks: []config.Fallback{"named", "last"}, files: []string{"default"},
			want: "default"},
		"nothing is said":     {files: []string{"default"}, problem: "no fallback is possible"},
		"no files":            {label: "a", problem: "no files"},
		"kubelet's own names": {label: "..data", files: []string{"..data", "a"}, problem: "it has: a"},
		"a folder":            {label: "folder", files: []string{"folder/a", "b"}, problem: "it has: b"},
		"several files": {label: "x", files: strings.Split("abcdefgh", ""),
			problem: "a, b, c, d, e, f, g, h"},
		"very many files are not listed": {label: "x", files: many, problem: "1081, 1082 and 217 more"},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				dir := s.TempDir()
				for _, name := range tt.files {
					path := filepath.Join(dir, name)
					if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
						s.Fatal(err)
					}
				}
				p := s.new(config.Config{Startup: config.Startup{NodeConfig: config.NodeConfig{Dir: dir, Label: configLabel, Default: tt.byDefault,
					Fallbacks: tt.fallbacks}}})
				(&chooser{process: p}).label(tt.label)
				p.connect(s.Context())
				got := p.chosen.Value()
				if file := strings.Trim(strings.TrimPrefix(got.File, dir), "/"); file != tt.want ||
					(tt.problem == "") != (got.Err == nil) ||
					!strings.Contains(fmt.Sprint(got.Err), tt.problem) {
					s.Errorf("%q, %v, want %q, %q", got.File, got.Err, tt.want, tt.problem)
				}
			})
		})
	}
}
