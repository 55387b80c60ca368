package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

func newMIGStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print how far a running daemon is with the MIG layout",
		Long: "status prints the layout that counts and who named it, its state, and for each GPU with multi-instance mode how it is divided,\n" +
			"how it is to be divided, and what the daemon waits for. The states are none, pending, rebooting, success and failed.",
		Example: "  gpu-device-plugin mig status -o json",
		Args:    noArguments,
	}
	socket := addControlFlag(cmd.Flags())
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var s migStatus
		if err := control.Call(cmd.Context(), *socket, callMIGStatus, nil, &s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), s, s.text)
	}
	return cmd
}

// A migStatus is how far the daemon is with the MIG layout, as it is printed.
type migStatus struct {
	// Layout is the one that is asked for, From who named it, and Again the number of the last order that the daemon has taken up.
	Layout string `json:"layout,omitempty"`
	From   string `json:"from,omitempty"`
	Again  uint64 `json:"again,omitempty"`
	// State is pending, rebooting, success or failed; empty if no layout is named.
	State string `json:"state,omitempty"`
	// Reason says why the state is not success.
	Reason string   `json:"reason,omitempty"`
	GPUs   []migGPU `json:"gpus"`
}

// A migGPU is how far one GPU is.
type migGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	Phase string `json:"phase"`
	// Reason says what the GPU waits for, or what failed.
	Reason string `json:"reason,omitempty"`
	// Holders are those who use what is to change.
	Holders []string `json:"holders,omitempty"`
	// Retry is when what failed is tried again.
	Retry time.Time `json:"retry,omitzero"`
	// Before and After are how the GPU is divided and how it is to be; nil for one that was not read, as no layout is about it.
	Before *plannedPartitions `json:"before,omitempty"`
	After  *plannedPartitions `json:"after,omitempty"`
}

func (d *daemon) migStatus() (migStatus, error) {
	if err := d.migOff(); err != nil {
		return migStatus{}, err
	}
	asked, made := d.layout(), d.mig.Status().Value()
	s := migStatus{Layout: asked.Layout, From: asked.From, Again: made.Again, State: asked.State, Reason: asked.Reason, GPUs: []migGPU{}}
	for _, g := range made.GPUs {
		shown := migGPU{
			Index: g.Index, UUID: g.UUID, Model: g.Model, Phase: string(g.Phase), Reason: g.Reason, Retry: status.Moment(g.Retry),
		}
		if g.Change.GPU.UUID != "" {
			shown.Before, shown.After = new(newPlannedPartitions(g.Change.Before)), new(newPlannedPartitions(g.Change.After))
		}
		for _, h := range g.Holders {
			shown.Holders = append(shown.Holders, holder(h))
		}
		s.GPUs = append(s.GPUs, shown)
	}
	return s, nil
}

// layout returns how far the node is with the MIG layout that is asked for; nil where layouts are not changed.
func (d *daemon) layout() *status.MIGLayout {
	if d.mig == nil {
		return nil
	}
	chosen, made := d.wishes.Decisions().Value(), d.mig.Status().Value()
	s := &status.MIGLayout{Layout: chosen.Layout, From: string(chosen.From), State: string(made.State), Reason: made.Reason}
	switch {
	case chosen.Err != nil:
		s.State, s.Reason = string(mig.StateFailed), chosen.Err.Error()
	case made.Layout != chosen.Layout || made.Again != chosen.Wish.Again: // the owner has not seen it yet
		s.State, s.Reason = string(mig.StatePending), ""
	}
	for _, g := range made.GPUs {
		for _, h := range g.Holders {
			if !slices.Contains(s.Waiting, h.Device) {
				s.Waiting = append(s.Waiting, h.Device)
			}
		}
	}
	slices.Sort(s.Waiting)
	return s
}

// holder names who holds a device.
func holder(h mig.Holder) string {
	switch {
	case h.Pod.Name != "":
		return "pod " + h.Pod.Namespace + "/" + h.Pod.Name
	case h.Pod.UID != "":
		return "pod with UID " + h.Pod.UID
	}
	return fmt.Sprintf("process %d", h.PID)
}

// line says how far the daemon is, in one sentence.
func (s migStatus) line() string {
	if s.Layout == "" {
		return "No layout is named. GPUs stay as they are."
	}
	text := fmt.Sprintf("Layout %s of %s: %s", s.Layout, s.From, s.State)
	if s.Reason != "" {
		text += ": " + s.Reason
	}
	return text
}

// text writes the status for people.
func (s migStatus) text(w io.Writer) {
	fmt.Fprint(w, wrap(s.line(), textWidth, "", "  "))
	for _, g := range s.GPUs {
		fmt.Fprintln(w)
		g.text(w)
	}
}

// text writes how far one GPU is.
func (g migGPU) text(w io.Writer) {
	fmt.Fprintf(w, "GPU %d  %s  %s\n", g.Index, g.Model, g.UUID)
	line := g.Phase
	if g.Reason != "" {
		line += ": " + g.Reason
	}
	if !g.Retry.IsZero() {
		line += "; tried again at " + status.Stamp(g.Retry)
	}
	fmt.Fprint(w, "  "+wrap(line, textWidth-2, "", "    "))
	if g.Before == nil {
		return
	}
	before, after := g.Before.row(), g.After.row()
	if slices := max(g.Before.MemorySlices, g.After.MemorySlices); strings.Contains(before+after, "|") {
		fmt.Fprintln(w, "  slice    "+ruler(slices))
	}
	if before == after {
		fmt.Fprintln(w, "  now     "+before)
		return
	}
	fmt.Fprintf(w, "  before  %s\n  after   %s\n", before, after)
}
