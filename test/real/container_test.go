package real_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// gpu is the UUID of the GPU.
const gpu = "GPU-a"

// driverVersion is that of the driver root.
func driverVersion(t *testing.T, root string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, "usr/lib/firmware/nvidia/*"))
	if err != nil || len(found) != 1 {
		t.Fatalf("firmware %q, %v", found, err)
	}
	return filepath.Base(found[0])
}

// inject adds to a container what our CDI spec of a driver root says of a GPU by one of its names,
// as containerd does. Hook is the path of the hook; empty for none.
func inject(t *testing.T, spec *oci.Spec, root, hook, name string) {
	t.Helper()
	s := inventory.Snapshot{
		Driver:  inventory.Driver{Version: driverVersion(t, root)},
		Control: inventory.NodeControl | inventory.NodeUVM | inventory.NodeUVMTools | inventory.NodeModeset,
		Majors:  inventory.Majors{GPU: 195, UVM: 510, Caps: 234},
		GPUs:    []inventory.GPU{{UUID: gpu, BDF: "0000:01:00.0", Health: inventory.Health{State: inventory.Healthy}}},
	}
	options := cdi.Options{DriverRoot: root, ContainerDriverRoot: root, HookPath: hook}
	dir := t.TempDir()
	_, err := cdi.NewWriter(dir, os.DirFS("/")).Apply(cdi.Wanted{
		Snapshot: s, Plan: resource.New(s, resource.Options{}), Options: options,
		Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.CDICRI}, Void: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cache.InjectDevices(spec, "k8s.device-plugin.nvidia.com/gpu="+name); err != nil {
		t.Fatal(err)
	}
}

// run runs a command in a container on an image, to which a GPU of a driver root was added, and
// returns what it printed.
func run(t *testing.T, image, root, hook string, command ...string) string {
	t.Helper()
	bundle := t.TempDir()
	rootfs := filepath.Join(bundle, "rootfs")
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", image, rootfs).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
	capabilities := []string{"CAP_CHOWN", "CAP_MKNOD"}
	mount := func(kind, path string, options ...string) oci.Mount {
		return oci.Mount{Destination: path, Type: kind, Source: kind, Options: options}
	}
	spec := &oci.Spec{
		Version: "1.0.2", Root: &oci.Root{Path: "rootfs"},
		Process: &oci.Process{
			Args: command, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Cwd: "/", NoNewPrivileges: true,
			Capabilities: &oci.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		},
		Mounts: []oci.Mount{mount("proc", "/proc"), mount("tmpfs", "/dev", "nosuid", "mode=755")},
		Linux: &oci.Linux{
			Namespaces: []oci.LinuxNamespace{{Type: oci.PIDNamespace}, {Type: oci.MountNamespace}, {Type: oci.IPCNamespace},
				{Type: oci.UTSNamespace}},
			CgroupsPath: "/gpu-device-plugin-real-" + filepath.Base(filepath.Dir(bundle)) + filepath.Base(bundle),
			Resources:   &oci.LinuxResources{},
		},
	}
	inject(t, spec, root, hook, gpu)
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("real-%d-%s", os.Getpid(), filepath.Base(filepath.Dir(bundle)))
	c := exec.CommandContext(t.Context(), "runc", "--root", filepath.Join(filepath.Dir(bundle), "runc"), "run", "--bundle",
		bundle, name)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		t.Errorf("%q: %v: %s", command, err, &out)
	}
	return out.String()
}

