package cdi

import (
	"cmp"
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The options of mounts of files and of sockets.
var (
	readOnly  = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}
	ofSockets = []string{"nosuid", "nodev", "rbind", "rprivate", "noexec"}
)

func mount(host, container string, options []string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: options}
}

// addFiles gives the container the driver's files. With a hook, libraries have the same paths as on
// the host, and the hook creates their links and adds them to the container's loader cache. Without
// a hook, each library is mounted under all its names in the default folders of loaders.
func (w Wanted) addFiles(to *specs.ContainerEdits, files driverroot.Files, h hook, version string) {
	seen := map[string]bool{}
	add := func(file, container string, options []string) {
		if !seen[container] {
			seen[container] = true
			to.Mounts = append(to.Mounts, mount(path.Join("/", w.Options.DriverRoot, files.At(file)), container,
				options))
		}
	}
	for _, l := range files.Libraries {
		if h.found() {
			add(l.Path, "/"+l.Path, readOnly)
			continue
		}
		for _, name := range append([]string{path.Base(l.Path)}, linksTo(l)...) {
			if path.Base(path.Dir(l.Path)) == "vdpau" {
				name = path.Join("vdpau", name)
			}
			for _, folder := range loaderFolders(runtime.GOARCH) {
				add(l.Path, path.Join(folder, name), readOnly)
			}
		}
	}
	for _, l := range files.Modules {
		add(l.Path, "/"+l.Path, readOnly)
		for _, name := range linksTo(l) {
			if !h.found() {
				add(l.Path, path.Join("/", path.Dir(l.Path), name), readOnly)
			}
		}
	}
	for _, p := range files.Programs {
		folder := "/usr/bin"
		if path.Dir(p) == "usr/sbin" {
			folder = "/usr/sbin"
		}
		add(p, path.Join(folder, path.Base(p)), readOnly)
	}
	for _, f := range files.Others {
		add(f.Path, f.Container, readOnly)
	}
	for _, p := range files.Sockets {
		add(p, "/"+p, ofSockets)
	}
	if h.found() && len(files.LibraryFolders) > 0 {
		to.Env = append(to.Env, "NVIDIA_CTK_LIBCUDA_DIR=/"+strings.Join(files.LibraryFolders, ":/"))
		to.Hooks = h.hooks(files, version)
	}
}

// linksTo returns further names of a library, relative to the folder of the library: the soname,
// and names used by programs that were not linked with the library.
func linksTo(l driverroot.Library) []string {
	if l.Soname == "" || l.Soname == path.Base(l.Path) {
		return l.Links
	}
	return append([]string{l.Soname}, l.Links...)
}

// loaderFolders are the default folders of loaders in common images for an architecture: Debian's
// and Red Hat's kind. The host may differ from the image.
func loaderFolders(arch string) []string {
	debian := "/usr/lib/x86_64-linux-gnu"
	if arch == "arm64" {
		debian = "/usr/lib/aarch64-linux-gnu"
	}
	return []string{debian, "/usr/lib64"}
}

// The subcommands of the hook.
const (
	hookCreateSymlinks     = "create-symlinks"
	hookEnableCUDACompat   = "enable-cuda-compat"
	hookUpdateLDCache      = "update-ldcache"
	hookDisableNodeChanges = "disable-device-node-modification"
	hookUpdateProfile      = "update-application-profile"
	hookApplyMemoryLimits  = "apply-cuda-memory-limits"
)

// A hook is the program of NVIDIA's container toolkit. Runtimes run the hook when they create a
// container. The zero value is no hook.
type hook struct {
	path          string
	disabledHooks []string
	// subcommands are the subcommands found in the program. A hook fails every container with an
	// unknown subcommand.
	subcommands []string
}

// hookPaths are the paths in the toolkit's packages.
var hookPaths = []string{"/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk"}

