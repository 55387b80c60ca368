package mps_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const oneClaim = "uid-1-0"

// wantedGPUs is the daemon of a claim with two GPUs and all limits.
var wantedGPUs = mps.ClaimDaemon{
	Devices: []mps.ClaimDevice{{UUID: "GPU-a", Memory: 10 << 30},
		{UUID: "GPU-b"}}, Percentage: 40, MultiUser: true, Exclusive: true,
}

// start requests a daemon, and waits for the daemon within the patience of a test.
func (n *node) start(id string, wanted mps.ClaimDaemon) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), 2*time.Minute)
	defer cancel()
	return mps.NewClaimDaemons(n.root).Start(ctx, id, wanted)
}

// end stops a daemon, and waits until no trace is left.
func (n *node) end(id string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 2*time.Minute)
	defer cancel()
	if err := mps.NewClaimDaemons(n.root).End(ctx, id); err != nil {
		n.t.Fatal(err)
	}
	for _, name := range []string{"claims/" + id, "claims/" + id + ".json", "claims/" + id + ".ending"} {
		if n.has(name) {
			n.t.Errorf("%s is left", name)
		}
	}
}

// TestDaemonsOfClaims: a claim has a daemon for exactly its devices, with its limits, until the
// claim is released. The daemons of resources and of other claims are independent.
func TestDaemonsOfClaims(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise(group(one, gpu("c", 80, 2)))
	n.untilReady()
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Fatal(err)
	}
	if err := n.start("uid-2-1", mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "MIG-d"}}}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"Starting control daemon of GPU-a,GPU-b for several users", "Cmd:set_default_active_thread_percentage 40",
		"Cmd:set_default_device_pinned_mem_limit 0 10240M",
	}
	if diff := cmp.Diff(want, n.log(mps.ClaimDir(oneClaim))); diff != "" {
		t.Errorf("what the daemon was told (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"Starting control daemon of MIG-d for one user"},
		n.log(mps.ClaimDir("uid-2-1"))); diff != "" {
		t.Errorf("what the daemon of a MIG device was told (-want +got):\n%s", diff)
	}
	n.checkModes("while they run", map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-b": inventory.ComputeExclusiveProcess,
		"GPU-c": inventory.ComputeExclusiveProcess,
	})
	pid, other := n.pid(mps.ClaimDir(oneClaim)), n.pid(mps.ClaimDir("uid-2-1"))
	if err := n.start(oneClaim, wantedGPUs); err != nil || n.pid(mps.ClaimDir(oneClaim)) != pid {
		t.Errorf("asked again: %v, with the daemon %d, before %d", err, n.pid(mps.ClaimDir(oneClaim)), pid)
	}
	all, err := mps.NewClaimDaemons(n.root).All()
	if diff := cmp.Diff(map[string][]string{oneClaim: {"GPU-a", "GPU-b"}, "uid-2-1": {"MIG-d"}}, all); err != nil ||
		diff != "" {
		t.Errorf("all daemons (-want +got):\n%s %v", diff, err)
	}
	n.end(oneClaim)
	if alive(pid) || !alive(other) || !n.has(".ready") {
		t.Errorf("the daemon is there: %v, that of another claim: %v", alive(pid), alive(other))
	}
	n.checkModes("afterwards", map[string]inventory.ComputeMode{"GPU-c": inventory.ComputeExclusiveProcess})
	other2 := wantedGPUs
	other2.Percentage = 10
	if err := n.start("uid-2-1", other2); err != nil { // with other devices than before
		t.Fatal(err)
	}
	if alive(other) || !slices.Contains(n.log(mps.ClaimDir("uid-2-1")), "Cmd:set_default_active_thread_percentage 10") {
		t.Errorf("a daemon that is wanted otherwise: %q", n.log(mps.ClaimDir("uid-2-1")))
	}
}

