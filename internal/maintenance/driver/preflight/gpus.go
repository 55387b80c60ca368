package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
)

// A generation is a range of chips with the same needs.
type generation struct {
	name string
	// first and last are the first and the last driver branch with support; 0 for no limit.
	first, last int
	// open is true if the generation needs the open kernel modules, and closed is true if it needs
	// the proprietary ones.
	open, closed bool
}

// The generations with limits of their own. Sources: the lists of supported GPUs of the driver's
// releases, and the README of the open kernel modules. Branches 580 and older support chips before
// Turing.
var (
	kepler    = generation{name: "Kepler", last: 470, closed: true}
	maxwell   = generation{name: "Maxwell", last: 580, closed: true}
	pascal    = generation{name: "Pascal", last: 580, closed: true}
	volta     = generation{name: "Volta", last: 580, closed: true}
	turing    = generation{name: "Turing", first: 410}
	ampere    = generation{name: "Ampere", first: 450}
	ada       = generation{name: "Ada Lovelace", first: 525}
	hopper    = generation{name: "Hopper", first: 525}
	grace     = generation{name: "Grace Hopper", first: 525, open: true}
	blackwell = generation{name: "Blackwell", first: 570, open: true}
	ultra     = generation{name: "Blackwell Ultra", first: 580, open: true}
)

// chips are the ranges of PCI device IDs of the generations, by pci.ids. A device in no range is not
// judged.
var chips = []struct {
	from, to uint16
	generation
}{
	{0x0fc0, 0x12bf, kepler},
	{0x1340, 0x14ff, maxwell},
	{0x15f0, 0x15ff, pascal},
	{0x1600, 0x16ff, maxwell},
	{0x1740, 0x17ff, maxwell},
	{0x1b00, 0x1d7f, pascal},
	{0x1d80, 0x1dff, volta},
	{0x1e00, 0x1fff, turing},
	{0x2080, 0x20ff, ampere},
	{0x2180, 0x21ff, turing},
	{0x2200, 0x22ff, ampere},
	{0x2300, 0x2341, hopper},
	{0x2342, 0x2348, grace},
	{0x2349, 0x237f, hopper},
	{0x2400, 0x25ff, ampere},
	{0x2680, 0x28ff, ada},
	{0x2900, 0x29ff, blackwell},
	{0x2b80, 0x2dff, blackwell},
	{0x2e00, 0x2e3f, blackwell},
	{0x2f00, 0x2f7f, blackwell},
	{0x3180, 0x31ff, ultra},
}

// coherent are the device IDs of GPUs with memory that is coherent with that of the processor: GH200,
// GB200 and GB300.
var coherent = []uint16{0x2342, 0x2343, 0x2345, 0x2348, 0x2941, 0x31c2}

// generation returns the generation of a GPU; false if the device is unknown.
func (g GPU) generation() (generation, bool) {
	for _, c := range chips {
		if c.from <= g.Device && g.Device <= c.to {
			return c.generation, true
		}
	}
	return generation{}, false
}

