package status

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// A ReadyStep is a state of a node on the way to pods with GPUs. Each step needs the
// previous steps.
type ReadyStep struct {
	// Name is driver, device nodes, containers, CUDA or kubelet.
	Name    string `json:"name"`
	Reached bool   `json:"reached"`
	// Since is when Reached last changed, as far as the daemon saw the change.
	Since time.Time `json:"since,omitzero"`
	// Seconds is the time from the start of the daemon to the first time the step was reached; 0
	// before.
	Seconds float64 `json:"seconds,omitempty"`
	// Text is the evidence, or the awaited condition, without a full stop.
	Text string `json:"text"`
	// Remedy is the remedy for an unreached step; empty if waiting is enough.
	Remedy string `json:"remedy,omitempty"`
}

// The names of the steps.
const (
	StepDriver     = "driver"
	StepNodes      = "device nodes"
	StepContainers = "containers"
	StepCUDA       = "CUDA"
	StepKubelet    = "kubelet"
)

// Evidence holds the facts about the steps missing in a Status.
type Evidence struct {
	// Refused is the reason why the driver is not accepted. MissingNode is the device node that all
	// computation needs. Both are empty if there is no problem.
	Refused, MissingNode string
	// AnswersSince is when the driver began to answer. AgreesSince is when the kubelet's
	// account began to equal the sent list. Both are zero if unknown.
	AnswersSince, AgreesSince time.Time
}

// doctorRemedy is the remedy for problems whose cause only doctor finds.
const doctorRemedy = "run: " + doctor

// chain lists the steps in order. One device is enough to reach a step: a bad device does not stop
// the others.
var chain = []struct {
	name  string
	judge func(Status, Evidence) ReadyStep
}{
	{StepDriver, driverStep},
	{StepNodes, nodesStep},
	{StepContainers, containersStep},
	{StepCUDA, cudaStep},
	{StepKubelet, kubeletStep},
}

func driverStep(s Status, e Evidence) ReadyStep {
	switch {
	case s.IsChangingDriver():
		return ReadyStep{Text: driverchange.HoldReason}
	case s.Quiet:
		return ReadyStep{Text: "the driver is released", Remedy: "run: gpu-device-plugin resume"}
	case s.Stale != "":
		return ReadyStep{Text: s.Stale, Remedy: doctorRemedy}
	case s.Looked.IsZero():
		return ReadyStep{Text: "the first scan of the GPUs has not ended"}
	case e.Refused != "":
		return ReadyStep{Text: e.Refused, Remedy: "install an accepted driver, or change the range"}
	case len(s.GPUs) == 0:
		return ReadyStep{Text: "the driver shows no GPU", Remedy: doctorRemedy}
	}
	return ReadyStep{Reached: true, Text: "version " + s.Driver, Since: e.AnswersSince}
}

func nodesStep(s Status, e Evidence) ReadyStep {
	if e.MissingNode != "" {
		return ReadyStep{Text: "the device node " + e.MissingNode + " does not exist",
			Remedy: "run on the node: nvidia-modprobe -u -c 0"}
	}
	held := map[string]string{}
	for _, h := range s.Holds {
		if h.Node {
			held[h.Device] = h.Reason
		}
	}
	return deviceStep(s, held, "device nodes of the driver and of a device exist")
}

// containersStep needs one device without a hold. Holds on devices that wait for a CUDA check
// belong to cudaStep.
func containersStep(s Status, _ Evidence) ReadyStep {
	waits := map[string]bool{}
	if s.Validation != nil {
		for _, d := range s.Validation.Devices {
			waits[d.UUID] = d.Result != Proven
		}
	}
	held := map[string]string{} // reason by UUID
	for _, h := range s.Holds {
		if !waits[h.Device] {
			held[h.Device] = h.Reason
		}
	}
	return deviceStep(s, held, "all files for containers exist")
}

// deviceStep returns a reached step with a text if one device is free of holds; holds maps
// UUIDs to reasons. A GPU divided into MIG devices does not count.
func deviceStep(s Status, held map[string]string, text string) ReadyStep {
	divided := map[string]bool{}
	for _, d := range s.GPUs {
		divided[d.GPU] = true
	}
	reached := ReadyStep{Reached: true, Text: text}
	step := reached
	for _, d := range s.GPUs {
		reason, isHeld := held[d.UUID]
		if !isHeld {
			reason, isHeld = held[d.GPU]
		}
		switch {
		case divided[d.UUID]:
		case !isHeld:
			return reached
		default:
			step = ReadyStep{Text: reason, Remedy: doctorRemedy}
		}
	}
	return step
}

