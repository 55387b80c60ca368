package cluster

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestWhatNeedsTheAPIServer: each by itself.
func TestWhatNeedsTheAPIServer(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		config config.Config
		node   kubeapi.Node
		want   bool
	}{
		"nothing":                    {},
		"the configuration":          {config: config.Config{NodeConfig: config.NodeConfig{Dir: "/d"}}, want: true},
		"labels":                     {config: config.Config{Features: config.Features{Labels: config.LabelsNode}}, want: true},
		"the label of a layout":      {config: config.Config{MIG: config.MIG{Enabled: true, Label: true}}, want: true},
		"layouts are not changed":    {config: config.Config{MIG: config.MIG{Label: true, Evict: true, PauseClients: true}}},
		"claims":                     {config: config.Config{DRA: config.DRA{Mode: config.DRAAll}}},
		"a taint":                    {node: kubeapi.Node{Taints: []kubeapi.Taint{{Key: taintKey, Effect: taintEffect}}}, want: true},
		"the key, another effect":    {node: kubeapi.Node{Taints: []kubeapi.Taint{{Key: taintKey, Effect: "NoExecute"}}}},
		"the effect, another key":    {node: kubeapi.Node{Taints: []kubeapi.Taint{{Key: "theirs", Effect: taintEffect}}}},
		"a DaemonSet is paused":      {node: kubeapi.Node{Labels: map[string]string{deployLabels + "dcgm": pausedForMIG}}, want: true},
		"a DaemonSet is deployed":    {node: kubeapi.Node{Labels: map[string]string{deployLabels + "dcgm": deployed}}},
		"a provider says it is":      {node: kubeapi.Node{Labels: map[string]string{deployLabels + "driver": pausedForMIG}}},
		"another label has the word": {node: kubeapi.Node{Labels: map[string]string{"zone": pausedForMIG}}},
	} {
		c := &Cluster{client: kubeapi.New(kubeapi.Options{Node: nodeName})}
		c.client.Nodes().Publish(tt.node)
		if got := c.needed(tt.config); got != tt.want {
			t.Errorf("%s: needed %v", name, got)
		}
	}
	paused := kubeapi.Node{Labels: map[string]string{deployLabels + "b": pausedForMIG, deployLabels + "a": pausedForMIG, deployLabels + "c": deployed}}
	if d := cmp.Diff([]string{deployLabels + "a", deployLabels + "b"}, pausedOn(paused)); d != "" {
		t.Errorf("paused (-want +got):\n%s", d)
	}
}

// TestTasks: which tasks a process has, by its flags.
func TestTasks(t *testing.T) {
	t.Parallel()
	names := func(tasks []daemon.Task) string {
		var all []string
		for _, task := range tasks {
			all = append(all, task.Name)
		}
		return strings.Join(all, ", ")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		early             config.Config
		observation, file string
	}{
		{config.Config{NodeName: "n"}, "own node, size of the cluster", ""},
		{
			config.Config{NodeConfig: config.NodeConfig{Dir: dir, Fallbacks: []config.Fallback{config.FallbackSingle}}},
			"own node, size of the cluster, node configuration", "",
		},
		{
			config.Config{NodeName: "n", NodeConfig: config.NodeConfig{Dir: dir, Fallbacks: []config.Fallback{config.FallbackSingle}}},
			"own node, size of the cluster, node configuration", filepath.Join(dir, "a"),
		},
	} {
		c := New()
		chosen := c.Choose(t.Context(), tt.early)
		if got := names(c.Observation(feed.New(tt.early), "boot")); got != tt.observation || (chosen != nil) != (c.nodeConfig != nil) || c.spread.boot != "boot" {
			t.Errorf("observation is %s, want %s", got, tt.observation)
		}
		if chosen != nil && chosen.Value().File != tt.file { // a process without the name of its node chooses nothing
			t.Errorf("chosen is %+v, want %q", chosen.Value(), tt.file)
		}
		counted := 0
		d := daemon.View{Config: tt.early, Configs: feed.New(tt.early), APIRequested: func(string, string, int) { counted++ }}
		want := "labels of the node, NodeFeature, MIG label, paused clients, report"
		if got := names(c.Outputs(d)); got != want {
			t.Errorf("outputs are %s, want %s", got, want)
		}
		if c.allocation(daemon.View{DRA: &daemon.DRA{}}) != nil {
			t.Error("a process without the name of its node has tasks for claims")
		}
	}
}

// TestHeadStart: a task begins after that, and not at all if the process ends before.
func TestHeadStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, ends := range []time.Duration{headStart - 1, headStart + 1} {
			ctx, cancel := context.WithTimeout(t.Context(), ends)
			began, ran := time.Now(), time.Duration(0)
			if err := later(daemon.Task{Run: func(context.Context) error { ran = time.Since(began); return nil }}).Run(ctx); err != nil {
				t.Error(err)
			}
			if want := map[bool]time.Duration{true: headStart}[ends > headStart]; ran != want {
				t.Errorf("a process that ends after %v runs its task after %v, want %v", ends, ran, want)
			}
			cancel()
		}
	})
}

