package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
)

// A Trouble is the reason why a container does not run.
type Trouble struct {
	Container string
	// Reason and Message are from the kubelet.
	Reason, Message string
	// Ended says that the container ended at At with the exit status Exit.
	Ended bool
	Exit  int32
	At    time.Time
	// Last is how the container ended before; nil if it did not.
	Last *Trouble
}

// Containers returns the status of all containers of a pod, init containers first.
func Containers(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
}

// FirstTrouble returns the first container of a pod that should run and does not; nil if there is
// none, also while containers are being created.
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
		Container: container, Reason: ended.Reason, Message: ended.Message, Ended: true, Exit: ended.ExitCode,
		At: ended.FinishedAt.Time,
	}
}

// FullText returns the kubelet's complete text, for searches.
func (t Trouble) FullText() string {
	text := t.Reason + ": " + t.Message
	if t.Last != nil {
		text += "; " + t.Last.FullText()
	}
	return text
}

// Text describes the problem of the container, without its name and without a full stop;
// where is empty or "on node NAME".
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

// Ago returns the time since t as text after a prefix; empty if t is unknown.
func Ago(begin string, t, now time.Time) string {
	if t.IsZero() || now.IsZero() {
		return ""
	}
	return begin + duration.HumanDuration(max(0, now.Sub(t))) + " ago"
}
