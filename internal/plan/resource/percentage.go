package resource

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Percentages of the threads of a GPU are tokens of the node: one token is one percent. Tokens
// limit the threads of a container; units of memory choose its GPU. Tokens reserve nothing, because
// the GPU they apply to is unknown.

const (
	percentageSuffix = ".percentage"
	// percentageID replaces the UUID in the IDs of the tokens.
	percentageID = "percentage"
	// percentageStep divides the number of tokens of every container.
	percentageStep = 5
)

// PercentageName returns the full name of the resource of percentages.
func PercentageName(prefix string) (string, error) {
	name := prefix + percentageSuffix
	if _, err := unitsPrefix(prefix, name); err != nil {
		return "", err
	}
	return name, nil
}

// IsPercentage reports whether a resource is a resource of percentages, by its name.
func IsPercentage(name string) bool {
	prefix, is := strings.CutSuffix(name, percentageSuffix)
	return is && unitsForm.MatchString(prefix)
}

// gatherPercentages creates the resource of percentages: 100 tokens for each GPU in units.
func (p *planner) gatherPercentages() {
	name := p.options.Units.Percentage
	if name == "" || len(p.units) == 0 {
		return
	}
	if p.resources[name] != nil {
		p.warn("percentages are not offered: other devices have their resource name %s; set units.percentage to "+
			"another name",
			name)
		return
	}
	g := &draft{}
	g.add(Device{
		UUID: percentageID, Index: percentageID, Resource: name, Sharing: Percentage, GI: inventory.Unattributed,
		CI:       inventory.Unattributed,
		NUMANode: inventory.NoNUMANode, Healthy: true,
	}, 100*len(p.units))
	p.resources[name] = g
}

// admitPercentage returns why a container may not be given so many tokens; nil if it may.
func (r Resource) admitPercentage(tokens int) error {
	if tokens > 100 || tokens%percentageStep != 0 {
		return fmt.Errorf("%d of %s cannot be given to a container: a percentage is a multiple of %d up to 100; "+
			"change the request", tokens,
			r.Name, percentageStep)
	}
	return nil
}
