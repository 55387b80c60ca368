package view

import (
	"slices"
	"strings"
)

// Condensed shortens the message of the condition GPUHealthy: it has an entry for each device, and
// Condensed groups the devices by cause.
func Condensed(message string) string {
	var causes []string
	devices := map[string][]string{}
	for entry := range strings.SplitSeq(message, "; ") {
		device, cause, found := strings.Cut(entry, " ")
		if !found || !strings.Contains(cause, ": ") {
			device, cause = "", entry
		}
		if !slices.Contains(causes, cause) {
			causes = append(causes, cause)
		}
		if device != "" {
			devices[cause] = append(devices[cause], device)
		}
	}
	for i, cause := range causes {
		if names := strings.Join(devices[cause], ", "); names != "" {
			causes[i] = names + " " + cause
		}
	}
	return strings.Join(causes, "; ")
}
