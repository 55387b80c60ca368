package recording

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Story is the consequences of a Monitor's Snapshots, without pods: verdicts, lists for the
// kubelet, and Events of the node.
type Story struct {
	// Options select the offered devices. They must not change after the first Next.
	Options resource.Options

	before map[string]string
	events nodeevents.History
}

// Next returns the changes of the next Snapshot, a sentence each.
func (s *Story) Next(snapshot inventory.Snapshot, now time.Time) []string {
	if snapshot.Generation == 0 {
		return nil // no scan has ended
	}
	is := s.facts(snapshot)
	var changes []string
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if is[name] != s.before[name] {
			changes = append(changes, name+": "+is[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.before)) {
		if _, there := is[name]; !there {
			changes = append(changes, name+": not any more")
		}
	}
	s.before = is
	node := status.Status{
		Version: "-", Looked: now, Stale: snapshot.Stale, Driver: snapshot.Driver.Version,
		GPUs: status.Devices(snapshot, make([]health.GPU, len(snapshot.GPUs))),
	}
	for _, l := range snapshot.LeftOut {
		node.LeftOut = append(node.LeftOut, fmt.Sprintf("GPU %d: %s", l.Index, l.Reason))
	}
	for _, e := range s.events.Next(node, now, len(node.GPUs)+len(node.LeftOut)+1).Events {
		changes = append(changes, fmt.Sprintf("Event %s: %s", e.Reason, e.Note))
	}
	return changes
}

// facts are the verdicts and the lists, by subject.
func (s *Story) facts(snapshot inventory.Snapshot) map[string]string {
	all := map[string]string{}
	if snapshot.Stale != "" {
		all["node"] = "the last look failed: " + snapshot.Stale
	}
	for _, l := range snapshot.LeftOut {
		all[fmt.Sprintf("GPU %d", l.Index)] = "left out: " + l.Reason
	}
	for _, g := range snapshot.GPUs {
		all[fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID)] = verdict(g.Health)
		for _, m := range g.MIGDevices {
			all[fmt.Sprintf("MIG device %d:%d (%s)", g.Index, m.Index, m.UUID)] = verdict(m.Health)
		}
	}
	for _, r := range resource.New(snapshot, s.Options).Resources {
		var good, bad []string
		for d := range r.All() {
			if d.Healthy {
				good = append(good, d.ID)
			} else {
				bad = append(bad, d.ID)
			}
		}
		list := fmt.Sprintf("%d Healthy, %d Unhealthy", len(good), len(bad))
		if len(bad) > 0 {
			list += " (" + strings.Join(bad, " ") + ")"
		}
		all["list "+r.Name] = list
	}
	return all
}

func verdict(h inventory.Health) string {
	text := h.State.String()
	if h.Grace {
		text += ", given to new work for now"
	}
	if why := h.Why(); why != "" {
		text += ": " + why
	}
	return text
}