// images returns images of several kinds, each with the loader of that kind, a static shell and a
// program that calls cuInit.
func images(t *testing.T) map[string]string {
	t.Helper()
	from := part(t, "image")
	made := map[string]string{}
	for _, kind := range []string{"debian", "usr-lib64", "musl"} {
		dir := filepath.Join(t.TempDir(), kind)
		script := `
			mkdir -p "$2/usr/bin" "$2/usr/sbin" "$2/etc" "$2/proc" "$2/dev" "$2/tmp" "$2/usr/lib/x86_64-linux-gnu" "$2/usr/lib64"
			for l in bin sbin lib lib64; do ln -s usr/$l "$2/$l"; done
			cp "$1/usr/bin/busybox" "$2/usr/bin/"; ln -s busybox "$2/usr/bin/sh"
			if [ "$3" = musl ]; then
				cp "$1/usr/lib/ld-musl-x86_64.so.1" "$2/usr/lib/"
			else
				cp -a "$1/usr/lib/x86_64-linux-gnu/." "$2/usr/lib/x86_64-linux-gnu/"; cp -a "$1/usr/lib64/." "$2/usr/lib64/"
				cp "$1/usr/sbin/ldconfig" "$2/usr/sbin/"
			fi`
		c := exec.CommandContext(t.Context(), "sh", "-euc", script, "sh", from, dir, kind)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("make an image: %v: %s", err, out)
		}
		made[kind] = dir
	}
	searchUsrLib64(t, made["usr-lib64"])
	const probe = `
		#include <dlfcn.h>
		#include <stdio.h>
		int main(void) {
			void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
			if (!cuda) { printf("dlopen: %s\n", dlerror()); return 1; }
			int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
			printf("cuInit: %d\n", init(0));
			return 0;
		}`
	for _, kind := range []string{"debian", "usr-lib64"} {
		compile(t, probe, filepath.Join(made[kind], "usr/bin/probe"))
	}
	musl := filepath.Join(from, "usr/lib/x86_64-linux-musl")
	compile(t, `int puts(const char *); int main(void) { puts("musl works"); return 0; }`,
		filepath.Join(made["musl"], "usr/bin/probe"),
		"-nostdlib", "-fno-pie", "-no-pie", "-fno-stack-protector", filepath.Join(musl,
			"crt1.o"), "-Wl,-dynamic-linker,/lib/ld-musl-x86_64.so.1",
		"-L"+musl, "-lc")
	return made
}

func compile(t *testing.T, program, to string, options ...string) {
	t.Helper()
	source := filepath.Join(t.TempDir(), "probe.c")
	if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	arguments := append([]string{"-o", to, source}, options...)
	if out, err := exec.CommandContext(t.Context(), "gcc", arguments...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
}

// searchUsrLib64 has the loader and the libraries of an image of Debian's in the folders of Red
// Hat's: the folders are written into the loader, as many bytes long as before.
func searchUsrLib64(t *testing.T, image string) {
	t.Helper()
	debian, redHat := filepath.Join(image, "usr/lib/x86_64-linux-gnu"), filepath.Join(image, "usr/lib64")
	files, err := os.ReadDir(debian)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(redHat, "ld-linux-x86-64.so.2")); err != nil { // a link to the other folder
		t.Fatal(err)
	}
	for _, f := range files {
		if err := os.Rename(filepath.Join(debian, f.Name()), filepath.Join(redHat, f.Name())); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(debian); err != nil {
		t.Fatal(err)
	}
	loader := filepath.Join(redHat, "ld-linux-x86-64.so.2")
	text, err := os.ReadFile(loader)
	if err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{"/lib/x86_64-linux-gnu/": "/lib64",
		"/usr/lib/x86_64-linux-gnu/": "/usr/lib64"} {
		to += strings.Repeat("/", len(from)-len(to))
		text = bytes.ReplaceAll(text, append([]byte{0}, from...), append([]byte{0}, to...))
	}
	if err := os.WriteFile(loader, text, 0o755); err != nil {
		t.Fatal(err)
	}
}

// TestContainersFindTheDriver: in a real container, by our spec of a whole driver root, the loader
// finds each library of the driver, nvidia-smi finds NVML, and cuInit answers that there is no GPU.
// An image whose loader can load none of them works as ever.
func TestContainersFindTheDriver(t *testing.T) {
	t.Parallel()
	all := images(t)
	for _, program := range []string{"runc", "gcc"} {
		if _, err := exec.LookPath(program); err != nil || os.Getuid() != 0 {
			t.Skip("containers need root, runc and gcc (make e2e installs them)")
		}
	}
	hook := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", hook, "./hook").CombinedOutput(); err != nil {
		t.Fatalf("build the hook: %v: %s", err, out)
	}
	for kind, image := range all {
		for _, layout := range []string{"debian", "run"} {
			for _, h := range []string{"", hook} {
				what := fmt.Sprintf("image %s, driver root %s, hook %t", kind, layout, h != "")
				t.Run(what, func(t *testing.T) {
					root := part(t, layout)
					if kind == "musl" {
						out := run(t, image, root, h, "/usr/bin/probe")
						if !strings.Contains(out, "musl works") {
							t.Errorf("a program of musl: %s", out)
						}
						found("container", what, "%s", strings.TrimSpace(out))
						return
					}
					script := `probe; nvidia-smi; for l in ` + strings.Join(wanted, " ") + `; do
						/lib64/ld-linux-x86-64.so.2 --preload $l /usr/bin/probe >/dev/null 2>/tmp/err; grep -q "cannot be preloaded" /tmp/err && echo "missing $l"; done
						ldconfig -p; [ -e /dev/nvidia0 ] && [ -e /dev/nvidia-uvm ] && echo nodes; true`
					out := run(t, image, root, h, "/bin/busybox", "sh", "-c", script)
					for _, want := range []string{"cuInit: 100", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", "nodes"} {
						if !strings.Contains(out, want) {
							t.Errorf("no %q in\n%s", want, out)
						}
					}
					if strings.Contains(out, "missing") {
						t.Errorf("libraries are not found:\n%s", out)
					}
					cuda, _, _ := strings.Cut(out, "\n")
					listed := strings.Contains(out, "libcuda.so.1 (libc6,x86-64) => ")
					found("container", what, "%s; %d of %d libraries are loaded; ldconfig -p lists them: %t",
						cuda, len(wanted)-strings.Count(out, "missing "), len(wanted), listed)
					if h != "" && !listed {
						t.Errorf("ldconfig -p lists no libcuda.so.1:\n%s", out)
					}
				})
			}
		}
	}
}

