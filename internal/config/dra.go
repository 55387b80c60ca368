package config

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// DRA chooses the GPUs that pods get by Dynamic Resource Allocation instead of the device plugin.
type DRA struct {
	Mode DRAMode
	// GPUs selects the GPUs for DRASplit.
	GPUs resource.Selector
	// DynamicMIG creates MIG devices for claims, and destroys them with the claims, on GPUs in MIG
	// mode under Dynamic Resource Allocation.
	DynamicMIG bool
	// SwitchMIG switches the MIG mode of GPUs that need no reset for it: on for claims with such
	// MIG devices, off for claims with the whole GPU.
	SwitchMIG bool
	// Shares is the maximum number of claims with parts of the memory of one GPU; 0 if a claim has
	// a GPU alone.
	Shares int
	// ShareBy is what is counted for shares. Without a limit, Shares has no effect.
	ShareBy dra.ShareBy
	// ClaimStatus writes the devices of each claim, and whether they are ready and healthy, into
	// the status of the claim.
	ClaimStatus bool
	// Metadata gives the containers of a claim a file about their devices.
	Metadata bool
}

// DRAMode chooses the GPUs that pods get by Dynamic Resource Allocation.
type DRAMode int

// The modes.
const (
	DRAOff   DRAMode = iota // none
	DRAAll                  // all
	DRASplit                // selected GPUs
)

func (m DRAMode) String() string {
	switch m {
	case DRAOff:
		return "plugin"
	case DRAAll:
		return "dra"
	case DRASplit:
		return "split"
	}
	return fmt.Sprintf("DRAMode(%d)", int(m))
}

// GivenByDRA reports whether pods get a GPU by Dynamic Resource Allocation. Nobody gets a GPU that
// the selectors exclude.
func (c Config) GivenByDRA(g inventory.GPU) bool {
	return (c.DRA.Mode == DRAAll || c.DRA.Mode == DRASplit && c.DRA.GPUs.SelectsGPU(g)) && !c.Resource.Excludes(g)
}

// draOptions are the settings of Dynamic Resource Allocation. Only the file can select GPUs.
var draOptions = []option{
	{
		flag: "dra-mode", common: true, env: []string{"DRA_MODE"}, key: "dra.mode", fallback: "plugin",
		usage: "how pods get GPUs: plugin (as resources of the device plugin), dra (by Dynamic Resource " +
			"Allocation), or split (by Dynamic Resource Allocation for the GPUs of dra.gpus in the file, as " +
			"resources for the others)",
		set: choice(func(c *Config) *DRAMode { return &c.DRA.Mode }, DRAOff, DRAAll, DRASplit),
	},
	{
		flag: "dra-driver-name", env: []string{"DRA_DRIVER_NAME"}, key: "dra.driverName", fallback: dra.Driver,
		usage: "name of the driver of Dynamic Resource Allocation, also in ResourceSlices and claims",
		set:   setDriverName, restart: true,
	},
	{
		flag: "dra-dynamic-mig", env: []string{"DRA_DYNAMIC_MIG"}, key: "dra.dynamicMIG", fallback: "false",
		kind: kindBool,
		usage: "create MIG devices for claims, and destroy them with the claims, on GPUs in MIG mode that pods get " +
			"by Dynamic Resource Allocation and that have no other MIG devices",
		set: truth(func(c *Config) *bool { return &c.DRA.DynamicMIG }),
	},
	{
		flag: "dra-switch-mig", env: []string{"DRA_SWITCH_MIG"}, key: "dra.switchMIG", fallback: "false",
		kind: kindBool,
		usage: "with dra.dynamicMIG, switch MIG mode on for MIG devices and off for the whole GPU, on GPUs that " +
			"need no reset for it (Hopper and later)",
		set: truth(func(c *Config) *bool { return &c.DRA.SwitchMIG }),
	},
	{
		flag: "dra-shares", env: []string{"DRA_SHARES"}, key: "dra.shares", fallback: "0",
		usage: "maximum number of claims that share the memory of one GPU under Dynamic Resource Allocation, 2 to " +
			"48; 0: no sharing",
		set: setShares,
	},
	{
		flag: "dra-share-by", env: []string{"DRA_SHARE_BY"}, key: "dra.shareBy", fallback: "memory",
		usage: "how claims share a device: memory (each claim requests a part of the memory of a GPU, dra.shares is " +
			"the maximum number of claims), count (each claim has one of dra.shares shares of a GPU or MIG device) " +
			"or unlimited (any number of claims)",
		set: setShareBy,
	},
	{
		flag: "dra-claim-status", env: []string{"DRA_CLAIM_STATUS"}, key: "dra.claimStatus", fallback: "false",
		kind:  kindBool,
		usage: "write the GPUs and MIG devices of each claim, and whether they are ready and healthy, into its status",
		set:   truth(func(c *Config) *bool { return &c.DRA.ClaimStatus }),
	},
	{
		flag: "dra-metadata", env: []string{"DRA_METADATA"}, key: "dra.metadata", fallback: "false", kind: kindBool,
		usage: "give containers of new claims a file with their GPUs and MIG devices (KEP-5304)",
		set:   truth(func(c *Config) *bool { return &c.DRA.Metadata }),
	},
}

// driverForm matches a DNS subdomain. Kubernetes allows maxDriverName characters.
var driverForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

const maxDriverName = 63

func setDriverName(c *Config, text string) error {
	if len(text) > maxDriverName || !driverForm.MatchString(text) {
		return fmt.Errorf("must be a DNS subdomain of at most %d characters, such as gpu.example.com, not %q",
			maxDriverName, text)
	}
	c.DRADriver = text
	return nil
}

