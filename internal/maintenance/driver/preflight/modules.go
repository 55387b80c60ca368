package preflight

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// kernels judges whether the kernels of this and of the next boot are known.
func kernels(f *Facts, r *judgment) {
	if !r.require(f.Kernel.Missing) || !r.require(f.NextBoot.Missing) {
		return
	}
	next := f.NextBoot.Value
	if next.Release != f.Kernel.Value {
		r.add(diagnosis.Info, "other-kernel", fmt.Sprintf("The next boot starts kernel %s; %s is running", next.Release,
			f.Kernel.Value),
			[]string{next.Source})
		return
	}
	r.ok("The next boot starts the running kernel "+next.Release, next.Source)
}

// modules judges whether each boot has the modules of the driver.
func modules(f *Facts, r *judgment) {
	if f.GPUs.Known() && len(f.GPUs.Value) == 0 {
		r.ok("No GPU needs the driver")
		return
	}
	if f.Target != nil && f.Target.Problem != "" {
		r.add(diagnosis.Error, "folder-unusable", "The folder "+f.Target.Name+" cannot be used: "+f.Target.Problem, nil,
			"ls -lR "+shellWord(f.Target.Name))
		return
	}
	for _, boot := range f.releases() {
		switch {
		case f.Target != nil && f.Target.Folder:
			folderModules(f, r, boot)
		case f.owned(DriverContainer):
			r.skip("The driver container brings the modules for " + boot.String() +
				" when it starts: whether it has them is not visible on the node")
			continue
		case !r.require(f.Sets.Missing):
			return
		case f.Target != nil:
			targetModules(f, r, boot)
		default:
			presentModules(f, r, boot)
		}
		files := f.files(boot.release)
		if f.Target != nil && !f.Target.Folder {
			files = filter(files, func(m *ModuleFile) bool { return m.Version != "" && f.Target.matches(m.Version) })
		}
		fileProblems(f, r, boot, files)
	}
	if !r.hasProblem() && len(f.releases()) > 0 {
		r.ok("Each known boot can have modules of " + f.name())
	}
}

// presentModules judges the modules of a boot for the present driver.
func presentModules(f *Facts, r *judgment, boot boot) {
	set, known := f.set(boot.release)
	cores := filter(f.files(boot.release), isCore)
	switch {
	case !known:
		r.skip("The modules of " + boot.String() + " were not read")
	case len(cores) == 0 && set.Partial:
		r.skip("The modules of " + boot.String() + " are too many to be read")
	case len(cores) == 0 && (f.owned(Image) || f.owned(GKE)) && boot.release != f.Kernel.Value:
		r.skip("The modules of "+boot.String()+" are not there yet: they come with "+imageOf(f),
			"# restart the node to see")
	case len(cores) == 0:
		noModules(f, r, boot, set)
	default:
		loaded, onDisk := f.Driver.Value.Version, versionsOf(cores)
		if loaded != "" && len(onDisk) > 0 && !slices.Contains(onDisk, loaded) {
			r.add(diagnosis.Warning, "driver-changes",
				fmt.Sprintf("Driver %s is loaded, and %s has %s: the driver changes when it is loaded again",
					loaded, boot, strings.Join(onDisk, " and ")), []string{cores[0].Path},
				"systemctl reboot   # to use the installed driver")
		}
	}
}

// noModules reports a boot without modules of the present driver.
func noModules(f *Facts, r *judgment, boot boot, set ModuleSet) {
	message := fmt.Sprintf("There is no nvidia module for %s", boot)
	if boot.release != f.Kernel.Value {
		message += ": after a restart the node has no GPUs"
	}
	evidence := []string{"/lib/modules/" + boot.release}
	if !set.Exists {
		evidence[0] += " does not exist"
	}
	switch {
	case len(set.Sources) > 0 && set.Headers:
		r.add(diagnosis.Error, "no-modules", message+". DKMS has the sources, and has not built the modules", evidence,
			"dkms autoinstall -k "+shellWord(boot.release))
	case len(set.Sources) > 0:
		r.add(diagnosis.Error, "no-modules",
			message+". DKMS has the sources, and cannot build: the kernel's headers are missing",
			append(evidence, "/lib/modules/"+boot.release+"/build does not exist"),
			"# install the headers of kernel "+boot.release, "dkms autoinstall -k "+shellWord(boot.release))
	default:
		r.add(diagnosis.Error, "no-modules", message, evidence,
			"# install the driver's modules for kernel "+boot.release+
				", or choose a kernel with modules for the next boot")
	}
}