// TestClaimDaemonExits: the daemon is restarted, and the reason is reported meanwhile.
func TestClaimDaemonExits(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	end := n.supervise()
	n.untilReady()
	c := mps.NewClaimDaemons(n.root)
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Fatal(err)
	}
	first := n.pid(mps.ClaimDir(oneClaim))
	n.setFail(errors.New("not now"))
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until("the reason is told", func() bool { return strings.Contains(c.Problems(oneClaim)[oneClaim], "not now") })
	if err := n.start(oneClaim, wantedGPUs); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Errorf("a daemon that cannot be started: %v", err)
	}
	n.setFail(nil)
	n.until("another daemon serves", func() bool {
		return c.Problems(oneClaim)[oneClaim] == "" && n.pid(mps.ClaimDir(oneClaim)) != first
	})
	if n.has(mps.ClaimDir(oneClaim) + "/.failed") {
		t.Error("a daemon that serves has left the reason of an earlier failure")
	}
	stopped := n.pid(mps.ClaimDir(oneClaim)) // later the directory may be removed
	if err := c.Stop(oneClaim); err != nil {
		t.Fatal(err)
	}
	if err := n.start(oneClaim, wantedGPUs); err != nil || n.has("claims/"+oneClaim+".ending") || alive(stopped) {
		t.Errorf("a daemon that was given back and is wanted again: %v; the one that was given back is there: %v", err,
			alive(stopped))
	}
	end()
	n.until("there is no supervisor", func() bool {
		return strings.Contains(c.Problems(oneClaim)[oneClaim], "mps-control-daemon does not run")
	})
	n.checkModes("without a supervisor", map[string]inventory.ComputeMode{})
	n.supervise()
	n.until("the next supervisor starts it", func() bool { return c.Problems(oneClaim)[oneClaim] == "" })
}

// TestFailedRestoreOfClaimGPUs: the files of the claim stay until the modes are restored. A
// claim without exclusive GPUs does not wait, and no claim waits for the plan of resources.
func TestFailedRestoreOfClaimGPUs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run()
	n.until("a supervisor", func() bool {
		return !strings.Contains(mps.NewClaimDaemons(n.root).Problems(oneClaim)[oneClaim], "does not run")
	})
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Fatal(err)
	}
	n.checkAccess()
	n.setFail(errors.New("not now"))
	c := mps.NewClaimDaemons(n.root)
	pid := n.pid(mps.ClaimDir(oneClaim))
	if err := c.Stop(oneClaim); err != nil {
		t.Fatal(err)
	}
	n.until("the daemon has ended", func() bool { return !alive(pid) })
	const other = "uid-2-0"
	if err := n.start(other, mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-c"}}}); err != nil {
		t.Error(err)
	}
	if !n.has(mps.ClaimDir(oneClaim)) || !n.has("claims/"+oneClaim+".ending") || len(n.marked()) != 2 {
		t.Errorf("GPUs stay in exclusive mode and are forgotten: %q", n.marked())
	}
	n.setFail(nil)
	n.end(oneClaim)
	n.end(other)
	n.checkModes("afterwards", map[string]inventory.ComputeMode{})
	if n.has(".ready") {
		t.Error("ready before it is known what is wanted")
	}
}

// TestClaimsWithoutSupervisor: no daemon is requested, and requests without a started daemon can be
// released.
func TestClaimsWithoutSupervisor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	end := n.supervise()
	n.untilReady()
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Fatal(err)
	}
	end()
	// A process just forked by another test has a copy of the supervisor's lock until it starts its
	// own program.
	n.until("the lock is nobody's", func() bool { return !statefile.IsLocked(n.path(".lock")) })
	if err := n.start("uid-2-0", wantedGPUs); err == nil ||
		!strings.Contains(err.Error(), "mps-control-daemon does not run on this node") {
		t.Errorf("without a supervisor: %v", err)
	}
	if n.has("claims/uid-2-0.json") {
		t.Error("a daemon is asked for that nobody starts")
	}
	n.end(oneClaim)
}

