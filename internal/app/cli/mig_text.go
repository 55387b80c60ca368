package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// printMIGPlan writes a plan for people.
func printMIGPlan(w io.Writer, p layout.Planned) {
	changed := 0
	for _, g := range p.GPUs {
		if len(g.Steps) > 0 {
			changed++
		}
	}
	verdict := "possible"
	if !p.Possible {
		verdict = "not possible"
	}
	fmt.Fprintf(w, "Layout %s is %s. It changes %d of %d GPUs.\n", p.Layout, verdict, changed, len(p.GPUs))
	for _, g := range p.GPUs {
		fmt.Fprintln(w)
		printPlannedGPU(w, g)
	}
	for _, warning := range p.Warnings {
		fmt.Fprint(w, "\n"+terminal.Wrap("warning: "+warning, textWidth(w), "", "  "))
	}
}

// printPlannedGPU writes the changes of a GPU.
func printPlannedGPU(w io.Writer, g layout.PlannedGPU) {
	fmt.Fprintf(w, "GPU %d  %s  %s\n", g.Index, g.Model, g.UUID)
	before, after := rowOf(g.Before), rowOf(g.After)
	if slices := max(g.Before.MemorySlices, g.After.MemorySlices); strings.HasPrefix(before+after, "|") ||
		strings.Contains(after, "|") {
		fmt.Fprintln(w, "  slice    "+ruler(slices))
	}
	fmt.Fprintln(w, "  before  "+before)
	switch {
	case g.Reason != "":
		fmt.Fprint(w, "  "+terminal.Wrap("not possible: "+g.Reason, textWidth(w)-2, "", "    "))
		return
	case g.Note != "":
		fmt.Fprint(w, "  "+terminal.Wrap("stays: "+g.Note, textWidth(w)-2, "", "    "))
		return
	case len(g.Steps) == 0:
		fmt.Fprintln(w, "  nothing to do")
		return
	}
	fmt.Fprintln(w, "  after   "+after)
	for i, line := range stepsOf(g) {
		fmt.Fprintf(w, "  %2d. %s", i+1, terminal.Wrap(line, textWidth(w)-6, "", "      "))
	}
	for _, i := range g.After.Instances {
		if i.ID != nil {
			fmt.Fprintf(w, "   =  %s stays%s\n", nameOf(i), useOf(i))
		}
	}
}

// sliceWidth returns the columns of a memory slice in a row.
func sliceWidth(slices int) int { return max(88/max(slices, 1), 1) }

// ruler returns the numbers of the memory slices for the line above a row.
func ruler(slices int) string {
	var b strings.Builder
	for i := range slices {
		fmt.Fprintf(&b, "%-*d", sliceWidth(slices), i)
	}
	return strings.TrimRight(b.String(), " ")
}

// rowOf returns a GPU as a row of memory slices, with its MIG devices in their places.
func rowOf(p layout.PlannedPartitions) string {
	switch {
	case p.MIG != "enabled":
		return "MIG " + p.MIG
	case p.MemorySlices == 0:
		return "MIG enabled, not known how it is divided"
	}
	var b strings.Builder
	at, width := 0, sliceWidth(p.MemorySlices)
	gap := func(end int) {
		for ; at < end; at++ {
			fmt.Fprintf(&b, "|%-*s", width-1, "")
		}
	}
	for _, i := range p.Instances {
		gap(i.Start)
		fmt.Fprintf(&b, "|%-*.*s", i.Size*width-1, i.Size*width-1, contentOf(i))
		at = i.Start + i.Size
	}
	gap(p.MemorySlices)
	return b.String() + "|"
}

// contentOf returns the MIG devices of an instance.
func contentOf(i layout.PlannedInstance) string {
	if len(i.Devices) == 0 {
		return i.Profile + " empty"
	}
	return wordsWithCounts(i.Devices)
}

// wordsWithCounts lists words. Equal neighbours become one word with their number.
func wordsWithCounts(words []string) string {
	var parts []string
	for i := 0; i < len(words); {
		n := 1
		for i+n < len(words) && words[i+n] == words[i] {
			n++
		}
		part := words[i]
		if n > 1 {
			part = fmt.Sprintf("%d x %s", n, words[i])
		}
		parts = append(parts, part)
		i += n
	}
	return strings.Join(parts, ", ")
}

// nameOf returns an instance and its place.
func nameOf(i layout.PlannedInstance) string {
	where := fmt.Sprintf("at slice %d", i.Start)
	if i.Size > 1 {
		where = fmt.Sprintf("at slices %d to %d", i.Start, i.Start+i.Size-1)
	}
	if i.ID != nil {
		return fmt.Sprintf("GPU instance %d, %s %s", *i.ID, i.Profile, where)
	}
	return fmt.Sprintf("GPU instance %s %s", i.Profile, where)
}

// useOf returns whether an instance is in use, as a word.
func useOf(i layout.PlannedInstance) string {
	if i.InUse {
		return ", in use"
	}
	return ""
}

// stepsOf returns the steps as sentences. Steps of a GPU instance include its compute instances.
func stepsOf(g layout.PlannedGPU) []string {
	var lines []string
	last := inventory.MIGAction("")
	for _, s := range g.Steps {
		switch s.Action {
		case inventory.MIGEnable, inventory.MIGDisable:
			verb := map[inventory.MIGAction]string{inventory.MIGEnable: "enable",
				inventory.MIGDisable: "disable"}[s.Action]
			line := verb + " MIG mode while nothing uses the GPU"
			if g.Resets {
				line += "; the driver resets it"
			}
			lines = append(lines, line)
		case inventory.MIGDestroyCompute: // with its GPU instance
		case inventory.MIGDestroyInstance:
			line := fmt.Sprintf("destroy %s", nameOf(*s.GPU))
			if s.GPU.InUse {
				line += ", once nothing uses it"
			}
			lines = append(lines, line)
		case inventory.MIGCreateInstance:
			line := fmt.Sprintf("create %s", nameOf(*s.GPU))
			if len(s.GPU.Devices) != 1 || s.GPU.Devices[0] != s.GPU.Profile {
				line += ", with " + wordsWithCounts(s.GPU.Devices)
			}
			lines = append(lines, line)
		case inventory.MIGCreateCompute:
			if s.GPU.ID != nil && last != inventory.MIGCreateCompute {
				lines = append(lines, fmt.Sprintf("create %s in %s", wordsWithCounts(s.GPU.Devices), nameOf(*s.GPU)))
			}
		}
		last = s.Action
	}
	return lines
}