// wanted are libraries that programs load by these names and that need no others than the driver's
// own and the C library.
var wanted = []string{
	"libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4", "libnvidia-encode.so.1", "libnvcuvid.so.1",
	"libnvidia-opencl.so.1", "libcudadebugger.so.1",
}

// expected are links that NVIDIA's tool (1.20.1) makes on these driver roots, relative to the
// folder of a library; of the roots' files, it mounts those that TestParity names.
var expectedLinks = []string{
	"libEGL_nvidia.so.0", "libGLESv1_CM_nvidia.so.1", "libGLESv2_nvidia.so.2", "libGLX_indirect.so.0", "libGLX_nvidia.so.0", "libcuda.so",
	"libcuda.so.1", "libcudadebugger.so.1", "libnvcuvid.so", "libnvcuvid.so.1", "libnvidia-allocator.so.1", "libnvidia-cfg.so.1",
	"libnvidia-encode.so", "libnvidia-encode.so.1", "libnvidia-fbc.so", "libnvidia-fbc.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1",
	"libnvidia-ngx.so", "libnvidia-ngx.so.1", "libnvidia-nvvm.so.4", "libnvidia-opencl.so.1", "libnvidia-opticalflow.so",
	"libnvidia-opticalflow.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvoptix.so.1", "libvdpau_nvidia.so.1", "nvidia-drm_gbm.so",
}

// expectedMounts are the names of the files that NVIDIA's tool mounts; VERSION is that of the
// driver.
var expectedMounts = []string{
	"nvidia-cuda-mps-control", "nvidia-persistenced", "nvidia-cuda-mps-server", "nvidia_icd.json", "nvidia_layers.json",
	"libnvidia-egl-gbm.so.", "libnvidia-egl-wayland.so.", "libnvidia-egl-xcb.so.", "libnvidia-egl-xlib.so.", "libnvidia-eglcore.so.VERSION",
	"libnvidia-glcore.so.VERSION", "libnvidia-glsi.so.VERSION", "libnvidia-glvkspirv.so.VERSION", "libnvidia-gpucomp.so.VERSION",
	"libnvidia-rtcore.so.VERSION", "libnvidia-tls.so.VERSION", "10_nvidia_wayland.json",
	"15_nvidia_gbm.json", "20_nvidia_xcb.json", "20_nvidia_xlib.json", "10_nvidia.json", "libEGL_nvidia.so.VERSION",
	"libGLESv1_CM_nvidia.so.VERSION", "libGLESv2_nvidia.so.VERSION", "libGLX_nvidia.so.VERSION", "libcuda.so.VERSION",
	"libcudadebugger.so.VERSION", "libnvcuvid.so.VERSION", "libnvidia-allocator.so.VERSION", "libnvidia-cfg.so.VERSION",
	"libnvidia-encode.so.VERSION", "libnvidia-fbc.so.VERSION", "libnvidia-ml.so.VERSION", "libnvidia-ngx.so.VERSION",
	"libnvidia-nvvm.so.VERSION", "libnvidia-opencl.so.VERSION", "libnvidia-opticalflow.so.VERSION", "libnvidia-ptxjitcompiler.so.VERSION",
	"libnvoptix.so.VERSION", "libvdpau_nvidia.so.VERSION", "nvidia-smi", "nvoptix.bin", "nvidia.icd",
}