func cudaStep(s Status, _ Evidence) ReadyStep {
	if s.Validation == nil {
		return ReadyStep{Reached: true, Text: "not configured"}
	}
	var last time.Time
	proven, used, waiting, why := 0, 0, 0, ""
	for _, d := range s.Validation.Devices {
		switch d.Result {
		case Proven:
			proven++
			if at := d.Since.Add(time.Duration(d.Milliseconds) * time.Millisecond); at.After(last) {
				last = at
			}
		case Waiting:
			if why = fmt.Sprintf("device %s: %s", d.Index, d.Reason); d.InUse {
				used++ // by a pod
			} else {
				waiting++
			}
		default:
			why = fmt.Sprintf("device %s: %s", d.Index, d.Reason)
		}
	}
	text := fmt.Sprintf("proven on %d of %s", proven, wording.Count(len(s.Validation.Devices), "device"))
	if why != "" {
		text += "; " + why
	}
	if proven+used == 0 || waiting > 0 {
		return ReadyStep{Text: text}
	}
	return ReadyStep{Reached: true, Text: text, Since: last}
}

func kubeletStep(s Status, e Evidence) ReadyStep {
	healthy := 0
	for _, r := range s.Resources {
		if !r.Planned {
			continue
		}
		if !r.Serving() || !r.Agreed {
			return ReadyStep{Text: strings.TrimSuffix(r.Name+": "+r.Server+"; "+r.Problem, "; "), Remedy: doctorRemedy}
		}
		healthy += r.Healthy
	}
	switch {
	case len(s.Resources) == 0 && len(s.DRA.Waiting()) > 0:
		return ReadyStep{Text: strings.Join(s.DRA.Waiting(), "; "), Remedy: doctorRemedy}
	case len(s.Resources) == 0 && s.DRA != nil:
		return ReadyStep{Reached: true, Text: "GPUs are offered to claims"}
	case healthy == 0:
		return ReadyStep{Text: "no device is offered", Remedy: doctorRemedy}
	}
	return ReadyStep{Reached: true, Text: strings.Join(counts(s.Resources), "; "), Since: e.AgreesSince}
}

// A Progress remembers when a node reached each step. It is safe for concurrent use.
type Progress struct {
	mu    sync.Mutex
	began time.Time
	steps map[string]ReadyStep
}

// NewProgress returns the Progress of a daemon that started at began.
func NewProgress(began time.Time) *Progress {
	return &Progress{began: began, steps: map[string]ReadyStep{}}
}

// Steps returns the steps at the time now. Steps after the first unreached step wait, and
// are not judged.
func (p *Progress) Steps(s Status, e Evidence, now time.Time) []ReadyStep {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []ReadyStep
	waits, latest := "", p.began
	for _, c := range chain {
		step := ReadyStep{Text: "waits for " + waits}
		if waits == "" {
			step = c.judge(s, e)
			if !step.Reached {
				waits = c.name
			}
		}
		step.Name = c.name
		before, known := p.steps[c.name]
		switch {
		case known && before.Reached == step.Reached:
			step.Since = before.Since
		case !step.Reached && !known:
			step.Since = p.began
		case step.Since.IsZero() || !step.Reached:
			step.Since = now
		}
		if step.Reached && step.Since.Before(latest) {
			step.Since = latest // a step needs the previous steps
		}
		if step.Reached {
			latest = step.Since
		}
		if step.Seconds = before.Seconds; step.Reached && step.Seconds == 0 {
			step.Seconds = max(time.Millisecond, step.Since.Sub(p.began).Round(10*time.Millisecond)).Seconds()
		}
		p.steps[c.name] = step
		step.Since = Moment(step.Since)
		all = append(all, step)
	}
	return all
}

// Waits returns the first unreached step, or false if all steps are reached or none is
// known.
func (s Status) Waits() (ReadyStep, bool) {
	for _, step := range s.Steps {
		if !step.Reached {
			return step, true
		}
	}
	return ReadyStep{}, false
}