// hook returns the configured hook, or else a hook found on the host.
func (w Wanted) hook(root fs.FS, programs *programs) hook {
	h := hook{path: w.Options.HookPath, disabledHooks: w.Options.DisabledHooks}
	if h.path == "" && w.Options.DriverRoot == "/" {
		i := slices.IndexFunc(hookPaths, func(p string) bool { return w.onHost(root, below(p)) })
		if i >= 0 {
			h.path = hookPaths[i]
		}
	}
	h.subcommands = []string{hookCreateSymlinks, hookUpdateLDCache} // found in every version
	if h.found() {
		h.subcommands = append(h.subcommands, programs.contain(w.hostRoots(root), below(h.path), []string{
			hookEnableCUDACompat, hookDisableNodeChanges, hookUpdateProfile, hookApplyMemoryLimits,
		})...)
	}
	// The error would fail a container with these variables.
	if !resource.DriverLimitsMemory(w.Snapshot.Driver.Version) {
		h.subcommands = slices.DeleteFunc(h.subcommands,
			func(name string) bool { return name == hookApplyMemoryLimits })
	}
	return h
}

func (h hook) found() bool { return h.path != "" && !slices.Contains(h.disabledHooks, "all") }

// calls reports whether a subcommand is called.
func (h hook) calls(name string) bool {
	return h.found() && slices.Contains(h.subcommands, name) && !slices.Contains(h.disabledHooks, name)
}

// unlimitedReason returns why the driver does not enforce limits of containers, in a sentence
// without a full stop; empty if the driver does.
func (h hook) unlimitedReason(root fs.FS) string {
	switch {
	case !h.calls(hookApplyMemoryLimits):
		return "limits by the driver need driver " + strconv.Itoa(resource.DriverLimitsSince) +
			" and NVIDIA's hook with the subcommand " +
			hookApplyMemoryLimits + ", which was not found; install NVIDIA's container toolkit 1.20.1 or newer, and " +
			"check --nvidia-cdi-hook-path " +
			"and --cdi-disable-hooks"
	case !exists(root, "sys/fs/cgroup/cgroup.controllers"):
		return "limits by the driver need cgroup v2, and this node has cgroup v1"
	}
	return ""
}

// hooks returns the hooks for every container.
func (h hook) hooks(files driverroot.Files, version string) []*specs.Hook {
	var links [][2]string
	var folders []string
	for _, l := range slices.Concat(files.Libraries, files.Modules) {
		for _, name := range linksTo(l) {
			target := path.Base(l.Path)
			if l.Soname != "" && name != l.Soname {
				target = l.Soname
			}
			target = strings.Repeat("../", strings.Count(name, "/")) + target
			links = append(links, [2]string{target, path.Join("/", path.Dir(l.Path), name)})
		}
	}
	for _, l := range files.Libraries {
		if folder := path.Join("/", path.Dir(l.Path)); !slices.Contains(folders, folder) {
			folders = append(folders, folder)
		}
	}
	var ofFolders []string
	for _, folder := range folders {
		ofFolders = append(ofFolders, "--folder", folder)
	}
	return slices.Concat(h.symlinks(links), h.run("", hookEnableCUDACompat, "--host-driver-version="+version),
		h.run("", hookUpdateLDCache, ofFolders...), h.run("", hookDisableNodeChanges), h.run("", hookUpdateProfile))
}

// memoryLimits returns the hooks for a container with a GPU. Two variables of the container limit
// its part of the GPU's memory; without the variables the hook does nothing.
func (h hook) memoryLimits(driverRoot, uuid string) []*specs.Hook {
	return h.run("createRuntime", hookApplyMemoryLimits, "--driver-root", driverRoot, "--gpu-id", uuid)
}

// symlinks returns the hooks for links, each a target and a path; nil without links.
func (h hook) symlinks(links [][2]string) []*specs.Hook {
	if len(links) == 0 {
		return nil
	}
	var args []string
	for _, l := range links {
		args = append(args, "--link", l[0]+"::"+l[1])
	}
	return h.run("", hookCreateSymlinks, args...)
}

// run returns one call of the hook; nil for a missing or disabled subcommand. nvidia-ctk has the
// subcommands below another command.
func (h hook) run(when, name string, args ...string) []*specs.Hook {
	if !h.calls(name) {
		return nil
	}
	call := []string{path.Base(h.path)}
	if path.Base(h.path) == "nvidia-ctk" {
		call = append(call, "hook")
	}
	return []*specs.Hook{{
		HookName: cmp.Or(when, "createContainer"), Path: h.path, Args: append(append(call, name), args...),
		Env: []string{"NVIDIA_CTK_DEBUG=false"},
	}}
}