// TestParity: nothing that NVIDIA's tool gives a container by these driver roots is missing in
// ours. The table was made with toolkit 1.20.1.
func TestParity(t *testing.T) {
	t.Parallel()
	for _, layout := range []string{"debian", "run"} {
		t.Run(layout, func(t *testing.T) {
			t.Parallel()
			root := part(t, layout)
			hook := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
			const subcommands = "enable-cuda-compat disable-device-node-modification update-application-profile"
			// which NVIDIA's tool also calls with these drivers, before 615, where it can only fail
			const limits = "apply-cuda-memory-limits"
			if err := os.WriteFile(hook, []byte(subcommands+" "+limits), 0o600); err != nil {
				t.Fatal(err)
			}
			spec := &oci.Spec{Linux: &oci.Linux{}}
			inject(t, spec, root, hook, gpu)
			for _, name := range []string{"0", "all"} { // by which NVIDIA's tool names the GPU, too
				other := &oci.Spec{Linux: &oci.Linux{}}
				if inject(t, other, root, hook, name); !reflect.DeepEqual(spec, other) {
					t.Errorf("%s is another device than %s", name, gpu)
				}
			}
			for _, d := range spec.Linux.Devices {
				if d.Type != "c" || d.Major == 0 {
					t.Errorf("the node %s has no number", d.Path)
				}
			}
			version := driverVersion(t, root)
			mounts := slices.Clone(expectedMounts)
			if layout == "run" {
				mounts = append(mounts, "nvidia_drv.so", "libglxserver_nvidia.so.VERSION")
			}
			for _, want := range mounts {
				want = strings.ReplaceAll(want, "VERSION", version)
				if !slices.ContainsFunc(spec.Mounts, func(m oci.Mount) bool {
					name := filepath.Base(m.Destination)
					return name == want || strings.HasSuffix(want, ".") && strings.HasPrefix(name, want)
				}) {
					t.Errorf("%s is not mounted", want)
				}
			}
			for _, path := range []string{"/etc/vulkan/icd.d/nvidia_icd.json",
				"/etc/vulkan/implicit_layer.d/nvidia_layers.json"} {
				if !slices.ContainsFunc(spec.Mounts, func(m oci.Mount) bool { return m.Destination == path }) {
					t.Errorf("%s is not mounted", path)
				}
			}
			links := map[string]bool{}
			called := map[string]bool{}
			for _, h := range append(spec.Hooks.CreateContainer, spec.Hooks.CreateRuntime...) {
				called[h.Args[1]] = true
				for _, a := range h.Args {
					target, link, is := strings.Cut(a, "::")
					if is {
						links[filepath.Base(link)] = true
					}
					if strings.HasSuffix(link, "/gbm/nvidia-drm_gbm.so") && target != "../libnvidia-allocator.so.1" {
						t.Errorf("%s leads to %s", link, target)
					}
				}
			}
			for _, want := range expectedLinks {
				if !links[want] {
					t.Errorf("no link %s is made", want)
				}
			}
			for _, want := range append(strings.Fields(subcommands), "create-symlinks", "update-ldcache") {
				if !called[want] {
					t.Errorf("the hook %s is not called", want)
				}
			}
			if called[limits] {
				t.Errorf("the hook %s is called with driver %s", limits, version)
			}
			found("CDI spec", "driver root "+layout, "%d mounts, %d device nodes, %d links, hooks %s; NVIDIA's tool gives %d files and %d links",
				len(spec.Mounts), len(spec.Linux.Devices), len(links), strings.Join(slices.Sorted(maps.Keys(called)),
					" "), len(mounts), len(expectedLinks))
		})
	}
}
