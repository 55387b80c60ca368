package containeredits

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// CDIVendor is the vendor part of all CDI names.
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

// companions are the classes beside CDIGPU. Each class has one device and needs a device node on
// the node.
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

// CDICompanions returns, by class, the devices beside GPUs for containers on a node with these
// device nodes.
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

// CDIName returns the device part of a device's CDI name. UUIDs of MIG devices before R470 contain
// slashes, which are invalid in CDI.
func CDIName(d resource.Device, by IDStrategy) string {
	return strings.ReplaceAll(Name(d, by), "/", "_")
}

// qualifiedName returns a complete CDI name.
func qualifiedName(class CDIClass, name string) string {
	return CDIVendor + "/" + string(class) + "=" + name
}

// cdiNames returns all CDI names of the container.
func (c *container) cdiNames() []string {
	var names []string
	for _, d := range c.devices {
		names = append(names, qualifiedName(CDIGPU, CDIName(d, c.options.IDs)))
	}
	for _, companion := range companions {
		if c.has(companion.node) {
			names = append(names, qualifiedName(companion.class, companion.device))
		}
	}
	if c.hasLimit {
		names = append(names, qualifiedName(c.limitValue.Class, c.limitValue.CDIName))
	}
	return names
}

// annotationKey returns a unique key among the requests of one pod: requests for other devices have
// other names.
func (c *container) annotationKey(names []string) string {
	sum := sha256.Sum256([]byte(strings.Join(names, ",")))
	return c.options.AnnotationPrefix + "nvidia-device-plugin_" + hex.EncodeToString(sum[:16])
}
