package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

const testLabel = "nvidia.com/device-plugin.config"

// A scene is a node with a folder of configurations, and its state directory.
type scene struct {
	t       *testing.T
	dir     string
	state   string
	n       *nodeConfig
	nodes   *feed.Feed[kubeapi.Node]
	configs *feed.Feed[config.Config]
	answer  func(context.Context) (kubeapi.Node, error)
}

// newScene has the configurations a and b, and b as the default.
func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{
		t: t, dir: t.TempDir(), state: t.TempDir(), nodes: feed.New(kubeapi.Node{}), configs: feed.New(config.Config{}),
		answer: func(ctx context.Context) (kubeapi.Node, error) { <-ctx.Done(); return kubeapi.Node{}, ctx.Err() },
	}
	s.add("a")
	s.add("b")
	return s
}

func (s *scene) add(name string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), nil, 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// begin starts a process, and returns how long its first choice took.
func (s *scene) begin() time.Duration {
	s.t.Helper()
	s.n = &nodeConfig{
		options: config.NodeConfig{Dir: s.dir, Label: testLabel, Default: "b"}, stateDir: s.state,
		chosen: feed.New(config.Chosen{}), nodes: s.nodes, clock: clock.RealClock{}, write: writeChoice,
		get: func(ctx context.Context) (kubeapi.Node, error) { return s.answer(ctx) },
	}
	began := time.Now()
	s.n.start(s.t.Context())
	return time.Since(began)
}

// run runs it until the test ends. Every choice is taken for a valid configuration.
func (s *scene) run() {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan struct{}, 2)
	go func() {
		_ = s.n.run(ctx, s.configs)
		ended <- struct{}{}
	}()
	go func() {
		defer func() { ended <- struct{}{} }()
		for ctx.Err() == nil {
			chosen, changed := s.n.chosen.Latest()
			if s.configs.Value().File != chosen.File && !strings.HasSuffix(chosen.File, "invalid") {
				s.configs.Publish(config.Config{File: chosen.File})
			}
			select {
			case <-ctx.Done():
			case <-changed:
			}
		}
	}()
	s.t.Cleanup(func() { cancel(); <-ended; <-ended })
	synctest.Wait()
}

// labelled publishes the node with this value of the label; empty for none.
func (s *scene) labelled(uid, value string) {
	n := kubeapi.Node{UID: uid, Labels: map[string]string{}}
	if value != "" {
		n.Labels[testLabel] = value
	}
	s.nodes.Publish(n)
	synctest.Wait()
}

// after waits, and expects a choice then.
func (s *scene) after(wait time.Duration, file, problem string) {
	s.t.Helper()
	time.Sleep(wait)
	synctest.Wait()
	got := s.n.chosen.Value()
	want := file
	if file != "" {
		want = filepath.Join(s.dir, file)
	}
	if got.File != want || problem == "" && got.Err != nil || problem != "" && !strings.Contains(fmt.Sprint(got.Err), problem) {
		s.t.Errorf("chosen is %q, %v, want %q, %q", got.File, got.Err, file, problem)
	}
}

func (s *scene) saved(want string) {
	s.t.Helper()
	c, err := readChoice(s.state)
	if err != nil || (c == nil) != (want == "-") || c != nil && c.File != want {
		s.t.Errorf("saved is %v, %v, want %q", c, err, want)
	}
}

func answered(value string) func(context.Context) (kubeapi.Node, error) {
	return func(context.Context) (kubeapi.Node, error) {
		return kubeapi.Node{UID: "1", Labels: map[string]string{testLabel: value}}, nil
	}
}

func TestFirstChoice(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		last    string // "-" for none
		answer  func(context.Context) (kubeapi.Node, error)
		want    string
		problem string
		wait    time.Duration
	}{
		"the last one":                        {last: "a", want: "a"},
		"the last one, which was no file":     {last: "", want: ""},
		"the last one is gone":                {last: "c", answer: answered("a"), want: "a"},
		"what the API server says":            {last: "-", answer: answered("a"), want: "a"},
		"no label":                            {last: "-", answer: answered(""), want: "b"},
		"a label that names no file":          {last: "-", answer: answered("c"), want: "b", problem: testLabel + "=c"},
		"no answer":                           {last: "-", want: "b", problem: "is not known", wait: 2 * time.Second},
		"no answer, and the last one is gone": {last: "c", want: "b", problem: "is not known", wait: 2 * time.Second},
		"no right": {last: "-", answer: func(context.Context) (kubeapi.Node, error) {
			return kubeapi.Node{}, &kubeapi.Refused{Code: 403}
		}, want: "b", problem: "403"},
		"no node yet": {last: "-", answer: func(context.Context) (kubeapi.Node, error) {
			return kubeapi.Node{}, nil
		}, want: "b", problem: "no such node"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t)
				if tt.answer != nil {
					s.answer = tt.answer
				}
				if tt.last != "-" {
					if err := writeChoice(s.state, tt.last); err != nil {
						t.Fatal(err)
					}
				}
				if took := s.begin(); took != tt.wait {
					t.Errorf("the start took %v, want %v", took, tt.wait)
				}
				s.after(0, tt.want, tt.problem)
			})
		})
	}
}