// branch returns the branch of a driver version, such as 580 of 580.95.05; 0 if it is unknown.
func branch(version string) int {
	text, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// architectures judges whether the driver in question supports the GPUs, with its kind of modules.
func architectures(f *Facts, r *judgment) {
	if !r.require(f.GPUs.Missing) {
		return
	}
	var generations []generation
	for _, g := range f.GPUs.Value {
		found, known := g.generation()
		if !known {
			r.skip(fmt.Sprintf("GPU %s has a device ID that is not in the table: 0x%04x", g.Address, g.Device))
			continue
		}
		if !slices.Contains(generations, found) {
			generations = append(generations, found)
		}
	}
	if len(generations) == 0 {
		if len(f.GPUs.Value) == 0 {
			r.ok("No NVIDIA GPU is on the PCI bus")
		}
		return
	}
	open, closed := named(generations, func(g generation) bool { return g.open }),
		named(generations, func(g generation) bool { return g.closed })
	if open != "" && closed != "" {
		r.add(diagnosis.Error, "no-driver-for-all-gpus",
			fmt.Sprintf("No driver supports all GPUs: %s needs the open kernel modules, %s the proprietary ones",
				open, closed), nil, "# put these GPUs into different nodes")
	}
	version := f.wanted()
	for _, g := range generations {
		switch at := branch(version); {
		case at == 0:
		case g.first > at:
			r.add(diagnosis.Error, "driver-too-old-for-gpu",
				fmt.Sprintf("Driver %s does not support %s GPUs: R%d is the first branch that does", version, g.name,
					g.first), nil, "# choose a driver of another branch")
		case g.last != 0 && g.last < at:
			r.add(diagnosis.Error, "driver-too-new-for-gpu",
				fmt.Sprintf("Driver %s does not support %s GPUs: R%d is the last branch that does", version, g.name,
					g.last), nil, "# choose a driver of another branch")
		}
	}
	isOpen, known, from := f.openModules()
	switch {
	case open != "" && known && !isOpen:
		r.add(diagnosis.Error, "proprietary-modules",
			open+" GPUs need the open kernel modules, and these are proprietary ones",
			[]string{from},
			"# install the open kernel modules of the same version")
	case closed != "" && known && isOpen:
		r.add(diagnosis.Error, "open-modules",
			closed+" GPUs need the proprietary kernel modules, and these are open ones",
			[]string{from},
			"# install the proprietary kernel modules of the same version")
	case open != "" && !known:
		r.add(diagnosis.Info, "open-modules-needed", open+" GPUs need the open kernel modules: choose them", nil)
	case closed != "" && !known:
		r.add(diagnosis.Info, "proprietary-modules-needed",
			closed+" GPUs need the proprietary kernel modules: choose them", nil)
	}
	if !r.hasProblem() {
		all := named(generations, func(generation) bool { return true })
		r.ok(upper(f.name())+" supports the GPUs", all)
	}
}

// named returns the names of some generations.
func named(all []generation, is func(generation) bool) string {
	var names []string
	for _, g := range filter(all, is) {
		names = append(names, g.name)
	}
	return strings.Join(names, " and ")
}

// openModules reports whether the modules of the driver in question are the open ones, whether that
// is known, and by which file.
func (f *Facts) openModules() (open, known bool, from string) {
	for _, boot := range f.releases() {
		for _, m := range f.files(boot.release) {
			if isCore(m) && m.License != "" && (f.Target == nil || f.Target.Folder || f.Target.matches(m.Version)) {
				return m.Open(), true, m.Path + ": license " + m.License
			}
		}
	}
	if f.Target == nil && f.Driver.Value.Version != "" {
		return f.Driver.Value.Open, true, "/proc/driver/nvidia/version"
	}
	return false, false, ""
}

// companions judges the services that must have the version of the driver.
func companions(f *Facts, r *judgment) {
	running := 0
	for _, c := range []struct {
		name, pack string
		diagnosis.Fact[Companion]
	}{{"Fabric Manager", "nvidia-fabricmanager", f.FabricManager}, {"IMEX", "nvidia-imex", f.IMEX}} {
		if !r.require(c.Fact.Missing) || !c.Value.Runs {
			continue
		}
		running++
		loaded := f.Driver.Value.Version
		switch {
		case c.Value.Version == "":
			r.skip(c.name+" runs, and its version is not known; it must be the version of the driver",
				"# compare the version of the package "+c.pack+" with the driver")
		case f.Target != nil && f.Target.Version != "" && !f.Target.matches(c.Value.Version):
			r.add(diagnosis.Warning, "companion-version",
				fmt.Sprintf("%s %s runs, and must have the version of the driver: "+
					"change it to %s together with the driver",
					c.name, c.Value.Version, f.Target.Version), []string{c.Value.Source},
				"# install "+c.pack+" "+f.Target.Version+" with the driver")
		case f.Target == nil && loaded != "" && c.Value.Version != loaded:
			r.add(diagnosis.Warning, "companion-version",
				fmt.Sprintf("%s %s runs beside driver %s: it must have the same version", c.name, c.Value.Version,
					loaded), []string{c.Value.Source}, "# install "+c.pack+" "+loaded)
		}
	}
	if running == 0 && !r.hasProblem() {
		r.ok("Neither Fabric Manager nor IMEX is running")
	} else if !r.hasProblem() {
		r.ok("Fabric Manager and IMEX fit the driver where they run")
	}
}

func nouveau(f *Facts, r *judgment) {
	const blacklist = "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' >> /etc/modprobe.d/nouveau.conf"
	for _, g := range f.GPUs.Value {
		if g.Module == "nouveau" || g.Module == "nova_core" {
			r.add(diagnosis.Error, "nouveau",
				fmt.Sprintf("GPU %s is bound to %s, so NVIDIA's driver cannot use it", g.Address,
					g.Module),
				[]string{"/sys/bus/pci/devices/" + g.Address + "/driver: " + g.Module}, blacklist,
				"update-initramfs -u || dracut --force", "systemctl reboot")
			return
		}
	}
	switch {
	case !r.require(f.Loaded.Missing):
	case slices.ContainsFunc(f.Loaded.Value, func(m LoadedModule) bool { return m.Name == "nouveau" }):
		r.add(diagnosis.Warning, "nouveau",
			"The module nouveau is loaded, and may take a GPU when NVIDIA's driver is unloaded",
			[]string{"/proc/modules: nouveau"}, blacklist, "modprobe -r nouveau")
	default:
		r.ok("nouveau is not loaded", "/proc/modules")
	}
}

func memory(f *Facts, r *judgment) {
	if !f.GPUs.Known() || !slices.ContainsFunc(f.GPUs.Value, func(g GPU) bool {
		return slices.Contains(coherent,
			g.Device)
	}) {
		r.ok("No GPU is known to have coherent memory")
		return
	}
	if !r.require(f.Memory.Missing) {
		return
	}
	m := f.Memory.Value
	var nodes []string
	for _, n := range m.Nodes {
		nodes = append(nodes, strconv.Itoa(n))
	}
	evidence := []string{"/proc/driver/nvidia/params: CoherentGPUMemoryMode: " + cmp.Or(m.Mode, "not set")}
	if len(nodes) > 0 {
		evidence = append(evidence, "NUMA nodes with memory and without processors: "+strings.Join(nodes, ", "))
	}
	switch {
	case m.Mode == "driver":
		r.add(diagnosis.Info, "coherent-memory",
			"GPU memory is coherent and managed by the driver (CDMM): the kernel keeps no pages there", evidence)
	case len(nodes) > 0:
		r.add(diagnosis.Info, "coherent-memory",
			"GPU memory is coherent and is NUMA memory of the kernel: pages of any process may lie there, and only a "+
				"restart of the node is certain to unload the driver", evidence)
	default:
		r.add(diagnosis.Info, "coherent-memory", "GPU memory is coherent, and no NUMA node shows it", evidence)
	}
}

// The bytes of free space that a driver needs, by path: the user space and firmware of R580 have about
// 1 GB unpacked, and an initramfs with the driver about 200 MB. gpu-driver leaves /usr and /boot alone.
var (
	installSpace = map[string]uint64{"/usr": 2 << 30, "/boot": 256 << 20}
	folderSpace  = map[string]uint64{"/var/lib": 2 << 30}
)

func space(f *Facts, r *judgment) {
	required := installSpace
	switch {
	case f.Target != nil && f.Target.Folder:
		required = folderSpace
	case f.Target == nil || f.System.Value.Image:
		r.ok("Nothing is to be installed on the node")
		return
	}
	if !r.require(f.Space.Missing) {
		return
	}
	var seen []string
	for _, s := range f.Space.Value {
		least, needed := required[s.Path]
		if !needed {
			continue
		}
		text := fmt.Sprintf("%s: %d MiB free", s.Path, s.Free>>20)
		if s.Free < least {
			r.add(diagnosis.Warning, "no-space",
				fmt.Sprintf("%s has %d MiB free, and a driver needs about %d MiB", s.Path,
					s.Free>>20, least>>20),
				[]string{text}, "df -h "+s.Path)
		}
		seen = append(seen, text)
	}
	switch {
	case len(seen) == 0:
		r.skip("The free space for a driver is not known")
	case !r.hasProblem():
		r.ok("There is space for a driver", seen...)
	}
}

// changes are the ways to change the driver, by owner.
var changes = map[string]string{
	Dpkg:            "# change it with apt: a file that another installer writes is overwritten at the next upgrade",
	RPM:             "# change it with dnf: a file that another installer writes is overwritten at the next upgrade",
	RunFile:         "# run nvidia-uninstall before another installer installs a driver",
	DriverContainer: "# change driver.version in the ClusterPolicy or the NVIDIADriver object",
	GKE:             "# change gpu-driver-version of the node pool, or the installer's DaemonSet",
	GPUDriver:       "# change driver.version in the node's configuration file, or run on the node: gpu-driver swap",
	Image:           "# change the image of the node, and replace or upgrade the node",
}

func owners(f *Facts, r *judgment) {
	if !r.require(f.Owners.Missing) {
		return
	}
	var names, evidence, remedy []string
	for _, o := range f.Owners.Value {
		names = append(names, strings.TrimSpace(o.Kind+" "+o.Version))
		evidence = append(evidence, o.Evidence)
		remedy = append(remedy, changes[o.Kind])
	}
	switch len(names) {
	case 0:
		if f.Driver.Value.Version != "" {
			r.skip("What installed the driver is not known: no package, installer, container or image was recognized")
			return
		}
		r.ok("No driver is installed")
	case 1:
		r.add(diagnosis.Info, "owner", "The driver was installed by "+names[0], evidence, remedy...)
	default:
		r.add(diagnosis.Warning, "several-owners",
			"The driver has several owners, which overwrite each other's files: "+strings.Join(names, "; "),
			evidence, remedy...)
	}
}