// TestWhileSame: a run ends when its value is another one, and its error ends all.
func TestWhileSame(t *testing.T) {
	t.Parallel()
	fails := errors.New("fails")
	values := feed.New(1)
	var ran []int
	err := whileSame(t.Context(), func() (int, []<-chan struct{}) {
		now, changed := values.Latest()
		return now / 10, []<-chan struct{}{changed}
	}, func(ctx context.Context, value int) error {
		ran = append(ran, value)
		if value == 2 {
			values.Publish(0)
			<-ctx.Done()
			return fails
		}
		values.Publish(2) // the same value
		values.Publish(10 * (value + 1))
		<-ctx.Done()
		return nil
	})
	if !errors.Is(err, fails) || !slices.Equal(ran, []int{0, 1, 2}) {
		t.Errorf("ran for %v, %v", ran, err)
	}
}

// TestClaimsOfTheNode: which claims hold which GPU. Those of other nodes and drivers, those without devices, and those that only look at
// devices hold none.
func TestClaimsOfTheNode(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 2)
	s.untilPool("1: 0 1")
	view := daemon.View{Config: config.Config{NodeName: nodeName}, DRA: &daemon.DRA{Devices: d.devices}}
	c := &Cluster{client: kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})}
	claim := func(name string, results ...resourceapi.DeviceRequestAllocationResult) {
		t.Helper()
		if err := s.server.ChangeClaim("ns", name, func(c *resourceapi.ResourceClaim) {
			if len(results) > 0 {
				c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	result := func(driver, pool, device string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: pool, Device: device}
	}
	looks := result(dra.Driver, nodeName, "gpu-0")
	looks.AdminAccess = ptr.To(true)
	claim("waits")
	claim("nic", result("nic.example.com", nodeName, "gpu-0"), result(dra.Driver, nodeName, "gpu-1"))
	claim("looks", looks)
	claim("elsewhere", result(dra.Driver, "node-2", "gpu-0"))
	claim("part", result(dra.Driver, nodeName, "gpu-1-mig-1g10gb-19-0"))
	claim("unknown", result(dra.Driver, nodeName, "gpu-7"))
	got, err := c.claimsOfNode(t.Context(), view)
	for _, names := range got {
		slices.Sort(names)
	}
	if d := cmp.Diff(map[string][]string{"GPU-1": {"ns/nic", "ns/part"}}, got); err != nil || d != "" {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	for code, mayNot := range map[int]bool{403: true, 500: false} {
		s.server.SetFault(apiserver.Fault{Status: code})
		if got, err := c.claimsOfNode(t.Context(), view); err == nil || errors.Is(err, handover.ErrMayNotList) != mayNot || got != nil {
			t.Errorf("%d: %v, %v", code, got, err)
		}
	}
}

// TestADiskWithoutAnAnswer: the start waits for a limited time.
func TestADiskWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		answers := make(chan struct{})
		hangs := func(string) (int, error) { <-answers; return 7, nil }
		if n, err := withPatience(t.Context(), clock.RealClock{}, "/state", hangs); n != 0 || err == nil || time.Since(began) != firstAnswer {
			t.Errorf("%d, %v after %v", n, err, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), firstAnswer/2)
		defer cancel()
		if _, err := withPatience(ctx, clock.RealClock{}, "/state", hangs); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("at the end of the process: %v", err)
		}
		close(answers)
		if n, err := withPatience(t.Context(), clock.RealClock{}, "/state", hangs); n != 7 || err != nil {
			t.Errorf("a disk that answers: %d, %v", n, err)
		}
	})
}

// TestNoDirectoryOfConfigurations: it is told, and leaves the file in force that is.
func TestNoDirectoryOfConfigurations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		dir := s.dir
		s.dir = filepath.Join(dir, "none")
		if took := s.begin(); took != 0 {
			t.Errorf("it took %v", took)
		}
		s.after(0, "", "none")
		s.dir, s.answer = dir, answered("a")
		s.begin()
		s.run()
		s.after(0, "a", "")
		s.labelled("1", "a")
		if err := os.Rename(dir, dir+".moved"); err != nil {
			t.Fatal(err)
		}
		s.after(rereadEvery, "a", "no such file")
		if err := os.Rename(dir+".moved", dir); err != nil {
			t.Fatal(err)
		}
		s.after(rereadEvery, "a", "")
	})
}

