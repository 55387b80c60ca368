package daemon

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// states has a folder for each release, and in it one for each row of stateRows.
const states = "testdata/state"

// A stateRow is a part of the state directory.
type stateRow struct {
	name  string
	file  string                        // the file that matters
	open  func(t *testing.T) *claimable // a node without a daemon
	leave func(c *claimable)            // has a daemon write its files
	want  func(c *claimable)            // of a daemon that begins with them
	// offline says that the API server is away when a daemon begins with the files.
	offline bool
}

// No row is about cluster.json: without it the API server is asked for the number of nodes.
var stateRows = []stateRow{
	{
		name: "faults", file: "faults.json", open: openWhole,
		leave: func(c *claimable) {
			c.shows(8, 8)
			c.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 54}) // only an operator ends it
			c.shows(8, 7)
		},
		want: func(c *claimable) {
			c.shows(8, 7)
			c.eventually("GPU 3 is Unhealthy", func() bool {
				gpus := c.status().GPUs
				return len(gpus) == 8 && gpus[3].State == "Unhealthy" && strings.Contains(gpus[3].Reason, "XID 54")
			})
		},
	},
	{
		name: "quiesce", file: "quiesce.json", open: openWhole,
		leave: func(c *claimable) {
			c.shows(8, 8)
			c.call("quiesce", nil)
			c.shows(8, 0)
		},
		want: func(c *claimable) {
			c.eventually("the driver is released", func() bool { return c.status().Quiet })
			c.call("resume", nil)
			c.shows(8, 8)
		},
	},
	{
		name: "reset", file: "reset.json", open: openWhole,
		leave: func(c *claimable) {
			c.smi("1", "hangs")
			reset := c.resetting(c.t.Context(), "--gpu", "1")
			if err := reset.Start(); err != nil {
				c.t.Fatal(err)
			}
			child := 0
			c.eventually("the program runs", func() bool { child = c.child(); return child != 0 })
			c.kill()
			c.eventually("the program has ended", func() bool { return ended(child) })
			_ = reset.Wait() // its daemon was killed
		},
		want: func(c *claimable) {
			c.eventually("the reset is shown as interrupted", func() bool {
				r := c.status().Reset
				return r != nil && r.Phase == "interrupted" && len(r.GPUs) == 1
			})
			c.shows(8, 8)
		},
	},
	{
		name: "mig", file: "mig-wish.json",
		open: func(t *testing.T) *claimable {
			t.Helper()
			c := openWhole(t)
			c.Args = []string{"--mig-strategy", "mixed", "--config-file", c.write("config.yaml", "mig: {enabled: true}\n")}
			return c
		},
		leave: func(c *claimable) {
			c.shows(8, 8)
			c.command("mig", "apply", "--layout", "all-balanced")
			c.until("divided GPUs", func() bool { return c.Allocatable(third) == 8 })
		},
		want: func(c *claimable) { // the GPUs of the simulated node are whole at first
			c.until("divided GPUs", func() bool { return c.Allocatable(third) == 8 })
		},
	},
	{
		name: "configuration", file: "node-config.json", open: openChosen, offline: true,
		leave: func(c *claimable) { c.shows(16, 16) },
		want:  func(c *claimable) { c.shows(16, 16) }, // the default has 8
	},
	{
		name: "proofs", file: "proofs.json", open: openProving,
		leave: func(c *claimable) { c.shows(8, 8) },
		want: func(c *claimable) {
			c.shows(8, 8)
			if calls := c.library.Calls(c.t); len(calls) > 0 {
				c.t.Errorf("CUDA was proven again by %d calls", len(calls))
			}
		},
	},
	{
		name: "claims", file: "dra-published.json",
		open: func(t *testing.T) *claimable { t.Helper(); return openClaimable(t, "dra") },
		leave: func(c *claimable) {
			c.published(8)
			c.prepared("one", c.claim("one", "gpu-3"))
		},
		want: func(c *claimable) {
			c.eventually("the claim is known", func() bool {
				d := c.status().DRA
				return d != nil && len(d.Claims) == 1 && d.Claims[0].Name == "one"
			})
		},
	},
}

// openChosen has the configuration chosen by a label of the node.
func openChosen(t *testing.T) *claimable {
	t.Helper()
	s, api := chosen(t, "shared")
	return &claimable{stage: s, api: api}
}

// openProving has CUDA proven on each GPU before it is offered.
func openProving(t *testing.T) *claimable {
	t.Helper()
	root := t.TempDir()
	library := cuda.Install(t, root)
	s := open(t, node.Setup{Args: []string{"--driver-root-ctr-path", root, "--validate"}})
	return &claimable{stage: s, library: library}
}

func openWhole(t *testing.T) *claimable {
	t.Helper()
	return &claimable{stage: open(t, node.Setup{})}
}

// TestStateOfReleases: a daemon that begins with the state directory of a release goes on where
// that one ended, and sets no file aside as damaged. `go test ./test/daemon -run
// TestStateOfReleases -update` writes the files of this version. Those of a release stay as they
// are: the next version has a folder of its own.
func TestStateOfReleases(t *testing.T) {
	t.Parallel()
	if *update {
		for _, row := range stateRows {
			row.write(t, filepath.Join(states, version.Number, row.name))
		}
	}
	releases, err := os.ReadDir(states)
	if err != nil || len(releases) == 0 {
		t.Fatalf("%d releases in %s: %v", len(releases), states, err)
	}
	for _, release := range releases {
		for _, row := range stateRows {
			t.Run(release.Name()+"/"+row.name, func(t *testing.T) {
				t.Parallel()
				row.read(t, filepath.Join(states, release.Name(), row.name))
			})
		}
	}
}

// write has a daemon write the files of a row, and copies them into a folder.
func (r stateRow) write(t *testing.T, folder string) {
	t.Helper()
	c := r.open(t)
	c.start()
	r.leave(c)
	file := filepath.Join(c.Path("state"), r.file)
	c.eventually(r.file+" is written", func() bool { _, err := os.Stat(file); return err == nil })
	if c.Running() != nil {
		c.kill()
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	copyFiles(t, c.Path("state"), folder)
}

// read has a daemon begin with the files of a row.
func (r stateRow) read(t *testing.T, folder string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(folder, r.file)); err != nil {
		t.Fatal(err)
	}
	c := r.open(t)
	copyFiles(t, folder, c.Path("state"))
	if r.offline {
		c.api.Stop()
	}
	c.start()
	r.want(c)
	if err := filepath.WalkDir(c.Path("state"), func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".damaged") {
			t.Errorf("%s was set aside", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// copyFiles copies the files of a folder that are not empty, which locks are.
func copyFiles(t *testing.T, from, to string) {
	t.Helper()
	if err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil || len(text) == 0 {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		copied := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(copied), 0o700); err != nil {
			return err
		}
		return os.WriteFile(copied, text, 0o600)
	}); err != nil {
		t.Fatal(err)
	}
}
