package daemon

import (
	"errors"
	"os"
	"sync/atomic"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/devnodes"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// specs maintains the CDI specs of a directory, and the host's device nodes.
type specs struct {
	writer  *cdi.Writer
	nodes   devnodes.Maker
	written atomic.Pointer[cdi.Written]
}

func newSpecs(dir string) *specs {
	s := &specs{writer: cdi.NewWriter(dir, os.DirFS("/"))}
	s.written.Store(&cdi.Written{})
	return s
}

func (s *specs) Apply(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) error {
	var specs cdi.Written
	var specsErr, nodesErr error
	if c.Edits.UsesCDI() {
		specs, specsErr = s.writer.Apply(wantedSpecs(snapshot, plan, c))
	}
	s.written.Store(&specs)
	if givesNodes(c) {
		roots := devnodes.Roots{Driver: c.Driver.Root, Container: c.Driver.ContainerRoot, Dev: c.Driver.DevRoot,
			Divides: c.MIG.Enabled}
		nodesErr = s.nodes.Apply(roots, snapshot, plan, c.Edits)
	}
	return errors.Join(specsErr, nodesErr)
}

func (s *specs) Lacks(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) []resource.Hold {
	var holds []resource.Hold
	if givesNodes(c) {
		for uuid, why := range s.nodes.Lacks(plan, c.Edits) {
			holds = append(holds, resource.Hold{
				UUID: uuid, Reason: why, Row: resource.RowFiles, Hidden: true, Node: true,
			})
		}
	}
	if c.Edits.UsesCDI() {
		for uuid, why := range s.written.Load().Lacks(wantedSpecs(snapshot, plan, c)) {
			holds = append(holds, resource.Hold{UUID: uuid, Reason: why, Row: resource.RowFiles, Hidden: true})
		}
	}
	return holds
}

// givesNodes reports whether containers get device nodes of the host. A simulated GPU has none.
func givesNodes(c config.Config) bool { return c.Edits.GivesNodes() && c.Simulate == "" }

func wantedSpecs(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) cdi.Wanted {
	return cdi.Wanted{Snapshot: snapshot, Plan: plan, Edits: c.Edits, Options: c.CDI}
}