// TestListOfNames: at most ten.
func TestListOfNames(t *testing.T) {
	t.Parallel()
	ten := strings.Split("abcdefghij", "")
	for want, names := range map[string][]string{
		"no files": nil, "a": {"a"}, "a, b": {"a", "b"}, "a, b, c, d, e, f, g, h, i, j": ten, "a, b, c, d, e, f, g, h, i, j and 1 more": append(ten, "k"),
	} {
		if got := list(names); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestConfigManagerSignalNumbers: those that there are.
func TestConfigManagerSignalNumbers(t *testing.T) {
	t.Parallel()
	for number, want := range map[int]bool{-1: false, 0: false, 1: true, 64: true, 65: false} {
		m := &manager{node: "n", link: "l", signals: true, process: "p", signal: syscall.Signal(number)}
		m.options.Dir, m.options.Label = "d", "l"
		if err := m.check([]string{" named "}); (err == nil) != want {
			t.Errorf("%d: %v", number, err)
		}
		if want && !slices.Equal(m.options.Fallbacks, []config.Fallback{config.FallbackNamed}) {
			t.Errorf("fallbacks %q", m.options.Fallbacks)
		}
	}
}

// TestConfigManagerFindsProcesses: by argv[0]; where one of two names is a path, its last part counts. Never this process.
func TestConfigManagerFindsProcesses(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	for id, line := range map[string]string{
		"11": "daemon\x00--x", "12": "/usr/bin/daemon\x00", "13": "/opt/daemon", "14": "daemon-2", "15": "sh\x00daemon", "16": "", "self": "daemon",
		strconv.Itoa(os.Getpid()): "daemon",
	} {
		if err := errors.Join(os.Mkdir(filepath.Join(proc, id), 0o700), os.WriteFile(filepath.Join(proc, id, "cmdline"), []byte(line), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(proc, "17"), 0o700); err != nil { // it has ended
		t.Fatal(err)
	}
	for name, want := range map[string][]int{"daemon": {11, 12, 13}, "/opt/daemon": {11, 13}, "/usr/bin/daemon-2": {14}, "nobody": nil} {
		got, err := (&manager{proc: proc, process: name}).processes()
		if slices.Sort(got); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, want)
		}
	}
	if err := (&manager{proc: filepath.Join(proc, "none")}).send(t.Context()); err == nil || !strings.Contains(err.Error(), "list processes") {
		t.Errorf("without /proc: %v", err)
	}
	const none = 1 << 22 // no process has a higher number than this less one
	ended := filepath.Join(proc, strconv.Itoa(none))
	if err := errors.Join(os.Mkdir(ended, 0o700), os.WriteFile(filepath.Join(ended, "cmdline"), []byte("ended"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := (&manager{proc: proc, process: "ended", signal: syscall.SIGHUP}).send(t.Context()); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("a process that has ended: %v", err)
	}
}

// TestLinkThatCannotBeMade: a folder in its place, or in that of the new link, is an error, and is not removed.
func TestLinkThatCannotBeMade(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{"link", "link.new"} {
		dir := t.TempDir()
		target, kept := filepath.Join(dir, "target"), filepath.Join(dir, folder, "kept")
		err := errors.Join(os.WriteFile(target, nil, 0o600), os.Mkdir(filepath.Dir(kept), 0o700), os.WriteFile(kept, nil, 0o600))
		if err != nil {
			t.Fatal(err)
		}
		m := &manager{link: filepath.Join(dir, "link")}
		if err := m.deliver(t.Context(), target); err == nil || !strings.Contains(err.Error(), "replace the link") {
			t.Errorf("%s is a folder: %v", folder, err)
		}
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(m.record()); err == nil {
			t.Errorf("%s is a folder, and the delivery is on record", folder)
		}
	}
}

// TestLargestConfiguration: what a ConfigMap holds, and not a byte more.
func TestLargestConfiguration(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	m := &manager{link: filepath.Join(dir, "link")}
	for size, want := range map[int]bool{1 << 20: true, 1<<20 + 1: false} {
		target := filepath.Join(dir, strconv.Itoa(size))
		if err := os.WriteFile(target, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := m.deliver(t.Context(), target); (err == nil) != want {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// TestReasonOfALayout: one line, and not too long, without half a character.
func TestReasonOfALayout(t *testing.T) {
	t.Parallel()
	x := strings.Repeat("x", maxReason-1)
	for text, want := range map[string]string{"a\n b\tc": "a b c", x + "x": x + "x", x + "xy": x + "x", x + "é": x, "\xff!": "!"} {
		if got := oneLine(text); got != want {
			t.Errorf("%.20q of %d bytes: %.20q of %d bytes", text, len(text), got, len(got))
		}
	}
}

// TestWhenTheStateIsWritten: where there is no address of an API server, a write fails.
func TestWhenTheStateIsWritten(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		is, because, state, reason string
		last, cleared              string
		ago                        time.Duration
		writes, waits              bool
	}{
		"the same":                           {is: "success", state: "success"},
		"the same, with its reason":          {is: "failed", because: "a", state: "failed", reason: "a"},
		"another state":                      {is: "pending", state: "success", last: "pending", writes: true},
		"another reason":                     {is: "failed", because: "a", state: "failed", reason: "b", last: "failed", ago: reasonPace, writes: true},
		"another reason, soon":               {is: "failed", because: "a", state: "failed", reason: "b", last: "failed", ago: reasonPace / 2, waits: true},
		"another reason, not by this one":    {is: "failed", because: "a", state: "failed", reason: "b", writes: true},
		"another program's, after the label": {is: "success", cleared: "u"},
		"of a label that is gone":            {is: "success", cleared: "v", writes: true},
	} {
		timer := clocktesting.NewFakeClock(time.Now())
		l := &layoutLabeler{client: kubeapi.New(kubeapi.Options{Node: nodeName}), clock: timer, again: feed.NewAlarm(timer)}
		l.node = kubeapi.Node{
			UID: "u", Labels: map[string]string{migStateLabel: tt.is}, Annotations: map[string]string{migReasonAnnotation: tt.because},
		}
		l.state, l.cleared, l.wrote = tt.last, tt.cleared, timer.Now().Add(-tt.ago)
		err := l.write(t.Context(), tt.state, tt.reason, timer.Now())
		due := l.again.Due()
		if (err != nil) != tt.writes || !due.IsZero() != tt.waits || tt.waits && due.Sub(timer.Now()) != reasonPace-tt.ago {
			t.Errorf("%s: %v, looks again at %v", name, err, due)
		}
	}
}

// TestEvictionWithoutAName: the API server evicts pods by name.
func TestEvictionWithoutAName(t *testing.T) {
	t.Parallel()
	c := &Cluster{client: kubeapi.New(kubeapi.Options{Node: nodeName})}
	if err := c.Evict(t.Context(), mig.Pod{UID: "u"}); !errors.Is(err, errNameless) {
		t.Error(err)
	}
	if err := c.Evict(t.Context(), mig.Pod{UID: "u", Namespace: "ns", Name: "p"}); err == nil || errors.Is(err, errNameless) {
		t.Error(err)
	}
}

// TestSizesOfClusters: how the limit grows, and which sizes are none.
func TestSizesOfClusters(t *testing.T) {
	t.Parallel()
	for nodes, want := range map[int]time.Duration{
		1: 20 * time.Millisecond, 50: time.Second, 14999: 299980 * time.Millisecond, 15000: 5 * time.Minute, 1 << 30: 5 * time.Minute,
	} {
		if got := spreadOf(nodes); got != want {
			t.Errorf("%d nodes: %v, want %v", nodes, got, want)
		}
	}
	for text, want := range map[string]bool{`{"version":1,"nodes":1}`: true, `{"version":1,"nodes":0}`: false, `{"version":1}`: false} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, sizeFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if size, err := readSize(dir); (err == nil) != want || (size != nil) != want {
			t.Errorf("%s: %v, %v", text, size, err)
		}
	}
}

// TestDifferencesOfLabels: labels that are missing, have another value, or are of this program and not wanted.
func TestDifferencesOfLabels(t *testing.T) {
	t.Parallel()
	const a, b = "nvidia.com/gpu.count", "nvidia.com/gpu.product"
	for name, tt := range map[string]struct {
		wanted, now map[string]string
		want        []string
	}{
		"none":               {nil, nil, nil},
		"the same":           {map[string]string{a: "1"}, map[string]string{a: "1"}, nil},
		"missing":            {map[string]string{a: "1"}, nil, []string{a}},
		"missing, and empty": {map[string]string{a: ""}, nil, []string{a}},
		"another":            {map[string]string{a: "1", b: "x"}, map[string]string{a: "2", b: "x"}, []string{a}},
		"not wanted":         {nil, map[string]string{a: "1"}, []string{a}},
		"of others":          {nil, map[string]string{"zone": "1"}, nil},
	} {
		var got []string
		for key := range differences(tt.wanted, tt.now) {
			got = append(got, key)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestForeignChangesWait: a label that another program changed is written after five seconds at the earliest.
func TestForeignChangesWait(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		foreign       bool
		before, after time.Duration // the pace before, and how long the write waits
	}{{false, 0, minPace}, {true, 0, foreignPace}, {true, 8 * time.Second, 16 * time.Second}, {false, 40 * time.Second, maxPace}} {
		c := &stepping{now: time.Now()}
		began := c.now
		l := &labeler{clock: c, waited: true, last: c.now, pace: tt.before}
		if err := l.admit(t.Context(), tt.foreign); err != nil || c.now.Sub(began) != tt.after {
			t.Errorf("%+v: waited %v, %v", tt, c.now.Sub(began), err)
		}
	}
}
