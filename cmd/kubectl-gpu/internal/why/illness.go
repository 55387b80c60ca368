package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The states of devices that are not allocatable, as in a status.
const (
	healthy   = "Healthy"
	suspect   = "Suspect"
	unhealthy = "Unhealthy"
	lostState = "Lost"
)

// stateText returns the state of a device and its remedy.
func stateText(d status.Device) string {
	text := d.State
	if d.Reason != "" {
		text += ": " + strings.TrimSuffix(d.Reason, ".")
	}
	switch d.Remedy {
	case "":
		return text
	case string(inventory.RemedyHuman):
		return text + "; remedy: manual (needs an operator)"
	}
	return text + "; remedy: " + d.Remedy
}

// notAllocatable describes the devices of a resource that the daemon does not offer, with
// reasons; empty without such devices. Devices with the same reason share one text.
func notAllocatable(s status.Status, resource corev1.ResourceName) string {
	var parts []string
	at := slices.IndexFunc(s.Resources, func(r status.Resource) bool { return r.Name == string(resource) })
	if at >= 0 {
		r := s.Resources[at]
		if n := len(r.Departing); n > 0 {
			parts = append(parts, departingText(r.Departing))
		}
		if r.Unoffered > 0 {
			parts = append(parts, fmt.Sprintf("%d units are on other GPUs than the one that is offered, "+
				"because units.fit is one", r.Unoffered))
		}
		if r.Problem != "" {
			parts = append(parts, fmt.Sprintf("%s: %s", r.Server, strings.TrimSuffix(r.Problem, ".")))
		}
	}
	reasons := &reasons{}
	for _, d := range s.GPUs {
		if d.State != healthy && d.State != suspect && !sameAsItsGPU(s.GPUs, d) {
			reasons.add(stateText(d), "GPU "+d.Index)
		}
	}
	for _, h := range s.Holds {
		if h.Resource == "" || h.Resource == string(resource) {
			reasons.add("held back: "+strings.TrimSuffix(h.Reason, "."), h.Device)
		}
	}
	parts = append(parts, reasons.texts(len(s.GPUs))...)
	if len(parts) == 0 {
		parts = slices.Concat(s.MPS, s.LeftOut)
	}
	if len(parts) == 0 && (at < 0 || s.Stale != "" || s.Quiet) {
		if sum := status.Summarize(s); sum.State != status.AllServed {
			parts = append(parts, sum.Text)
		}
	}
	return strings.Join(parts, "; ")
}

// sameAsItsGPU reports whether a MIG device is only Unhealthy because of its GPU.
func sameAsItsGPU(all []status.Device, d status.Device) bool {
	return d.GPU != "" && slices.ContainsFunc(all, func(g status.Device) bool {
		return g.UUID == d.GPU && g.State == d.State && g.Reason == d.Reason
	})
}

// departingText describes the devices that have left a resource, and what they wait for.
func departingText(all []status.Departing) string {
	reasons := &reasons{}
	for _, d := range all {
		text := d.Reason
		if d.Waiting != "" {
			text += ", and it waits for: " + d.Waiting
		}
		reasons.add(text, d.ID)
	}
	return fmt.Sprintf("%d are departing: %s", len(all), strings.Join(reasons.texts(len(all)), "; "))
}

// reasons groups devices by reason, in the order of their first device.
type reasons struct {
	order   []string
	devices map[string][]string
}

func (r *reasons) add(reason, device string) {
	if r.devices == nil {
		r.devices = map[string][]string{}
	}
	if r.devices[reason] == nil {
		r.order = append(r.order, reason)
	}
	r.devices[reason] = append(r.devices[reason], device)
}

// texts returns a text for each reason; all is the number of devices.
func (r *reasons) texts(all int) (texts []string) {
	for _, reason := range r.order {
		names := r.devices[reason]
		switch {
		case len(names) == all && all > 1:
			texts = append(texts, fmt.Sprintf("all %d: %s", all, reason))
		default:
			texts = append(texts, inventory.Few(names)+" "+reason)
		}
	}
	return texts
}