func TestTheLabelIsFollowed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.answer = answered("a")
		s.begin()
		s.run()
		s.after(0, "a", "")
		s.saved("a")

		s.labelled("1", "b")
		s.after(0, "b", "")
		s.saved("b")

		// Of several changes within the time after one that was followed, the last one counts.
		s.labelled("1", "c")
		s.after(settle/2, "b", "")
		s.labelled("1", "invalid")
		s.labelled("1", "a")
		s.after(settle/2-time.Millisecond, "b", "")
		s.after(time.Millisecond, "a", "")
		s.saved("a")
		s.after(settle, "a", "")

		// A name that is unknown leaves what is in force, until there is such a file.
		s.labelled("1", "c")
		s.after(0, "a", testLabel+"=c")
		s.saved("a")
		s.after(time.Hour, "a", testLabel+"=c")
		s.add("c")
		s.after(rereadEvery, "c", "")
		s.saved("c")

		// An invalid file is chosen, and is not what the next process starts with. Nor is it what an unknown name goes back to.
		s.add("invalid")
		s.labelled("1", "invalid")
		s.after(settle, "invalid", "")
		s.saved("c")
		s.labelled("1", "d")
		s.after(settle, "c", testLabel+"=d")
		s.saved("c")

		s.labelled("1", "")
		s.after(settle, "b", "")
		s.saved("b")
	})
}

func TestTheNodeGoesAndComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		if err := writeChoice(s.state, "a"); err != nil {
			t.Fatal(err)
		}
		s.begin()
		s.run()
		s.after(time.Hour, "a", "") // the API server is away
		s.labelled("1", "a")
		s.after(time.Minute, "a", "")
		s.nodes.Publish(kubeapi.Node{})
		s.after(time.Hour, "a", "") // the node was deleted

		// It is deleted while a change waits.
		s.labelled("1", "b")
		s.labelled("1", "a")
		s.nodes.Publish(kubeapi.Node{})
		s.after(time.Minute, "b", "")

		s.labelled("2", "a")
		s.after(0, "a", "")
	})
}

// TestAFullDiskKeepsNothingFromTheLabel: the choice is saved when it can be.
func TestAFullDiskKeepsNothingFromTheLabel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		if err := errors.Join(os.Remove(s.state), os.WriteFile(s.state, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		s.answer = answered("a")
		s.begin()
		s.run()
		s.labelled("1", "b")
		s.after(settle, "b", "")
		if err := os.Remove(s.state); err != nil {
			t.Fatal(err)
		}
		s.after(rereadEvery, "b", "")
		s.saved("b")
	})
}

// TestAHungDiskKeepsNothingFromTheLabel: a write of the choice that does not return keeps no later change of the label from being
// followed, and the last choice is saved when it returns.
func TestAHungDiskKeepsNothingFromTheLabel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.answer = answered("a")
		s.begin()
		answers := make(chan struct{})
		writes := 0
		s.n.write = func(dir, name string) error {
			writes++
			<-answers
			return writeChoice(dir, name)
		}
		s.run()
		for range 10 {
			s.labelled("1", "b")
			s.after(settle, "b", "")
			s.labelled("1", "a")
			s.after(settle, "a", "")
		}
		if writes != 1 {
			t.Errorf("%d writes to a disk that hangs, want one", writes)
		}
		s.saved("-")
		close(answers)
		s.after(0, "a", "")
		s.saved("a")
	})
}

// TestWhatIsSaved: the name of the file in force, if it is the one that was chosen.
func TestWhatIsSaved(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		state   string
		chosen  config.Chosen
		inForce string
		want    string
		saves   bool
	}{
		"a file":                  {"/state", config.Chosen{File: "/d/a"}, "/d/a", "a", true},
		"no file":                 {"/state", config.Chosen{}, "", "", true},
		"not in force yet":        {"/state", config.Chosen{File: "/d/a"}, "/d/b", "", false},
		"no choice":               {"/state", config.Chosen{File: "/d/a", Err: errors.New("no such file")}, "/d/a", "", false},
		"without a folder for it": {"", config.Chosen{File: "/d/a"}, "/d/a", "", false},
	} {
		n := &nodeConfig{stateDir: tt.state, chosen: feed.New(tt.chosen)}
		if got, saves := n.settled(config.Config{File: tt.inForce}); got != tt.want || saves != tt.saves {
			t.Errorf("%s: %q, saved: %v", name, got, saves)
		}
	}
}
