package driverfacts

import (
	"bufio"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// maxStatus limits what is read of dpkg's status file and of logs, in bytes.
const maxStatus = 64 << 20

var (
	// driverPackage matches the packages of Debian, Ubuntu and NVIDIA's repositories that hold a
	// driver.
	driverPackage = regexp.MustCompile(`^(nvidia-driver|nvidia-open|nvidia-dkms|nvidia-headless|nvidia-kernel|` +
		`cuda-drivers|linux-modules-nvidia|linux-objects-nvidia|nvidia-tesla|nvidia-legacy)([-0-9].*)?$`)
	// packageVersion is the driver version in the version of a package: 2:580.95.05-0ubuntu1.
	packageVersion = regexp.MustCompile(`^(?:\d+:)?(\d+\.\d+(?:\.\d+)?)`)
)

// dpkg returns the installed packages that match, by their driver versions; nil if dpkg has no
// status here.
func dpkg(host root, matches func(name string) bool) (versions map[string]string, err error) {
	const file = "var/lib/dpkg/status"
	if !host.Exists(file) {
		return nil, nil
	}
	f, err := host.OpenFile(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	versions = map[string]string{}
	var name string
	installed := false
	lines := bufio.NewScanner(io.LimitReader(f, maxStatus))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ": ")
		switch key {
		case "Package":
			name, installed = value, false
		case "Status":
			installed = strings.HasSuffix(value, " installed")
		case "Version":
			if found := packageVersion.FindStringSubmatch(value); installed && matches(name) && len(versions) < 256 {
				versions[name] = ""
				if found != nil && !strings.HasPrefix(name, "linux-") { // those have the version of a kernel
					versions[name] = found[1]
				}
			}
		}
	}
	return versions, lines.Err()
}

// rpmTraces are folders that rpm packages of the driver leave: the database has a form of its own,
// which is not read.
var rpmTraces = []string{"usr/share/licenses/nvidia-driver", "usr/share/doc/nvidia-driver",
	"usr/share/licenses/nvidia-open",
	"usr/share/licenses/kmod-nvidia-open", "usr/share/licenses/kmod-nvidia-latest-dkms",
	"usr/share/doc/nvidia-driver-libs",
	"usr/share/licenses/nvidia-kmod-common", "usr/share/licenses/nvidia-driver-cuda"}

// owners returns what installed the driver.
func owners(host root) ([]preflight.Owner, error) {
	if !host.Exists("etc") {
		return nil, errors.New("/etc does not exist")
	}
	var all []preflight.Owner
	packages, err := dpkg(host, driverPackage.MatchString)
	if err != nil {
		return nil, err
	}
	if len(packages) > 0 {
		name, version := "", ""
		for one, of := range packages { // a metapackage may have the version of its branch only
			if strings.Count(of, ".") > strings.Count(version, ".") || strings.Count(of,
				".") == strings.Count(version, ".") &&
				(name == "" || one < name) {
				name, version = one, of
			}
		}
		all = append(all, preflight.Owner{Kind: preflight.Dpkg, Version: version,
			Evidence: "/var/lib/dpkg/status: " + name})
	}
	if slices.ContainsFunc([]string{"var/lib/rpm", "usr/lib/sysimage/rpm", "usr/share/rpm"}, host.Exists) {
		for _, trace := range rpmTraces {
			if host.Exists(trace) {
				all = append(all, preflight.Owner{Kind: preflight.RPM, Evidence: "/" + trace})
				break
			}
		}
	}
	for _, uninstaller := range []string{"usr/bin/nvidia-uninstall", "usr/local/bin/nvidia-uninstall",
		"opt/bin/nvidia-uninstall"} {
		if host.Exists(uninstaller) {
			all = append(all, preflight.Owner{Kind: preflight.RunFile, Version: installerVersion(host),
				Evidence: "/" + uninstaller})
			break
		}
	}
	for _, sign := range []string{"usr/bin/nvidia-smi", "usr/lib", "drivers", ".driver-ctr-ready"} {
		if host.Exists("run/nvidia/driver/" + sign) {
			all = append(all, preflight.Owner{Kind: preflight.DriverContainer, Evidence: "/run/nvidia/driver/" + sign})
			break
		}
	}
	const gke = "home/kubernetes/bin/nvidia"
	if host.Exists(gke) {
		all = append(all, preflight.Owner{Kind: preflight.GKE, Evidence: "/" + gke})
	}
	if host.Exists(CurrentModules[1:]) {
		all = append(all, preflight.Owner{Kind: preflight.GPUDriver, Evidence: CurrentModules})
	}
	if s := system(host); s.Image && len(all) == 0 {
		all = append(all, preflight.Owner{Kind: preflight.Image, Evidence: "/etc/os-release: " + s.Name})
	}
	return all, nil
}

// installerVersion returns the version in the log of NVIDIA's installer; empty if there is none.
func installerVersion(host root) string {
	text, err := host.Read("var/log/nvidia-installer.log")
	if err != nil {
		return ""
	}
	found := regexp.MustCompile(`\(version: ([0-9.]+)\) is now complete`).FindAllSubmatch(text, -1)
	if len(found) == 0 || !isVersion(string(found[len(found)-1][1])) {
		return ""
	}
	return string(found[len(found)-1][1])
}

// companion returns whether a service runs, and its version by its package or by its log.
func companion(host root, program, pack, log, phrase string) (preflight.Companion, error) {
	var c preflight.Companion
	pids, err := host.List("proc")
	if err != nil {
		return c, err
	}
	for _, pid := range pids {
		if pid[0] >= '1' && pid[0] <= '9' && host.Line("proc/"+pid+"/comm") == program[:min(len(program), maxComm)] {
			c.Runs = true
			break
		}
	}
	if !c.Runs {
		return c, nil
	}
	packages, _ := dpkg(host, func(name string) bool {
		rest, ok := strings.CutPrefix(name, pack)
		return ok && (rest == "" || rest[0] == '-' && len(rest) > 1 && rest[1] >= '0' && rest[1] <= '9')
	})
	for name, version := range packages {
		if version != "" && len(packages) == 1 {
			c.Version, c.Source = version, "/var/lib/dpkg/status: "+name
			return c, nil
		}
	}
	f, err := host.OpenFile(log)
	if err != nil {
		return c, nil //nolint:nilerr // the version is not known
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, maxStatus))
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), phrase); ok {
			for word := range strings.FieldsSeq(rest) {
				if isVersion(word) {
					c.Version, c.Source = word, "/"+log
					break
				}
			}
		}
	}
	return c, nil
}