// setShares accepts at most the number of clients of one MPS server, because a GPU has one server.
func setShares(c *Config, text string) error {
	most, err := strconv.Atoi(text)
	if err != nil || most != 0 && (most < 2 || most > resource.MPSClients) {
		return fmt.Errorf("must be 0, or from 2 to %d, not %q", resource.MPSClients, text)
	}
	c.DRA.Shares = most
	return nil
}

func setShareBy(c *Config, text string) error {
	by := dra.ShareBy(text)
	if !slices.Contains([]dra.ShareBy{dra.ByMemory, dra.ByCount, dra.Unlimited}, by) {
		return fmt.Errorf("must be memory, count or unlimited, not %q", text)
	}
	c.DRA.ShareBy = by
	return nil
}

// dra checks the mode. It runs after the blocks: an entry for the device plugin must not be about a
// GPU that the device plugin does not have.
func (d *document) dra(c *Config, s Sources) {
	given := d.config.DRA
	if given != nil && given.GPUs != nil {
		c.DRA.GPUs = resource.Selector{
			Where: "dra.gpus",
			Devices: append(parsed(d, "dra.gpus.uuids", given.GPUs.UUIDs, wholeGPU),
				parsed(d, "dra.gpus.indices", given.GPUs.Indices, wholeGPU)...),
			PCI:    parsed(d, "dra.gpus.pci", given.GPUs.PCI, resource.ParsePCI),
			Models: parsed(d, "dra.gpus.models", given.GPUs.Models, parsePattern),
		}
	}
	if !d.reads("dra-mode") {
		return
	}
	selected := len(c.DRA.GPUs.Devices)+len(c.DRA.GPUs.PCI)+len(c.DRA.GPUs.Models) > 0
	switch {
	case c.DRA.Mode == DRASplit && !selected:
		d.refuse("dra.gpus", "selects nothing; with the mode split set uuids, indices, pci or models")
	case c.DRA.Mode != DRASplit && selected:
		d.warn("dra.gpus", d.line("dra.gpus"), "has no effect without the mode split")
	}
	d.shares(c)
	if c.DRA.Mode == DRAOff || s.Discovery {
		return
	}
	for _, needed := range []struct{ flag, value, why string }{
		{"--state-dir", c.StateDir, "it records the devices of pods"},
		{"--kubelet-socket", c.KubeletSocket, "the kubelet reports the devices of pods"},
		{"--pod-resources-socket", c.PodResourcesSocket, "the kubelet lists the devices of pods there"},
	} {
		if needed.value == "" && d.reads(needed.flag[2:]) {
			d.problem("--dra-mode", d.line("dra.mode"),
				fmt.Sprintf("%s needs %s: %s", c.DRA.Mode, needed.flag, needed.why))
		}
	}
	if c.DRA.Mode == DRAAll && len(c.Resource.Sharing.Rules) > 0 {
		d.problem("dra.mode", d.line("dra.mode"), "with dra no GPU is shared by the device plugin; remove sharing")
	}
	for _, sel := range c.Resource.Selectors {
		switch {
		case sel.Exclude:
		case c.DRA.Mode == DRAAll:
			d.refuse(sel.Where, "renames or shares GPUs that the device plugin does not have: the mode is dra")
		default:
			d.apart(sel.Where, c.DRA.GPUs, sel)
		}
	}
	for _, rule := range c.Resource.Sharing.Rules {
		d.apart(rule.Where, c.DRA.GPUs, resource.Selector{Where: rule.Where, Devices: rule.Devices})
	}
}

// shares checks the settings of shares.
func (d *document) shares(c *Config) {
	switch {
	case c.DRA.ShareBy == dra.ByCount && c.DRA.Shares == 0 && d.reads("dra-share-by"):
		d.problem("--dra-share-by", d.line("dra.shareBy"), "count needs dra.shares: how many shares a device has")
	case c.DRA.ShareBy == dra.Unlimited && c.DRA.Shares > 0:
		d.warn("dra.shares", d.line("dra.shares"), "has no effect with dra.shareBy: unlimited")
	}
	switch {
	case !c.DRA.SwitchMIG || !d.reads("dra-switch-mig"):
	case !c.DRA.DynamicMIG:
		d.problem("--dra-switch-mig", d.line("dra.switchMIG"), "needs dra.dynamicMIG: true")
	case c.DRA.Shares > 0, c.DRA.ShareBy == dra.Unlimited:
		d.problem("--dra-switch-mig", d.line("dra.switchMIG"),
			"a GPU of which MIG devices can be made is not given in shares; remove dra.shares and dra.shareBy, or "+
				"dra.switchMIG")
	}
}

// apart refuses an entry that renames or shares devices of selected GPUs on every node with these
// devices.
func (d *document) apart(where string, selected, entry resource.Selector) {
	named := mentions{}
	_ = conflict(selected, nil, named)
	if text := conflict(entry, []resource.Selector{selected}, named); text != "" {
		d.refuse(where, text+"; GPUs of dra.gpus are not given by the device plugin")
	}
}

// wholeGPU is resource.ParseRef for a GPU, which claims get whole.
func wholeGPU(text string) (resource.Ref, error) {
	ref, err := resource.ParseRef(text)
	if err == nil && (strings.HasPrefix(text, "MIG-") || strings.Contains(text, ":")) {
		return "", fmt.Errorf("%q is a MIG device; name its GPU, which is given with all of its MIG devices", text)
	}
	return ref, err
}
