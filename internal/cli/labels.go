package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/featurefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
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

// yieldPoll is how often it is looked whether this process still yields to another one.
const yieldPoll = 10 * time.Second

// yields reports whether a process of this program that started later serves a resource of this one.
func (d *daemon) yields() bool {
	return slices.ContainsFunc(d.set.Status(), func(s plugin.Status) bool { return s.Phase == plugin.PhaseYielding })
}

// writeFeatures keeps the file for node-feature-discovery, while the configuration wants it.
func (d *daemon) writeFeatures(ctx context.Context) error {
	return (&featurefile.Writer{Wanted: d.features, Clock: clock.RealClock{}, Problem: d.unlabeled}).Run(ctx)
}

// features returns what the file for node-feature-discovery is to be now, and what is closed when that may change.
func (d *daemon) features() (target featurefile.Target, configured, labeled <-chan struct{}) {
	c, configured := d.watcher.Configs().Latest()
	set, labeled := d.labels.Wanted.Latest()
	switch {
	case c.Features.Labels != config.LabelsFile:
		return featurefile.Target{}, configured, nil
	case d.set != nil && d.yields():
		return featurefile.Target{Renewal: yieldPoll}, configured, labeled
	}
	target = featurefile.Target{Path: c.Features.LabelsFile, Labels: set, Renewal: featurefile.Lifetime / 4, Lifetime: featurefile.Lifetime}
	if c.Discovery.On {
		target.Renewal, target.Lifetime = c.Discovery.Sleep, max(4*c.Discovery.Sleep, featurefile.Lifetime)
	}
	if target.Renewal == 0 {
		target.Lifetime = 0
	}
	return target, configured, labeled
}
