package daemon

import (
	"context"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/featurefile"
)

// maxMachineName is the greatest size of a file with the machine's name, in bytes.
const maxMachineName = 4096

// MachineName returns the machine's name from a file.
func MachineName(file string) string {
	text, err := statefile.Read(file, maxMachineName)
	if err != nil {
		return labels.UnknownMachine
	}
	return strings.TrimSpace(string(text))
}

// A featureFile is the file for node-feature-discovery.
type featureFile struct {
	configs *feed.Feed[config.Config]
	labels  *feed.Feed[map[string]string]
	problem *feed.Feed[error] // why the file is not written
}

// run maintains the file while it is configured.
func (f *featureFile) run(ctx context.Context) error {
	return (&featurefile.Writer{Wanted: f.latestTarget, Problem: f.problem}).Run(ctx)
}

// latestTarget returns the wanted file, and channels that are closed when it may have changed.
func (f *featureFile) latestTarget() (target featurefile.Target, configChanged, labelsChanged <-chan struct{}) {
	c, configChanged := f.configs.Latest()
	set, labelsChanged := f.labels.Latest()
	if c.Features.Labels != config.LabelsFile {
		return featurefile.Target{}, configChanged, nil
	}
	if c.Discovery.On {
		return featurefile.DiscoveryTarget(c.Features.LabelsFile, set, c.Discovery.Sleep), configChanged, labelsChanged
	}
	return featurefile.DaemonTarget(c.Features.LabelsFile, set), configChanged, labelsChanged
}
