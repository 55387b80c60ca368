package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// validationLine returns the number of devices with a successful CUDA check; empty if no checks are
// configured.
func validationLine(s *status.Validation) string {
	if s == nil {
		return ""
	}
	counts := map[string]int{}
	for _, d := range s.Devices {
		counts[d.Result]++
	}
	text := fmt.Sprintf("proven on %d of %s", counts[status.Proven], wording.Count(len(s.Devices), "device"))
	if n := counts[status.Failed]; n > 0 {
		text += fmt.Sprintf(", failed on %d", n)
	}
	if s.Seconds > 0 {
		text += fmt.Sprintf(", %.1f s after the start of the daemon", s.Seconds)
	}
	return text
}

// validationSentences explain why devices wait for a CUDA check. Failures are in the health of
// devices.
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
	if slices.ContainsFunc(s.Devices,
		func(d status.Validated) bool { return strings.Contains(d.Reason, inventory.LacksDeviceNodes) }) {
		sentences = append(sentences, "to give the daemon's container the device nodes, "+inventory.GiveDeviceNodes)
	}
	if s.Unsaved != "" {
		sentences = append(sentences, "verdicts are not saved yet, and a restart may prove devices again: "+s.Unsaved)
	}
	return sentences
}

// stepsLine returns how long after the start of the daemon each step was reached; empty if steps
// are not tracked.
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

// waitSentences name the step for which pods wait, its age and its remedy.
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
