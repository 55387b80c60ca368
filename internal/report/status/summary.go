package status

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Summary is a Status in one line.
type Summary struct {
	// State is starting, quiesced, waiting for driver, standing by, waiting for kubelet, not ready,
	// degraded or ready.
	State string `json:"state"`
	// Text is a sentence without a full stop: the meaning of the state on this node, and the
	// remedy.
	Text string `json:"text"`
}

// The states of a Summary. The first applicable state counts.
const (
	// Starting: the first scan of the node has not ended.
	Starting = "starting"
	// ReleasedDriver: quiesce released the driver.
	ReleasedDriver = "quiesced"
	// WaitingForDriver: the last scan failed.
	WaitingForDriver = "waiting for driver"
	// StandingBy: another device plugin serves a resource of this daemon.
	StandingBy = "standing by"
	// WaitingForKubelet: the kubelet is not running.
	WaitingForKubelet = "waiting for kubelet"
	// NotReady: the daemon serves less than was served on the node before.
	NotReady = "not ready"
	// Degraded: a part of the node or of the configuration is not served.
	Degraded = "degraded"
	// AllServed: everything is served, or there is nothing to serve.
	AllServed = "ready"
)

// The phases of a resource's server that lead to a state of the Summary.
const (
	noKubelet  = "waiting for kubelet"
	standingBy = "standing by"
)

// doctor is the command that finds out why a driver cannot be used.
const doctor = "gpu-device-plugin doctor"

// Summarize returns the summary of s. It does not read s.Summary.
func Summarize(s Status) Summary {
	switch {
	case s.Quiet:
		return Summary{ReleasedDriver, quiesced(s)}
	case s.Looked.IsZero() && s.Stale == "":
		return Summary{Starting, "the first scan of the GPUs has not ended" + hanging(s.Calls)}
	case s.Looked.IsZero():
		return Summary{WaitingForDriver, s.Stale + "; to find the cause, run: " + doctor}
	case s.Stale != "":
		return Summary{WaitingForDriver, fmt.Sprintf("%s; the GPUs are shown as they were at %s; to find the cause, "+
			"run: %s", s.Stale, Stamp(s.Looked), doctor)}
	}
	if names := inPhase(s.Resources, standingBy); names != "" {
		return Summary{StandingBy, "another device plugin serves " + names + "; this one takes over when it stops"}
	}
	if names := inPhase(s.Resources, noKubelet); names != "" {
		return Summary{WaitingForKubelet, "the kubelet is not running; not registered: " + names}
	}
	switch problems := problems(s); {
	case s.DriverMismatch != "":
		return Summary{NotReady, s.DriverMismatch}
	case !s.Readiness.Ready:
		return Summary{NotReady, s.Readiness.Reason}
	case len(problems) > 0:
		return Summary{Degraded, strings.Join(problems, "; ")}
	case len(s.Resources) == 0 && s.Readiness.Reason != "":
		return Summary{AllServed, s.Readiness.Reason}
	}
	return Summary{AllServed, strings.Join(append([]string{gpus(s.GPUs)}, counts(s.Resources)...), "; ")}
}

// IsChangingDriver reports whether the daemon has released the driver to change it. The command resume
// is not for such a release.
func (s Status) IsChangingDriver() bool { return s.Quiesced != nil && s.Quiesced.ForChange }

func quiesced(s Status) string {
	since, allocate := "", "new pods get no GPU"
	if s.Quiesced != nil {
		since = " since " + Stamp(s.Quiesced.Since)
		if s.Quiesced.Allocate {
			allocate = "new pods get GPUs"
		}
	}
	if len(s.Calls) > 0 { // a session with a hanging call cannot be closed
		return fmt.Sprintf("the driver is not released yet: %s does not return; the release is retried, and %s; to "+
			"end this, run: gpu-device-plugin resume", s.Calls[0], allocate)
	}
	if s.IsChangingDriver() {
		return fmt.Sprintf("the driver is released%s, because it is being changed, and %s", since, allocate)
	}
	return fmt.Sprintf("the driver is released%s, and %s; to end this, run: gpu-device-plugin resume", since, allocate)
}

// hanging names the oldest pending call into the driver.
func hanging(calls []Call) string {
	if len(calls) == 0 {
		return ""
	}
	return "; " + calls[0].String() + " does not return"
}

// String returns the function of the call and its GPU.
func (c Call) String() string {
	if c.GPU == nil {
		return c.Function
	}
	return fmt.Sprintf("%s of GPU %d", c.Function, *c.GPU)
}

