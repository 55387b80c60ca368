package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// What containers have is compared with the records: a container that has a GPU or MIG device which no claim of its namespace has can meet
// another one on it. Pods that came later to a claim that others share are not in its record, so that pods of one namespace are not told
// apart.
// GPUs that the device plugin has are not looked at.

// compareEvery is the pace of comparisons.
const compareEvery = time.Minute

// A Comparison says how many pods with devices of claims there are, by what was seen of their containers.
type Comparison struct {
	// Same have what the records say, and Differ have a device that they do not say. Hidden have a claim, and not all of their containers
	// could be seen.
	Same, Differ, Hidden int
}

// Compared returns the feed of the last comparison.
func (c *Claims) Compared() *feed.Feed[Comparison] { return c.compared }

// Compare compares what containers have with the records now and then, until ctx ends.
func (c *Claims) Compare(ctx context.Context) error {
	if c.options.Containers == nil {
		<-ctx.Done()
		return nil
	}
	told := map[string]string{} // the difference, by the UID of the pod
	for {
		_, configured := c.options.Configs.Latest()
		_, used := c.inUse.Latest()
		if !c.gives() && len(c.all()) == 0 {
			if c.compared.Publish(Comparison{}); !feed.AnyOf(ctx, configured, used) {
				return nil
			}
			continue
		}
		timer := time.NewTimer(compareEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		looked := make(chan Comparison, 1)
		go func() { looked <- c.compare(ctx, told) }() // the file system of a container may hang
		timer.Reset(compareEvery)
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				timer.Stop()
				return nil
			case <-timer.C: // what was seen before may not be so any more
				_, namespaces := c.ofContainers()
				c.compared.Publish(Comparison{Hidden: len(namespaces)})
				timer.Reset(compareEvery)
			case now := <-looked:
				c.compared.Publish(now)
				waiting = false
			}
		}
		timer.Stop()
	}
}

// ofContainers returns the records of claims that containers can have, and the namespaces of their pods by UID.
func (c *Claims) ofContainers() (records []record, namespaces map[string]string) {
	namespaces = map[string]string{}
	for _, r := range c.all() {
		if r.former(c.options.BootID) {
			continue
		}
		records = append(records, r)
		for _, uid := range r.Pods {
			namespaces[uid] = r.Namespace
		}
	}
	return records, namespaces
}

// compare makes one comparison. Told are the differences that were logged.
func (c *Claims) compare(ctx context.Context, told map[string]string) (result Comparison) {
	containers, err := c.options.Containers()
	records, namespaces := c.ofContainers() // after the containers: a record is there before its containers
	if err != nil {
		return Comparison{Hidden: len(namespaces)}
	}
	snapshot, owners := c.options.Snapshots.Value(), c.options.Owners.Value()
	for uid, of := range containers {
		namespace, claimed := namespaces[uid]
		allowed := nodesOf(snapshot, records, namespace)
		hidden, has, difference := false, false, ""
		for _, container := range of {
			hidden = hidden || container.Hidden
			for _, node := range container.Nodes {
				device := deviceAt(snapshot, owners, node)
				has = has || device != ""
				if device != "" && !allowed[node] {
					difference = fmt.Sprintf("a container has %s, and no claim of it is prepared", device)
				}
			}
		}
		switch {
		case difference != "":
			result.Differ++
			if told[uid] != difference {
				klog.FromContext(ctx).Info("A pod has a device of no claim", "uid", uid, "reason", difference)
			}
		case hidden && claimed:
			result.Hidden++
		case has:
			result.Same++
		}
		if told[uid] = difference; difference == "" {
			delete(told, uid)
		}
	}
	maps.DeleteFunc(told, func(uid string, _ string) bool { _, runs := containers[uid]; return !runs })
	return result
}

// nodesOf returns the device nodes of the devices that the claims of a namespace have; of all claims for an empty namespace.
func nodesOf(s inventory.Snapshot, records []record, namespace string) map[string]bool {
	nodes := map[string]bool{}
	for _, r := range records {
		if namespace != "" && r.Namespace != namespace {
			continue
		}
		for _, d := range r.Devices {
			g, there := s.GPU(d.GPU)
			if !there {
				continue
			}
			nodes[gpuNode(g)] = true
			for _, m := range g.MIGDevices {
				if m.UUID == d.uuid() {
					nodes[capNode(m.CICap)], nodes[capNode(m.GICap)] = true, true
				}
			}
		}
	}
	return nodes
}

// deviceAt returns which GPU or MIG device that is given to claims has a device node; empty if none has. The node of a GPU instance is not
// looked at: several MIG devices can have it.
func deviceAt(s inventory.Snapshot, owners dra.Owners, node string) string {
	for _, g := range s.GPUs {
		if !owners[g.UUID].InSlice() {
			continue
		}
		if gpuNode(g) == node {
			return "GPU " + g.UUID
		}
		if i := slices.IndexFunc(g.MIGDevices, func(m inventory.MIGDevice) bool { return m.CICap != 0 && capNode(m.CICap) == node }); i >= 0 {
			return "MIG device " + g.MIGDevices[i].UUID
		}
	}
	return ""
}

func gpuNode(g inventory.GPU) string { return fmt.Sprintf("nvidia%d", g.Minor) }

func capNode(number int) string { return fmt.Sprintf("nvidia-caps/nvidia-cap%d", number) }
