package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// validationLine says on how many devices CUDA is proven; empty where that is not asked for.
func validationLine(s *status.Validation) string {
	if s == nil {
		return ""
	}
	counts := map[string]int{}
	for _, d := range s.Devices {
		counts[d.Result]++
	}
	text := fmt.Sprintf("proven on %d of %s", counts[status.Proven], status.Count(len(s.Devices), "device"))
	if n := counts[status.Failed]; n > 0 {
		text += fmt.Sprintf(", failed on %d", n)
	}
	if s.Seconds > 0 {
		text += fmt.Sprintf(", %.1f s after the start of the daemon", s.Seconds)
	}
	return text
}

// validationSentences say why devices are not proven yet. That they fail is said as their health.
func validationSentences(s *status.Validation) []string {
	if s == nil {
		return nil
	}
	var reasons []string
	devices := map[string][]string{}
	for _, d := range s.Devices {
		if d.Result != status.Waiting {
			continue
		}
		if devices[d.Reason] == nil {
			reasons = append(reasons, d.Reason)
		}
		devices[d.Reason] = append(devices[d.Reason], d.Index)
	}
	var sentences []string
	for _, why := range reasons {
		sentences = append(sentences, "not proven on "+strings.Join(devices[why], ", ")+": "+cmp.Or(why, "-"))
	}
	if slices.ContainsFunc(s.Devices, func(d status.Validated) bool { return strings.Contains(d.Reason, inventory.LacksDeviceNodes) }) {
		sentences = append(sentences, "to give the daemon's container the device nodes, "+inventory.GiveDeviceNodes)
	}
	if s.Unsaved != "" {
		sentences = append(sentences, "verdicts are not saved yet, and a restart may prove devices anew: "+s.Unsaved)
	}
	return sentences
}

// stepsLine says how long after the start of the daemon each state was reached until pods get GPUs;
// empty where they are not followed.
func stepsLine(steps []status.ReadyStep) string {
	var parts []string
	for _, s := range steps {
		text := s.Name + " not yet"
		if s.Reached {
			text = fmt.Sprintf("%s %.1f s", s.Name, s.Seconds)
		}
		parts = append(parts, text)
	}
	if len(parts) == 0 {
		return ""
	}
	return strings.Join(parts, ", ") + " after the start of the daemon"
}

// waitSentences say what pods wait for until they get GPUs, since when, and what to do.
func waitSentences(s status.Status, v view) []string {
	step, waits := s.Waits()
	if !waits {
		return nil
	}
	text := fmt.Sprintf("%s, since %s: %s", step.Name, v.since(step.Since), step.Text)
	if step.Remedy != "" {
		text += "; " + step.Remedy
	}
	return []string{text}
}