// TestClaimsAfterAKill: the next supervisor stops the daemons of claims left by a killed
// supervisor, whether the claim is still requested or not, and whether the daemon answers and quits
// or not. Until then no other daemon may have the GPU.
func TestClaimsAfterAKill(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, mood string
		wanted     bool
	}{
		{"wanted", "", true}, {"given back", "", false}, {"wanted, does not answer", "mute",
			true}, {"given back, does not answer", "mute", false},
		{"given back, does not quit", "stubborn", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			notShort(t, tt.mood)
			n, wanted := newNode(t), tt.wanted
			dir := n.path(mps.ClaimDir(oneClaim))
			for _, folder := range []string{"pipe", "log"} {
				if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			left := exec.CommandContext(t.Context(), control, "-f")
			left.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+dir+"/pipe", "CUDA_MPS_LOG_DIRECTORY="+dir+
				"/log", "MPS_STAND_IN="+tt.mood)
			if err := left.Start(); err != nil {
				t.Fatal(err)
			}
			n.until("a daemon that is left", func() bool { return n.pid(mps.ClaimDir(oneClaim)) != 0 })
			for name, text := range map[string]string{
				".exclusive": "", "claims/" + oneClaim + "/.started": "",
				"claims/" + oneClaim + ".json": `{"devices":[{"uuid":"GPU-a"}],"exclusive":true}`,
			} {
				if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			n.modes["GPU-a"] = inventory.ComputeExclusiveProcess
			if !wanted {
				err := mps.NewClaimDaemons(n.root).End(t.Context(), oneClaim)
				if err == nil || !strings.Contains(err.Error(), "may still run") {
					t.Errorf("what may still run has ended: %v", err)
				}
			}
			n.supervise()
			over := make(chan error, 1)
			go func() { over <- left.Wait() }()
			select {
			case err := <-over:
				if err != nil && tt.mood == "" {
					t.Errorf("the daemon that was left: %v", err)
				}
			case <-time.After(2 * time.Minute):
				t.Error("the daemon that was left is there still")
			}
			n.untilReady()
			if wanted {
				if err := n.start(oneClaim, mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-a"}},
					Exclusive: true}); err != nil {
					t.Fatal(err)
				}
				n.checkModes("while it is wanted",
					map[string]inventory.ComputeMode{"GPU-a": inventory.ComputeExclusiveProcess})
			}
			n.end(oneClaim)
			n.checkModes("afterwards", map[string]inventory.ComputeMode{})
		})
	}
}

// TestDaemonsOfClaimsThatMisbehave: callers get the reason in time.
func TestDaemonsOfClaimsThatMisbehave(t *testing.T) {
	for mood, want := range map[string]string{
		"lax": "does not accept the limit", "old": "needs a claim without sharing.mpsConfig.multiUser",
		"mute": "is being started; stopped waiting",
	} {
		t.Run(mood, func(t *testing.T) {
			notShort(t, mood)
			t.Setenv("MPS_STAND_IN", mood)
			n := newNode(t)
			n.supervise()
			n.untilReady()
			ctx, cancel := context.WithTimeout(t.Context(), poll.Limit)
			defer cancel()
			started := make(chan error, 1)
			go func() { started <- mps.NewClaimDaemons(n.root).Start(ctx, oneClaim, wantedGPUs) }()
			if mood == "mute" {
				n.until("a daemon that does not answer", func() bool { return n.pid(mps.ClaimDir(oneClaim)) != 0 })
				cancel()
			}
			if err := <-started; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Start() = %v, want %q", err, want)
			}
			n.end(oneClaim)
			n.checkModes("afterwards", map[string]inventory.ComputeMode{})
		})
	}
}

// TestFilesOfClaimsThatCannotBeRead: nothing is started for them, and they can be ended.
func TestFilesOfClaimsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := os.Mkdir(n.path("claims"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.path("claims/"+oneClaim+".json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.supervise(group(one, gpu("c", 80, 2)))
	n.untilReady()
	if all, err := mps.NewClaimDaemons(n.root).All(); err != nil || len(all) != 1 {
		t.Errorf("All() = %v, %v", all, err)
	}
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Fatal(err)
	}
	n.end(oneClaim)
}