// targetModules judges whether a boot has, or can have, the modules of a wanted version.
func targetModules(f *Facts, r *judgment, boot boot) {
	set, known := f.set(boot.release)
	cores := filter(set.Files, isCore)
	unread := filter(cores, func(m *ModuleFile) bool { return m.Unread != "" && m.Version == "" })
	switch {
	case !known:
		r.skip("The modules of " + boot.String() + " were not read")
	case slices.ContainsFunc(versionsOf(cores), f.Target.matches):
	case len(unread) > 0:
		r.skip("Whether "+boot.String()+" has modules of driver "+f.Target.Version+" is not known: "+
			unread[0].Path+" "+unread[0].Unread, "modinfo -F version "+shellWord(unread[0].Path))
	case f.owned(Image) || f.owned(GKE):
		r.skip("The modules of driver " + f.Target.Version + " come with " + imageOf(f) + ", not with an " +
			"installation on the node")
	case set.Headers:
		r.add(diagnosis.Info, "modules-to-build",
			fmt.Sprintf("%s has no modules of driver %s yet; they can be built: the kernel's headers are there",
				upper(boot.String()), f.Target.Version), []string{"/lib/modules/" + boot.release + "/build"})
	default:
		r.add(diagnosis.Warning, "no-headers",
			fmt.Sprintf("%s has no modules of driver %s, and they cannot be built: the kernel's headers are missing",
				upper(boot.String()), f.Target.Version),
			[]string{"/lib/modules/" + boot.release + "/build does not exist"},
			"# install the headers of kernel "+boot.release+", or an installer with prebuilt modules for that kernel")
	}
}

// folderModules judges whether the target folder has modules for a boot.
func folderModules(f *Facts, r *judgment, boot boot) {
	all := filter(f.Target.Files, isCore)
	if slices.ContainsFunc(all, func(m *ModuleFile) bool { return m.release() == boot.release }) {
		return
	}
	if unread := filter(all, func(m *ModuleFile) bool { return m.Unread != "" }); len(unread) > 0 {
		r.skip("Whether "+f.Target.Name+" has modules for "+boot.String()+" is not known: "+unread[0].Path+" "+
			unread[0].Unread, "modinfo -F vermagic "+shellWord(unread[0].Path))
		return
	}
	var releases []string
	for _, m := range all {
		releases = append(releases, m.release())
	}
	slices.Sort(releases)
	has := "it has no modules"
	if releases = slices.Compact(releases); len(releases) > 0 {
		has = "it has those of " + strings.Join(releases, ", ")
	}
	r.add(diagnosis.Error, "no-modules", fmt.Sprintf("%s has no nvidia module for %s", f.Target.Name, boot),
		[]string{f.Target.Name + ": " + has},
		"# add the driver's modules, built for kernel "+boot.release+", to the folder")
}

// fileProblems judges the files that a boot would load.
func fileProblems(f *Facts, r *judgment, boot boot, files []*ModuleFile) {
	again := "# install or build the driver's modules for kernel " + boot.release + " again"
	var unread []string
	reason := ""
	for _, m := range files {
		release := m.release()
		switch {
		case m.Unread != "":
			unread = append(unread, m.Path)
			reason = m.Unread
		case release == "":
			r.add(diagnosis.Error, "damaged-module",
				"The module file "+m.Path+" does not tell its kernel: it is damaged, or no kernel module",
				[]string{m.Path}, again)
		case release == boot.release, strings.Contains(m.Path, "/weak-updates/"):
		case strings.Contains(m.Vermagic, "modversions"):
			r.add(diagnosis.Warning, "other-vermagic",
				fmt.Sprintf("%s was built for kernel %s, not for %s: the kernel "+
					"loads it only if its symbols are the same",
					m.Path, release, boot), []string{"vermagic: " + m.Vermagic}, again)
		default:
			r.add(diagnosis.Error, "wrong-vermagic",
				fmt.Sprintf("%s was built for kernel %s, and %s refuses it", m.Path,
					release, boot),
				[]string{"vermagic: " + m.Vermagic}, again)
		}
	}
	if len(unread) > 0 {
		r.skip(fmt.Sprintf("%s of %s not read: %s %s",
			wording.Count(len(unread), "module file"), boot, unread[0], reason),
			"modinfo "+shellWord(unread[0]))
	}
	cores := filter(files, isCore)
	if len(cores) == 0 {
		return
	}
	if versions := versionsOf(files); len(versions) > 1 {
		r.add(diagnosis.Error, "mixed-versions", fmt.Sprintf("The modules of %s have different versions: %s", boot,
			strings.Join(versions, ", ")),
			pathsOf(files), again)
	}
	if !slices.ContainsFunc(files, func(m *ModuleFile) bool { return m.Part == "uvm" }) {
		r.add(diagnosis.Error, "no-uvm",
			"There is no nvidia-uvm module for "+boot.String()+": CUDA cannot be initialized",
			pathsOf(cores), again)
	}
	if f.Target == nil && !cores[0].Listed && strings.Contains(cores[0].Path, "/lib/modules/") &&
		!strings.HasPrefix(cores[0].Path, "/run/") {
		r.add(diagnosis.Warning, "not-in-modules-dep",
			"modprobe does not find "+cores[0].Path+": modules.dep does not list it",
			[]string{"/lib/modules/" + boot.release + "/modules.dep"}, "depmod "+shellWord(boot.release))
	}
}

