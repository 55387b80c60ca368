package cdi_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
)

// program makes a program that contains some words.
func (h *host) program(t *testing.T, path, words string) {
	t.Helper()
	h.add(t, path)
	if err := os.WriteFile(filepath.Join(h.root, path), []byte(words), 0o600); err != nil {
		t.Fatal(err)
	}
}

// newHook is what a hook contains that has all subcommands.
const newHook = "create-symlinks update-ldcache enable-cuda-compat disable-device-node-modification " +
	"update-application-profile apply-cuda-memory-limits"

// TestHooksThatAreCalled: a subcommand that a hook does not have fails every container, and what
// has been seen in its bytes it has.
func TestHooksThatAreCalled(t *testing.T) {
	t.Parallel()
	const (
		ldcache = "update-ldcache --folder /usr/lib/x86_64-linux-gnu --folder /usr/lib/x86_64-linux-gnu/vdpau"
		links   = "create-symlinks --link libcuda.so." + version +
			"::/usr/lib/x86_64-linux-gnu/libcuda.so.1 --link libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so"
		compat = "enable-cuda-compat --host-driver-version=" + version
		limits = "apply-cuda-memory-limits --driver-root / --gpu-id GPU-a"
	)
	for name, tt := range map[string]struct {
		options  cdi.Options
		programs map[string]string // as this process sees them
		want     []string
	}{
		"none to be seen": {},
		"all disabled":    {options: cdi.Options{HookPath: "/opt/bin/nvidia-ctk", DisabledHooks: []string{"all"}}},
		"some disabled": {
			options: cdi.Options{HookPath: "/opt/bin/nvidia-ctk",
				DisabledHooks: []string{"create-symlinks", "enable-cuda-compat", "apply-cuda-memory-limits"}},
			programs: map[string]string{"driver-root/opt/bin/nvidia-ctk": newHook},
			want: []string{"nvidia-ctk hook " + ldcache, "nvidia-ctk hook disable-device-node-modification",
				"nvidia-ctk hook update-application-profile"},
		},
		"configured, not to be seen": {
			options: cdi.Options{HookPath: "/opt/nvidia-cdi-hook"}, want: []string{"nvidia-cdi-hook " + links,
				"nvidia-cdi-hook " + ldcache},
		},
		"older": {
			programs: map[string]string{"driver-root/usr/bin/nvidia-ctk": strings.Repeat("x", 3<<20) +
				"enable-cuda-compat"},
			want: []string{"nvidia-ctk hook " + links, "nvidia-ctk hook " + compat, "nvidia-ctk hook " + ldcache},
		},
		"a script beside the program": {
			options: cdi.Options{HookPath: "/usr/local/nvidia/toolkit/nvidia-cdi-hook"},
			programs: map[string]string{
				"host/usr/local/nvidia/toolkit/nvidia-cdi-hook":      "#!/bin/sh",
				"host/usr/local/nvidia/toolkit/nvidia-cdi-hook.real": "apply-cuda-memory-limits",
			},
			want: []string{"nvidia-cdi-hook " + links, "nvidia-cdi-hook " + ldcache, "nvidia-cdi-hook " + limits},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, driverFiles()...)
			h.library(t, "driver-root/usr/lib/x86_64-linux-gnu/libcuda.so."+version, "libcuda.so.1")
			for path, words := range tt.programs {
				h.program(t, path, words)
			}
			w := wanted()
			w.Snapshot.Majors = inventory.Majors{GPU: 195, UVM: 510, Caps: 234}
			w.Options.HookPath, w.Options.DisabledHooks = tt.options.HookPath, tt.options.DisabledHooks
			h.apply(t, w)
			h.apply(t, w) // as it was read before
			var calls []string
			for _, hook := range inject(t, h, "k8s.device-plugin.nvidia.com/gpu=GPU-a").Hooks.CreateContainer {
				calls = append(calls, strings.Join(hook.Args, " "))
			}
			for _, hook := range inject(t, h, "k8s.device-plugin.nvidia.com/gpu=GPU-a").Hooks.CreateRuntime {
				calls = append(calls, strings.Join(hook.Args, " "))
			}
			if diff := cmp.Diff(tt.want, calls); diff != "" {
				t.Errorf("hooks (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHookThatIsReplaced: after an upgrade of the toolkit, its new subcommands are called.
func TestHookThatIsReplaced(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	for _, tt := range []struct {
		words string
		want  int
	}{{"update-ldcache", 2}, {newHook, 5}, {"", 2}} {
		h.program(t, "driver-root/usr/bin/nvidia-cdi-hook", tt.words)
		h.apply(t, wanted())
		if hooks := h.spec(t, "gpu").ContainerEdits.Hooks; len(hooks) != tt.want {
			t.Errorf("a hook with %q: %d calls, want %d", tt.words, len(hooks), tt.want)
		}
	}
}

// TestMemoryLimitsOfOlderDriver: a hook that limits memory fails a container with the variables
// where the driver cannot do it.
func TestMemoryLimitsOfOlderDriver(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{"580.95.05": false, "614.99": false, "615": true, "615.71.05": true,
		"": false, "next.615": false} {
		h := newHost(t, driverFiles()...)
		h.library(t, "driver-root/usr/lib/x86_64-linux-gnu/libcuda.so."+version, "libcuda.so.1")
		h.program(t, "driver-root/usr/bin/nvidia-cdi-hook", newHook)
		w := wanted()
		w.Snapshot.Driver.Version = version
		w.Options.DevicesOnly = true
		h.apply(t, w)
		called := false
		for _, d := range h.spec(t, "gpu").Devices {
			for _, hook := range d.ContainerEdits.Hooks {
				called = called || strings.Contains(strings.Join(hook.Args, " "), "apply-cuda-memory-limits")
			}
		}
		if called != want {
			t.Errorf("driver %q: the hook is called %t, want %t", version, called, want)
		}
	}
}
