package containeredits

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// CDIVendor is the vendor part of all CDI names that containers are given.
const CDIVendor = "k8s.device-plugin.nvidia.com"

// A CDIClass is the class part of CDI names.
type CDIClass string

// The classes.
const (
	CDIGPU     CDIClass = "gpu"
	CDIIMEX    CDIClass = "imex-channel"
	CDIGDRCopy CDIClass = "gdrcopy"
	CDIGDS     CDIClass = "gds"
	CDIMOFED   CDIClass = "mofed"
)

// companions are the classes beside CDIGPU, the device node without which the node does not have
// them, and the only device of each.
var companions = [...]struct {
	class  CDIClass
	node   inventory.ControlNodes
	device string
}{
	{CDIIMEX, inventory.NodeIMEXChannel0, imexChannel},
	{CDIGDRCopy, inventory.NodeGDRCopy, "all"},
	{CDIGDS, inventory.NodeGDS, "all"},
	{CDIMOFED, inventory.NodeRDMA, "all"},
}

// CDICompanions returns the devices beside GPUs that a node with these device nodes gives its
// containers, by class.
func CDICompanions(control inventory.ControlNodes, o Options) map[CDIClass]string {
	c := container{options: o, devices: []resource.Device{{Control: control}}}
	all := map[CDIClass]string{}
	for _, companion := range companions {
		if c.has(companion.node) {
			all[companion.class] = companion.device
		}
	}
	return all
}

// CDIName is the device part of a device's CDI name. The UUIDs that drivers before R470 give to MIG
// devices have slashes, which CDI does not allow.
func CDIName(d resource.Device, by IDStrategy) string {
	return strings.ReplaceAll(Name(d, by), "/", "_")
}

// qualified is a CDI name.
func qualified(class CDIClass, name string) string {
	return CDIVendor + "/" + string(class) + "=" + name
}

// cdiNames returns the CDI names of all that the container is to have.
func (c *container) cdiNames() []string {
	var names []string
	for _, d := range c.devices {
		names = append(names, qualified(CDIGPU, CDIName(d, c.options.IDs)))
	}
	for _, companion := range companions {
		if c.has(companion.node) {
			names = append(names, qualified(companion.class, companion.device))
		}
	}
	if c.limited {
		names = append(names, qualified(c.bound.Class, c.bound.CDIName))
	}
	return names
}

// annotationKey is a key that no other request of one pod has: of one for other devices, the names
// differ.
func (c *container) annotationKey(names []string) string {
	sum := sha256.Sum256([]byte(strings.Join(names, ",")))
	return c.options.AnnotationPrefix + "nvidia-device-plugin_" + hex.EncodeToString(sum[:16])
}
