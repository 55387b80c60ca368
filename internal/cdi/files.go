package cdi

import (
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/driverroot"
)

// The options of mounts of files and of mounts of sockets.
var (
	readOnly  = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}
	ofSockets = []string{"nosuid", "nodev", "rbind", "rprivate", "noexec"}
)

func mount(host, container string, options []string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: options}
}

// addFiles has the container see the driver's files. With a hook, libraries have the paths that they have on the host, and
// the hook makes them known to the container's loader. Without one, they are where every loader looks.
func (w Wanted) addFiles(to *specs.ContainerEdits, files driverroot.Files, h hook, version string) {
	seen := map[string]bool{}
	add := func(file, container string, options []string) {
		if !seen[container] {
			seen[container] = true
			to.Mounts = append(to.Mounts, mount(path.Join("/", w.Options.DriverRoot, files.At(file)), container, options))
		}
	}
	for _, l := range files.Libraries {
		if h.found() {
			add(l.Path, "/"+l.Path, readOnly)
			continue
		}
		for _, name := range libraryNames(l, files.LibraryFolder) {
			for _, folder := range loaderFolders(runtime.GOARCH) {
				add(l.Path, path.Join(folder, name), readOnly)
			}
		}
	}
	for _, p := range files.Programs {
		add(p, "/usr/bin/"+path.Base(p), readOnly)
	}
	for _, p := range files.Others {
		add(p, "/"+p, readOnly)
	}
	for _, p := range files.Sockets {
		add(p, "/"+p, ofSockets)
	}
	if h.found() && files.LibraryFolder != "" {
		to.Env = append(to.Env, "NVIDIA_CTK_LIBCUDA_DIR=/"+files.LibraryFolder)
		to.Hooks = h.hooks(files, version)
	}
}

// libraryNames returns the names of a library in its folder when no hook makes links: its file's name, its soname, and the
// name that programs are linked with where the driver's installer makes that. Some may be the same.
func libraryNames(l driverroot.Library, folder string) []string {
	name := strings.TrimPrefix(l.Path, folder+"/")
	names := []string{name}
	if l.Soname != "" {
		names = append(names, path.Join(path.Dir(name), l.Soname))
	}
	for _, plain := range []string{"libcuda.so", "libnvidia-opticalflow.so"} {
		if strings.HasPrefix(name, plain+".") {
			names = append(names, plain)
		}
	}
	return names
}

// loaderFolders are where the loaders of common images for an architecture look without being told: those of Debian's
// and of Red Hat's kind. The host may be of another kind than the image.
func loaderFolders(arch string) []string {
	debian := "/usr/lib/x86_64-linux-gnu"
	if arch == "arm64" {
		debian = "/usr/lib/aarch64-linux-gnu"
	}
	return []string{debian, "/usr/lib64"}
}

// A hook is the program of NVIDIA's container toolkit that runtimes run while they make a container. The zero value is
// none.
type hook struct {
	path     string
	disabled []string
}

// hookPaths are where the toolkit's packages put it.
var hookPaths = []string{"/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk"}

// hook returns the hook to be used: the one that is configured, or else one that the host is seen to have.
func (w Wanted) hook(root fs.FS) hook {
	h := hook{path: w.Options.HookPath, disabled: w.Options.DisabledHooks}
	if h.path != "" || w.Options.DriverRoot != "/" {
		return h
	}
	for _, p := range hookPaths {
		if w.onHost(root, below(p)) {
			h.path = p
			break
		}
	}
	return h
}

func (h hook) found() bool { return h.path != "" && !slices.Contains(h.disabled, "all") }

// hooks returns what the runtime is to run.
func (h hook) hooks(files driverroot.Files, version string) []*specs.Hook {
	folder := "/" + files.LibraryFolder
	links := [][2]string{
		{"libcuda.so.1", "libcuda.so"}, {"libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"},
		{"libGLX_nvidia.so." + version, "libGLX_indirect.so.0"},
	}
	var wanted [][2]string
	for _, l := range links {
		base, _, _ := strings.Cut(l[0], ".so")
		if slices.ContainsFunc(files.Libraries, func(f driverroot.Library) bool { return strings.HasPrefix(path.Base(f.Path), base+".so.") }) {
			wanted = append(wanted, [2]string{l[0], path.Join(folder, l[1])})
		}
	}
	folders := []string{"--folder", folder}
	if slices.ContainsFunc(files.Libraries, func(f driverroot.Library) bool { return path.Dir(f.Path) != files.LibraryFolder }) {
		folders = append(folders, "--folder", path.Join(folder, "vdpau"))
	}
	hooks := h.symlinks(wanted)
	for _, one := range []struct {
		name string
		args []string
	}{
		{"enable-cuda-compat", []string{"--host-driver-version=" + version}},
		{"update-ldcache", folders},
		{"disable-device-node-modification", nil},
	} {
		if !slices.Contains(h.disabled, one.name) {
			hooks = append(hooks, h.run(one.name, one.args))
		}
	}
	return hooks
}

// symlinks returns what the runtime is to run to make links, each a target and the link's path; nil if it is to make none.
func (h hook) symlinks(links [][2]string) []*specs.Hook {
	if len(links) == 0 || !h.found() || slices.Contains(h.disabled, "create-symlinks") {
		return nil
	}
	var args []string
	for _, l := range links {
		args = append(args, "--link", l[0]+"::"+l[1])
	}
	return []*specs.Hook{h.run("create-symlinks", args)}
}

// run returns one call of the hook. nvidia-ctk has it below a command of its own.
func (h hook) run(name string, args []string) *specs.Hook {
	call := []string{path.Base(h.path)}
	if path.Base(h.path) == "nvidia-ctk" {
		call = append(call, "hook")
	}
	return &specs.Hook{
		HookName: "createContainer", Path: h.path, Args: append(append(call, name), args...), Env: []string{"NVIDIA_CTK_DEBUG=false"},
	}
}
