package field_test

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// reinstalled is a node on which a feature was used and the program uninstalled in the middle of
// it, and then installed with the defaults.
type reinstalled struct {
	*host
	kubelet *kubelet.Kubelet
}

// newReinstalled returns a host with a kubelet, without a daemon.
func newReinstalled(t *testing.T) *reinstalled {
	folder := loopback.Folder(t)
	k, err := kubelet.Start(kubelet.Options{
		Dir: filepath.Join(folder, "device-plugins"), PodResourcesSocket: filepath.Join(folder, "pod-resources",
			"kubelet.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return &reinstalled{&host{t: t, folder: folder, socket: filepath.Join(folder, "c.sock")}, k}
}

// install starts the daemon.
func (r *reinstalled) install(args ...string) {
	r.t.Helper()
	r.start(append([]string{
		"--simulate=dgx-h100", "--kubelet-socket", r.kubelet.Socket(), "--pod-resources-socket", r.kubelet.PodResourcesSocket(),
		"--kubelet-root", r.folder, "--node-name=n",
	}, args...)...)
}

// killed ends the daemon as a node that loses its pod does.
func (r *reinstalled) killed() {
	r.t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		r.t.Fatal(err)
	}
	_ = r.cmd.Wait() // it was killed
	r.serves(0)      // the kubelet may notice later
}

// serves waits until the kubelet has so many GPUs.
func (r *reinstalled) serves(count int) {
	r.t.Helper()
	poll.Until(r.t, fmt.Sprint(count, " GPUs are allocatable"),
		func() bool { return r.kubelet.Allocatable("nvidia.com/gpu") == count })
}

// state writes a file of the state directory.
func (r *reinstalled) state(name, text string) {
	r.t.Helper()
	path := filepath.Join(r.folder, "state", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// has reports whether a file is in the state directory.
func (r *reinstalled) has(name string) bool {
	_, err := os.Stat(filepath.Join(r.folder, "state", name))
	return err == nil
}

// claims writes the kubelet's checkpoint of claims: the claim ns/c has devices of a driver.
func (r *reinstalled) claims(driver string, devices ...string) {
	r.t.Helper()
	type device struct{ DeviceName string }
	type claim struct {
		ClaimUID, ClaimName, Namespace string
		DriverState                    map[string]map[string][]device
	}
	data := map[string]any{"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
		"ClaimInfoStateList": []claim{}}
	if driver != "" {
		all := []device{}
		for _, name := range devices {
			all = append(all, device{name})
		}
		data["ClaimInfoStateList"] = []claim{{
			ClaimUID: "u1", ClaimName: "c", Namespace: "ns", DriverState: map[string]map[string][]device{driver: {"Devices": all}},
		}}
	}
	text, err := json.Marshal(data)
	if err != nil {
		r.t.Fatal(err)
	}
	file, err := json.Marshal(map[string]any{"Data": string(text), "Checksum": crc32.ChecksumIEEE(text)})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.folder, "dra_manager_state"), file, 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// uuids returns the UUIDs of the GPUs, by a daemon that runs.
func (r *reinstalled) uuids() (all []string) {
	r.t.Helper()
	text, _ := r.do("status", "-o", "json")
	var s struct{ GPUs []struct{ UUID string } }
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		r.t.Fatalf("%v: %s", err, text)
	}
	for _, g := range s.GPUs {
		all = append(all, g.UUID)
	}
	return all
}

// TestReinstall: what an installation with a feature leaves in the state directory keeps no GPU
// from one with the defaults for longer than a minute, or doctor, ready, status and the log say why
// and what to do (A1).
func TestReinstall(t *testing.T) {
	t.Parallel()
	inSlices := func(r *reinstalled, left ...string) {
		r.install()
		all := r.uuids()
		r.serves(8)
		r.killed()
		text, err := json.Marshal(map[string]any{"version": 1, "gpus": all, "left": left})
		if err != nil {
			r.t.Fatal(err)
		}
		r.state("dra-published.json", string(text))
		numbers := map[string]int{}
		for i, uuid := range all {
			numbers[uuid] = i
		}
		if text, err = json.Marshal(map[string]any{"version": 1, "numbers": numbers}); err != nil {
			r.t.Fatal(err)
		}
		r.state("dra-numbers.json", string(text))
	}
	const way = "helm upgrade gpu-device-plugin … --reset-then-reuse-values --set dra.enabled=true --set dra.mode=plugin"
	for name, c := range map[string]struct {
		before func(*reinstalled)
		gpus   int      // that are allocatable within a minute
		says   []string // of the others: the reason and the way out
	}{
		"claims, of which none is left": {before: func(r *reinstalled) { inSlices(r); r.claims("") }, gpus: 8},
		"claims, without a checkpoint":  {before: func(r *reinstalled) { inSlices(r) }, gpus: 8},
		"a claim of another driver": {
			before: func(r *reinstalled) { inSlices(r); r.claims("nic.example.com", "nic-0") }, gpus: 8,
		},
		"claims, with a damaged record of slices": {
			before: func(r *reinstalled) { inSlices(r); r.state("dra-published.json", "{"); r.claims("") }, gpus: 8,
		},
		"a claim that is prepared": {
			before: func(r *reinstalled) { inSlices(r); r.claims("gpu.nvidia.com", "gpu-3") }, gpus: 7,
			says: []string{"GPU 3: ", "claim ns/c", way},
		},
		"a claim that is being prepared": {
			before: func(r *reinstalled) { inSlices(r); r.claims("gpu.nvidia.com") }, gpus: 0,
			says: []string{"GPUs 0, 1, 2, 3, 4, 5, 6, 7: ", "claim ns/c", way},
		},
		"a reset": {
			before: func(r *reinstalled) {
				r.install()
				uuid := r.uuids()[2]
				r.killed()
				r.state("reset.json", fmt.Sprintf(`{"version":1,"gpus":[%q],"since":"2026-01-02T03:04:05Z","phase":"resetting"}`,
					uuid))
			}, gpus: 8,
		},
		"a released driver": {
			before: func(r *reinstalled) {
				r.install()
				r.serves(8)
				if text, status := r.do("quiesce"); status != 0 {
					r.t.Fatal(text)
				}
				r.killed()
			}, gpus: 0, says: []string{"gpu-device-plugin resume"},
		},
		"a layout of MIG devices": {
			before: func(r *reinstalled) {
				r.install("--mig-strategy=mixed", "--mig-enabled")
				r.serves(8)
				r.do("mig", "apply", "--layout=all-1g.10gb", "--wait=1ms") // it fails where the wait is too short
				poll.Until(r.t, "the layout is noted", func() bool { return r.has("mig.json") && r.has("mig-wish.json") })
				r.killed()
			}, gpus: 8,
		},
		"proofs of CUDA": {
			before: func(r *reinstalled) {
				r.install("--validate")
				poll.Until(r.t, "the proofs are kept", func() bool { return r.has("proofs.json") })
				r.killed()
			}, gpus: 8,
		},
		"units": {
			before: func(r *reinstalled) {
				config := filepath.Join(r.folder, "units.yaml")
				if err := os.WriteFile(config, []byte("version: v1\nselectors: [{indices: [0, 1], units: true}]\nunits: {enforce: none}\n"), 0o600); err != nil {
					r.t.Fatal(err)
				}
				r.install("--config-file", config)
				r.serves(6)
				r.killed()
			}, gpus: 8,
		},
		"files that cannot be read": {
			before: func(r *reinstalled) {
				for _, name := range []string{
					"faults.json", "reset.json", "quiesce.json", "node-config.json", "cluster.json", "mig.json", "mig-wish.json", "proofs.json",
					"dra-numbers.json", "claims/u1.json",
				} {
					r.state(name, "{")
				}
			}, gpus: 8,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReinstalled(t)
			c.before(r)
			r.install()
			began := time.Now()
			if c.gpus > 0 {
				r.serves(c.gpus)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("%d GPUs are allocatable after %v", c.gpus, took)
			}
			if len(c.says) == 0 {
				return
			}
			defer func() {
				if t.Failed() {
					t.Log(r.log.String())
				}
			}()
			lacks := func(text string) []string {
				text = strings.Join(strings.Fields(strings.ReplaceAll(text, "\\", " ")), " ")
				return slices.DeleteFunc(slices.Clone(c.says), func(part string) bool { return strings.Contains(text, part) })
			}
			for _, command := range []string{"ready", "status", "doctor"} {
				text := ""
				poll.Within(t, time.Minute, command+" says why", func() bool { text, _ = r.do(command); return len(lacks(text)) == 0 })
			}
			if free := r.kubelet.Allocatable("nvidia.com/gpu"); free != c.gpus {
				t.Errorf("%d GPUs are allocatable, want %d", free, c.gpus)
			}
			poll.Within(t, time.Minute, "the log says why", func() bool { return len(lacks(r.log.String())) == 0 })
		})
	}
}
