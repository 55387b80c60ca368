package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
)

// A Trouble is why a container does not run.
type Trouble struct {
	Container string
	// Reason and Message are kubelet's.
	Reason, Message string
	// Ended says that the container ran, or was to run, and ended with Exit, at At.
	Ended bool
	Exit  int32
	At    time.Time
	// Last is how the container ended before; nil if it did not.
	Last *Trouble
}

// Containers returns the status of all containers of a pod, those of initialization first.
func Containers(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
}

// FirstTrouble returns the first container of a pod that does not run although it should; nil if
// there is none, as while containers are being made.
func FirstTrouble(p *corev1.Pod) *Trouble {
	for _, c := range Containers(p) {
		switch {
		case c.State.Waiting != nil:
			switch c.State.Waiting.Reason {
			case "", "ContainerCreating", "PodInitializing":
			default:
				t := &Trouble{Container: c.Name, Reason: c.State.Waiting.Reason, Message: c.State.Waiting.Message}
				if ended := c.LastTerminationState.Terminated; ended != nil {
					t.Last = endOf(c.Name, ended)
				}
				return t
			}
		case c.State.Terminated != nil && c.State.Terminated.ExitCode != 0:
			return endOf(c.Name, c.State.Terminated)
		}
	}
	return nil
}

func endOf(container string, ended *corev1.ContainerStateTerminated) *Trouble {
	return &Trouble{
		Container: container, Reason: ended.Reason, Message: ended.Message, Ended: true, Exit: ended.ExitCode, At: ended.FinishedAt.Time,
	}
}

// Says returns all that kubelet says of it, to look for words in it.
func (t Trouble) Says() string {
	text := t.Reason + ": " + t.Message
	if t.Last != nil {
		text += "; " + t.Last.Says()
	}
	return text
}

// Text says what is wrong with the container, without its name and without a full stop; where is
// empty or "on node NAME".
func (t Trouble) Text(where string, now time.Time) string {
	if where != "" {
		where = " " + where
	}
	message := strings.TrimSuffix(strings.TrimSpace(t.Message), ".")
	if message != "" {
		message = ": " + message
	}
	if t.Ended {
		return fmt.Sprintf("ended%s%s (%s, exit status %d)%s", where, Ago(" ", t.At, now), t.Reason, t.Exit, message)
	}
	text := fmt.Sprintf("does not start%s (%s)%s", where, t.Reason, message)
	if t.Last != nil {
		text += "; it " + t.Last.Text("", now)
	}
	return text
}

// Ago says how long ago a time was, after a beginning; empty where the time is not known.
func Ago(begin string, t, now time.Time) string {
	if t.IsZero() || now.IsZero() {
		return ""
	}
	return begin + duration.HumanDuration(max(0, now.Sub(t))) + " ago"
}
