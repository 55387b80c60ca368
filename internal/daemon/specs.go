package daemon

import (
	"os"
	"sync/atomic"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// specs gives the agent the CDI specs of a directory.
type specs struct {
	writer  *cdi.Writer
	written atomic.Pointer[cdi.Written]
}

func newSpecs(dir string) *specs {
	s := &specs{writer: cdi.NewWriter(dir, os.DirFS("/"))}
	s.written.Store(&cdi.Written{})
	return s
}

func (s *specs) Apply(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) error {
	written, err := s.writer.Apply(wanted(snapshot, plan, c))
	s.written.Store(&written)
	return err
}

func (s *specs) Lacks(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) map[string]string {
	return s.written.Load().Lacks(wanted(snapshot, plan, c))
}

func wanted(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) cdi.Wanted {
	return cdi.Wanted{Snapshot: snapshot, Plan: plan, Edits: c.Edits, Options: c.CDI}
}
