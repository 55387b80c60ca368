package status

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// A ReadyStep is a state that a node goes through until pods get its GPUs. Each needs those before
// it.
type ReadyStep struct {
	// Name is driver, device nodes, containers, CUDA or kubelet.
	Name    string `json:"name"`
	Reached bool   `json:"reached"`
	// Since is when Reached became what it is, as far as that was seen.
	Since time.Time `json:"since,omitzero"`
	// Seconds is how long after the start of the daemon the step was reached first; 0 before.
	Seconds float64 `json:"seconds,omitempty"`
	// Text is the evidence, or what is waited for, without a full stop.
	Text string `json:"text"`
	// Remedy is what to do if it is not reached; empty if it has to be waited for.
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

// Evidence is what the steps are judged by, beside a Status.
type Evidence struct {
	// Refused is why the driver is not accepted, and LacksNode the device node without which nothing
	// computes; empty if there is no reason.
	Refused, LacksNode string
	// Answers is since when the driver answers, and Agrees since when kubelet's account is what was
	// sent to it; zero if that is not known.
	Answers, Agrees time.Time
}

// doctorRemedy is what to do where only doctor finds the cause.
const doctorRemedy = "run: " + doctor

// chain are the steps in their order. A step is reached if one device at least gets through it: a
// bad one does not stop the others.
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
	case s.Quiet:
		return ReadyStep{Text: "quiesce released the driver", Remedy: "run: gpu-device-plugin resume"}
	case s.Stale != "":
		return ReadyStep{Text: s.Stale, Remedy: doctorRemedy}
	case s.Looked.IsZero():
		return ReadyStep{Text: "the first look at the GPUs has not ended"}
	case e.Refused != "":
		return ReadyStep{Text: e.Refused, Remedy: "install a driver that is accepted, or change the range"}
	case len(s.GPUs) == 0:
		return ReadyStep{Text: "the driver shows no GPU", Remedy: doctorRemedy}
	}
	return ReadyStep{Reached: true, Text: "version " + s.Driver, Since: e.Answers}
}

func nodesStep(s Status, e Evidence) ReadyStep {
	if e.LacksNode != "" {
		return ReadyStep{Text: "the device node " + e.LacksNode + " is not there",
			Remedy: "run on the node: nvidia-modprobe -u -c 0"}
	}
	held := map[string]string{}
	for _, h := range s.Holds {
		if h.Node {
			held[h.Device] = h.Reason
		}
	}
	return given(s, held, "those of the driver and of a device are there")
}

// containersStep asks for one device that is not held for another reason than that CUDA is not
// proven on it.
func containersStep(s Status, _ Evidence) ReadyStep {
	waits := map[string]bool{}
	if s.Validation != nil {
		for _, d := range s.Validation.Devices {
			waits[d.UUID] = d.Result != Proven
		}
	}
	held := map[string]string{} // why, by UUID
	for _, h := range s.Holds {
		if !waits[h.Device] {
			held[h.Device] = h.Reason
		}
	}
	return given(s, held, "what containers get is there")
}

// given returns a step that is reached, with a text, if one device is not held; held says why
// others are, by UUID. A GPU in MIG devices is not given itself.
func given(s Status, held map[string]string, text string) ReadyStep {
	divided := map[string]bool{}
	for _, d := range s.GPUs {
		divided[d.GPU] = true
	}
	reached := ReadyStep{Reached: true, Text: text}
	step := reached
	for _, d := range s.GPUs {
		why, is := held[d.UUID]
		if !is {
			why, is = held[d.GPU]
		}
		switch {
		case divided[d.UUID]:
		case !is:
			return reached
		default:
			step = ReadyStep{Text: why, Remedy: doctorRemedy}
		}
	}
	return step
}

func cudaStep(s Status, _ Evidence) ReadyStep {
	if s.Validation == nil {
		return ReadyStep{Reached: true, Text: "not asked for"}
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
				used++ // its pod has it
			} else {
				waiting++
			}
		default:
			why = fmt.Sprintf("device %s: %s", d.Index, d.Reason)
		}
	}
	text := fmt.Sprintf("proven on %d of %s", proven, Count(len(s.Validation.Devices), "device"))
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
		return ReadyStep{Reached: true, Text: "claims give the GPUs"}
	case healthy == 0:
		return ReadyStep{Text: "no device is on offer", Remedy: doctorRemedy}
	}
	return ReadyStep{Reached: true, Text: strings.Join(counts(s.Resources), "; "), Since: e.Agrees}
}

// A Progress remembers when a node reached the steps. It is for several goroutines.
type Progress struct {
	mu    sync.Mutex
	began time.Time
	steps map[string]ReadyStep
}

// NewProgress returns one of a daemon that began at a time.
func NewProgress(began time.Time) *Progress {
	return &Progress{began: began, steps: map[string]ReadyStep{}}
}

// Steps returns the steps as they are at a time. One after the first that is not reached is not
// judged: it waits for that.
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
			step.Since = latest // it needs the steps before it
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

// Waits returns the first step that is not reached; false if all are, or none is known.
func (s Status) Waits() (ReadyStep, bool) {
	for _, step := range s.Steps {
		if !step.Reached {
			return step, true
		}
	}
	return ReadyStep{}, false
}
