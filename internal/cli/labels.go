package cli

import (
	"context"
	"strings"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/featurefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/labels"
)

// maxMachineName is the largest file with the name of the machine that is read, in bytes.
const maxMachineName = 4096

// machineName returns the name of the machine that is in a file.
func machineName(file string) string {
	text, err := files.Read(file, maxMachineName)
	if err != nil {
		return labels.UnknownMachine
	}
	return strings.TrimSpace(string(text))
}

// writeFeatures keeps the file for node-feature-discovery, while the configuration wants it.
func (d *daemon) writeFeatures(ctx context.Context) error {
	wanted := func() (featurefile.Target, <-chan struct{}, <-chan struct{}) {
		c, configured := d.watcher.Configs().Latest()
		set, labeled := d.labels.Wanted.Latest()
		if c.Features.Labels != config.LabelsFile {
			return featurefile.Target{}, configured, nil
		}
		target := featurefile.Target{Path: c.Features.LabelsFile, Labels: set, Renewal: featurefile.Lifetime / 4, Lifetime: featurefile.Lifetime}
		if c.Discovery.On {
			target.Renewal, target.Lifetime = c.Discovery.Sleep, max(4*c.Discovery.Sleep, featurefile.Lifetime)
		}
		if target.Renewal == 0 {
			target.Lifetime = 0
		}
		return target, configured, labeled
	}
	return (&featurefile.Writer{Wanted: wanted, Clock: clock.RealClock{}, Problem: d.unlabeled}).Run(ctx)
}