// signatures judges whether the kernel accepts the signatures of the modules.
func signatures(f *Facts, r *judgment) {
	if !r.require(f.Signatures.Missing) {
		return
	}
	s := f.Signatures.Value
	var evidence []string
	if s.SecureBoot.Known() {
		evidence = append(evidence, fmt.Sprintf("secure boot: %s", onOff(s.SecureBoot.Value)))
	}
	if s.Lockdown != "" {
		evidence = append(evidence, "/sys/kernel/security/lockdown: "+s.Lockdown)
	}
	evidence = append(evidence, "module.sig_enforce: "+onOff(s.Enforced))
	if !s.required() {
		if !s.SecureBoot.Known() && s.Lockdown == "" {
			r.skip(s.SecureBoot.Missing)
			return
		}
		if s.SecureBoot.Value && s.SecureBoot.Known() {
			r.add(diagnosis.Info, "signatures-may-matter", "Secure boot is on, and this kernel does not demand signed "+
				"modules; another kernel may", evidence)
			return
		}
		r.ok("The kernel does not demand signed modules", evidence...)
		return
	}
	judged := 0
	for _, boot := range f.releases() {
		if f.owned(DriverContainer) && f.Target == nil {
			continue
		}
		files := filter(f.files(boot.release), func(m *ModuleFile) bool {
			return m.Unread == "" && m.Vermagic != "" &&
				(f.Target == nil || f.Target.Folder || f.Target.matches(m.Version))
		})
		judged += len(files)
		signers(f, r, boot, files, evidence)
	}
	switch {
	case judged == 0:
		r.skip("The kernel demands signed modules; no signature of a module was read")
	case !r.hasProblem():
		r.ok("The kernel demands signed modules, and knows the signers of the driver's modules", evidence...)
	}
}

// signers judges the signatures of the files that a boot would load.
func signers(f *Facts, r *judgment, boot boot, files []*ModuleFile, evidence []string) {
	s := f.Signatures.Value
	unsigned := filter(files, func(m *ModuleFile) bool { return !m.Signed })
	if len(unsigned) > 0 {
		are, them := "are", "them"
		if len(unsigned) == 1 {
			are, them = "is", "it"
		}
		r.add(diagnosis.Error, "unsigned-modules",
			fmt.Sprintf("%s for %s %s not signed, and the kernel refuses %s: Key was rejected by service",
				wording.Count(len(unsigned), "module"), boot, are, them),
			slices.Concat([]string{unsigned[0].Path}, evidence),
			"# sign the modules with a key that the firmware or the kernel knows, such as one enrolled by mokutil "+
				"--import")
	}
	bySigner := map[string]*ModuleFile{}
	for _, m := range files {
		if _, known := bySigner[m.Signer]; m.Signed && m.Signer != "" && !known {
			bySigner[m.Signer] = m
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bySigner)) {
		m := bySigner[name]
		remedy := []string{"mokutil --list-enrolled", "# enroll the key: mokutil --import KEY.der, and restart " +
			"the node"}
		if f.System.Value.Image {
			remedy = []string{"# the modules must come from the same build of the image as the kernel"}
		}
		switch {
		case boot.release == f.Kernel.Value && m.Version != "" && m.Version == f.Driver.Value.Version:
			// the kernel has loaded this version
		case len(s.Keys) == 0:
			r.skip(fmt.Sprintf("Whether the kernel knows the signer %q of %s is not known: the keys of the kernel "+
				"are not visible",
				name, m.Path))
		case !slices.Contains(s.Keys, name):
			r.add(diagnosis.Warning, "unknown-signer",
				fmt.Sprintf("The modules of %s are signed by %q, and the kernel "+
					"lists no key of that name: it probably refuses them",
					boot, name), slices.Concat([]string{m.Path}, evidence,
					[]string{"/proc/keys: " + strings.Join(s.Keys[:min(len(s.Keys), 8)], ", ")}), remedy...)
		}
	}
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// imageOf returns the words for what brings modules with an image.
func imageOf(f *Facts) string {
	if f.owned(GKE) {
		return GKE
	}
	return "the image of " + f.System.Value.Name
}

// versionsOf returns the known driver versions of files, each once, in order.
func versionsOf(files []*ModuleFile) (all []string) {
	for _, m := range files {
		if m.Version != "" {
			all = append(all, m.Version)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func pathsOf(files []*ModuleFile) (all []string) {
	for _, m := range files {
		text := m.Path
		if m.Version != "" {
			text += ": " + m.Version
		}
		all = append(all, text)
	}
	return all
}

// shellWord returns a text as one word of a shell. Names of the node may contain anything.
func shellWord(text string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("/._-+:@%", r)
	}
	if text != "" && !strings.ContainsFunc(text, func(r rune) bool { return !plain(r) }) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

func upper(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
