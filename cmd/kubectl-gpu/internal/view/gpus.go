package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A GPU is a row for a GPU or a MIG device. Its JSON is a stable interface: fields are added, but
// never renamed or removed.
type GPU struct {
	Node string `json:"node"`
	// Index is the GPU's index "i", the MIG device's "i:j", or the name in the ResourceSlice if the
	// daemon was not asked. It is empty in the only row of a node whose GPUs are unknown; Reason then
	// says why.
	Index string `json:"index"`
	UUID  string `json:"uuid,omitempty"`
	// Model is the name of the GPU's model, or "MIG " and the profile.
	Model string `json:"model,omitempty"`
	// State is Unknown, Healthy, Suspect, Unhealthy or Lost. Since is the time of the last change,
	// with its reason and remedy.
	State  string    `json:"state"`
	Since  time.Time `json:"since,omitzero"`
	Reason string    `json:"reason,omitempty"`
	Remedy string    `json:"cure,omitempty"`
	// Source is the source of the row, and its time.
	Source Source `json:"source,omitzero"`
	// Holders are the containers that hold the device; HoldersKnown says that the list is
	// complete.
	Holders      []Holder `json:"holders"`
	HoldersKnown bool     `json:"holdersKnown"`
	// Utilization is in percent, and memory in MiB; nil if the daemon does not measure them.
	Utilization *int64 `json:"utilizationPercent,omitempty"`
	MemoryUsed  *int64 `json:"memoryUsedMiB,omitempty"`
	MemoryTotal *int64 `json:"memoryTotalMiB,omitempty"`
}

// A Holder is a container that holds a GPU.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// Container is empty if only the pod is known, because it holds a claim.
	Container string `json:"container,omitempty"`
	Claim     string `json:"claim,omitempty"`
	// Receipt is the container's part of the GPU's memory and threads; nil without units.
	Receipt *status.Receipt `json:"receipt,omitempty"`
}

func (h Holder) String() string {
	text := h.Namespace + "/" + h.Pod
	if h.Container != "" {
		text += "/" + h.Container
	}
	if h.Claim != "" {
		text += " (claim " + h.Claim + ")"
	}
	if h.Receipt != nil {
		text += " (" + h.Receipt.Short() + ")"
	}
	return text
}

// GPUs returns a row for each GPU and MIG device, sorted by node and index. If a daemon did not
// respond, the rows come from the node's slices. A node of nodes for which neither source has a GPU
// gets a row with the reason.
func (f Facts) GPUs(daemons map[string]*corev1.Pod, answers map[string]Answer, nodes []Node) []GPU {
	rows := []GPU{}
	devices, claimed, recorded := f.devices(), f.holdersByClaim(), f.holdersByStatus()
	for _, node := range nodes {
		a, asked := answers[node.Name]
		had := len(rows)
		if !asked || a.Err != nil {
			outdated := "" // why the slices may be outdated
			switch {
			case daemons[node.Name] == nil && node.DaemonAbsent != "":
				outdated = "no daemon runs on the node: " + node.DaemonAbsent
			case daemons[node.Name] == nil:
				outdated = "no daemon is known to run on the node"
			case asked:
				outdated = "the daemon of the node does not respond"
			}
			for _, d := range devices[node.Name] {
				if d.Counted && len(claimed[d.name]) == 0 {
					continue // an unused way to divide a GPU
				}
				rows = append(rows, sliceRow(node.Name, d, append(claimed[d.name], recorded[d.UUID]...), outdated))
			}
			if len(rows) == had {
				rows = append(rows, emptyRow(node, cmp.Or(outdated, "its daemon was not asked, and the node has no "+
					"ResourceSlice")))
			}
			continue
		}
		byUUID := map[string][]Holder{}
		for _, d := range devices[node.Name] {
			byUUID[d.UUID] = append(byUUID[d.UUID], claimed[d.name]...)
		}
		for _, d := range a.Status.GPUs {
			rows = append(rows, answerRow(node.Name, d, a.Status, append(byUUID[d.UUID], recorded[d.UUID]...)))
		}
		if len(rows) == had {
			reason := cmp.Or(status.Summarize(a.Status).Text, "its daemon has found no GPU")
			rows = append(rows, emptyRow(node, reason))
		}
	}
	return rows
}