// inPhase returns the names of the resources whose server is in a phase.
func inPhase(resources []Resource, phase string) string {
	var names []string
	for _, r := range resources {
		if strings.HasPrefix(r.Server, phase) {
			names = append(names, r.Name)
		}
	}
	return inventory.Few(names)
}

// problems returns the parts of the node that are not served as well as possible.
func problems(s Status) []string {
	var problems []string
	var sick []string
	for _, g := range s.GPUs {
		if g.State != healthy && !strings.Contains(g.Index, ":") {
			sick = append(sick, fmt.Sprintf("GPU %s %s", g.Index, g.State))
		}
	}
	for _, m := range s.GPUs {
		if m.State != healthy && strings.Contains(m.Index, ":") && !sameAsGPU(s.GPUs, m) {
			sick = append(sick, fmt.Sprintf("MIG device %s %s", m.Index, m.State))
		}
	}
	for _, r := range s.Retries {
		if !slices.ContainsFunc(s.GPUs,
			func(g Device) bool { return g.Index == fmt.Sprint(r.Index) && g.State != healthy }) {
			sick = append(sick, fmt.Sprintf("GPU %d cannot be read", r.Index))
		}
	}
	if len(sick) > 0 {
		problems = append(problems, inventory.Few(sick))
	}
	for _, r := range s.Resources {
		if r.Server != serving || r.Problem != "" {
			problems = append(problems,
				fmt.Sprintf("%s: %s", r.Name, strings.TrimSuffix(r.Server+", "+r.Problem, ", ")))
		}
	}
	if s.DRA != nil && !s.DRA.Driver.Registered {
		problems = append(problems, s.DRA.Waiting()...)
	}
	if s.Lead.PreviousLeader != "" {
		problems = append(problems, "GPUs are not changed: "+s.Lead.PreviousLeader+" led before and is still running")
	}
	if s.ConfigError != "" {
		problems = append(problems, "the configuration file is not used")
	}
	if s.MetricsError != "" {
		problems = append(problems, "metrics are not served")
	}
	if holds := slices.DeleteFunc(slices.Clone(s.Holds), func(h Hold) bool { return h.Waits }); len(holds) > 0 {
		problems = append(problems, fmt.Sprintf("not offered yet: %d", len(holds)))
	}
	if len(s.MPS) > 0 {
		problems = append(problems, "MPS does not work")
	}
	if len(problems) == 0 && !s.short() {
		return nil
	}
	return append(problems, counts(s.Resources)...)
}

// short reports whether a resource has devices that pods cannot get.
func (s Status) short() bool {
	return slices.ContainsFunc(s.Resources, func(r Resource) bool { return r.Healthy+r.Unoffered < r.Devices })
}

const (
	healthy = "Healthy"
	serving = "serving"
)

// Serving reports whether the resource is registered and the kubelet receives its lists.
func (r Resource) Serving() bool { return r.Server == serving }

// Yielding reports whether no list is sent because another server serves the resource.
func (r Resource) Yielding() bool { return strings.HasPrefix(r.Server, standingBy) }

// sameAsGPU reports whether a MIG device has the same health as its GPU.
func sameAsGPU(all []Device, m Device) bool {
	index, _, _ := strings.Cut(m.Index, ":")
	for _, g := range all {
		if g.Index == index {
			return g.State == m.State && g.Reason == m.Reason
		}
	}
	return false
}

// gpus counts the GPUs and MIG devices, which are all Healthy.
func gpus(all []Device) string {
	instances := 0
	for _, d := range all {
		if strings.Contains(d.Index, ":") {
			instances++
		}
	}
	text := wording.Count(len(all)-instances, "GPU")
	if instances > 0 {
		text += " and " + wording.Count(instances, "MIG device")
	}
	return text + " Healthy"
}

// GPUList returns GPUs by their indices as text: "GPU 0", "GPUs 0, 3".
func GPUList(indices []string) string {
	if len(indices) == 1 {
		return "GPU " + indices[0]
	}
	return "GPUs " + strings.Join(indices, ", ")
}

// maxCounts is how many resources a Summary counts.
const maxCounts = 3

// counts returns the number of devices that pods can get, for each resource.
func counts(resources []Resource) []string {
	var counts []string
	for i, r := range resources {
		if i == maxCounts {
			return append(counts, wording.Count(len(resources)-i, "more resource"))
		}
		count := fmt.Sprintf("%s: %d of %d", r.Name, r.Healthy, r.Devices)
		if r.Unoffered > 0 {
			count += " because units.fit is one"
		}
		counts = append(counts, count)
	}
	return counts
}
