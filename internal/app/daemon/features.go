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

// maxMachineName is the largest file with the name of the machine that is read, in bytes.
const maxMachineName = 4096

// MachineName returns the name of the machine that is in a file.
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
	problem *feed.Feed[error] // why it is not written
}

// run keeps the file while the configuration wants it.
func (f *featureFile) run(ctx context.Context) error {
	return (&featurefile.Writer{Wanted: f.wanted, Problem: f.problem}).Run(ctx)
}

// wanted returns what the file is to be now, and what is closed when that may change.
func (f *featureFile) wanted() (target featurefile.Target, configured, labeled <-chan struct{}) {
	c, configured := f.configs.Latest()
	set, labeled := f.labels.Latest()
	if c.Features.Labels != config.LabelsFile {
		return featurefile.Target{}, configured, nil
	}
	target = featurefile.Target{Path: c.Features.LabelsFile, Labels: set, Renewal: featurefile.Lifetime / 4,
		Lifetime: featurefile.Lifetime}
	if c.Discovery.On {
		target.Renewal, target.Lifetime = c.Discovery.Sleep, max(4*c.Discovery.Sleep, featurefile.Lifetime)
	}
	if target.Renewal == 0 {
		target.Lifetime = 0
	}
	return target, configured, labeled
}