// emptyRow returns the row of a node whose GPUs are unknown, with the node's resources and the
// reason.
func emptyRow(n Node, reason string) GPU {
	for _, r := range n.Resources {
		reason = fmt.Sprintf("%s; the Node has %d of %d %s", reason, r.Healthy, r.All, r.Name)
	}
	row := GPU{Node: n.Name, Model: n.Model, State: "Unknown", Reason: reason, Holders: []Holder{}}
	if from := n.Sources[modelFact].From; from != "" {
		row.Model += " (" + from + ")"
		row.Source = n.Sources[modelFact]
	}
	return row
}

// sliceRow returns the row of a device known only by its slice. outdated says why the
// slice may be outdated; empty if the slice is current.
func sliceRow(node string, d Device, holders []Holder, outdated string) GPU {
	row := GPU{Node: node, Index: d.name.device, UUID: d.UUID, Model: d.Model, State: "Healthy",
		Holders:      unique(holders),
		HoldersKnown: true}
	row.Source = Source{From: fromSlice, At: d.written}
	if d.Profile != "" {
		row.Model = "MIG " + d.Profile
	}
	switch {
	case d.Tainted:
		row.State, row.Reason = "Unhealthy", "the device has a taint in its ResourceSlice"
	case outdated != "":
		row.State, row.Reason = "Unknown", outdated
	}
	return row
}

// answerRow returns the row of a device in its daemon's answer. If the daemon could ask the
// kubelet, the holders are complete.
func answerRow(node string, d status.Device, s status.Status, known []Holder) GPU {
	row := GPU{
		Node: node, Index: d.Index, UUID: d.UUID, Model: d.Model, State: d.State, Since: d.Since, Reason: d.Reason,
		Remedy:       d.Remedy,
		HoldersKnown: s.Holders != nil && s.HoldersError == "", Source: Source{From: fromDaemon, At: s.Looked},
	}
	if s.Stale != "" && row.Reason == "" {
		row.Reason = "last known state, because the driver does not respond: " + s.Stale
	}
	if row.HoldersKnown {
		known = nil
		for _, h := range s.Holders {
			if h.Device == d.UUID {
				known = append(known, Holder{h.Namespace, h.Pod, h.Container, h.Claim, h.Receipt})
			}
		}
	}
	row.Holders = unique(known)
	return row
}

func unique(holders []Holder) []Holder {
	all := slices.Clone(holders)
	slices.SortFunc(all, func(a, b Holder) int { return cmp.Compare(a.String(), b.String()) })
	if all = slices.Compact(all); all == nil {
		all = []Holder{}
	}
	return all
}

// holdersByClaim returns the pods that have devices by claims.
func (f Facts) holdersByClaim() map[deviceName][]Holder {
	holders := map[deviceName][]Holder{}
	for name, claims := range f.usesByDevice() {
		for _, g := range claims {
			for _, user := range podsOf(g.claim.Status.ReservedFor) {
				holders[name] = append(holders[name],
					Holder{Namespace: g.claim.Namespace, Pod: user, Claim: g.claim.Name})
			}
		}
	}
	return holders
}

func podsOf(users []resourceapi.ResourceClaimConsumerReference) (names []string) {
	for _, u := range users {
		if u.Resource == "pods" {
			names = append(names, u.Name)
		}
	}
	return names
}

// holdersByStatus returns the containers that hold devices according to the pods' status,
// by UUID. The kubelet records devices with its feature gate ResourceHealthStatus.
func (f Facts) holdersByStatus() map[string][]Holder {
	holders := map[string][]Holder{}
	for i := range f.Pods {
		p := &f.Pods[i]
		if IsOver(p) {
			continue
		}
		for _, c := range p.Status.ContainerStatuses {
			for _, r := range c.AllocatedResourcesStatus {
				if !f.IsGPU(r.Name) {
					continue
				}
				for _, d := range r.Resources {
					uuid, _, _ := strings.Cut(string(d.ResourceID), "::")
					holders[uuid] = append(holders[uuid],
						Holder{Namespace: p.Namespace, Pod: p.Name, Container: c.Name})
				}
			}
		}
	}
	return holders
}
