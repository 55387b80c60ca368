package resource

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Percentages of the threads of a GPU are tokens of the node: one is one percent. A container gets
// a limit by them, and its GPU by units of memory. They are no reservation: which GPU they are for
// is not known.

const (
	percentageSuffix = ".percentage"
	// percentageID is what the IDs of the tokens begin with, in the place of a UUID.
	percentageID = "percentage"
	// percentageStep is what the number of tokens of a container is a multiple of.
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

// IsPercentage reports whether a resource is one of percentages, by its name.
func IsPercentage(name string) bool {
	prefix, is := strings.CutSuffix(name, percentageSuffix)
	return is && unitsForm.MatchString(prefix)
}

// gatherPercentages makes the resource of percentages: 100 tokens for each GPU in units.
func (p *planner) gatherPercentages() {
	name := p.options.Units.Percentage
	if name == "" || len(p.units) == 0 {
		return
	}
	if p.resources[name] != nil {
		p.warn("there are no percentages: other devices have their name, %s; give units.percentage another one", name)
		return
	}
	g := &gathered{}
	g.add(Device{
		UUID: percentageID, Index: percentageID, Resource: name, Sharing: Percentage, GI: inventory.Unattributed, CI: inventory.Unattributed,
		NUMANode: inventory.NoNUMANode, Healthy: true,
	}, 100*len(p.units))
	p.resources[name] = g
}

// admitPercentage returns why a container may not be given so many tokens; nil if it may.
func (r Resource) admitPercentage(tokens int) error {
	if tokens > 100 || tokens%percentageStep != 0 {
		return fmt.Errorf("the container asks for %d of %s: it is a percentage, and a multiple of %d up to 100", tokens,
			r.Name, percentageStep)
	}
	return nil
}
