package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A view is the style of a printed status.
type view struct {
	wide   bool // complete UUIDs and times, lines of any length
	colour bool
	now    time.Time // durations end here
	// columns is the width of the terminal; 0 without a terminal, or if irrelevant.
	columns int
}

// newView returns the style for output w: with colours if w is a terminal with colours, and the
// user wants them.
func newView(w io.Writer, wide bool) view {
	v := view{wide: wide, now: time.Now()}
	safe, ok := w.(*terminal.Writer)
	if !ok {
		return v
	}
	file, ok := safe.To.(*os.File)
	if !ok {
		return v
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return v
	}
	if v.colour = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"; v.colour {
		safe.Keep = []string{sequence(green), sequence(yellow), sequence(red), sequence(bold), sequence(plain)}
	}
	if !wide {
		v.columns = int(size.Col)
	}
	return v
}

// The colours of states, as parameters of ANSI's escape sequence.
const (
	green  = "32"
	yellow = "33"
	red    = "31"
	bold   = "1"
	plain  = "0" // ends the others
)

// sequence returns ANSI's escape sequence with a parameter.
func sequence(parameter string) string { return "\x1b[" + parameter + "m" }

var colours = map[string]string{
	"Healthy": green, "Suspect": yellow, "Unknown": yellow, "Unhealthy": red, "Lost": red, "serving": green,
	status.AllServed: green, status.Starting: yellow, status.ReleasedDriver: yellow, status.Degraded: yellow,
	status.WaitingForKubelet: yellow, status.WaitingForDriver: red, status.StandingBy: red, status.NotReady: red,
}

// paint returns text in a colour; an empty colour leaves it unchanged.
func (v view) paint(text, colour string) string {
	if !v.colour || colour == "" {
		return text
	}
	return sequence(colour) + text + sequence(plain)
}

// printStatus prints a status for people. The first line is the summary.
func printStatus(w io.Writer, s status.Status, v view) {
	state, rest, _ := strings.Cut(v.fold(s.Summary.State+": "+s.Summary.Text, ""), ":")
	fmt.Fprintf(w, "%s:%s\n", v.paint(state, colours[s.Summary.State]), rest)
	v.sentence(w, strings.Join(daemonLine(s, v), ", "))
	if s.Readiness.Ready != (s.Summary.State == status.AllServed || s.Summary.State == status.Degraded) ||
		s.Readiness.Reason != "" {
		v.sentence(w, "ready: "+readyNow(s.Readiness))
	}
	if l := s.Lead; l != (status.Lead{}) && (v.wide || l != status.Lead{This: true, Name: l.Name, Since: l.Since}) {
		v.sentence(w, "leads: "+l.String())
	}
	for _, c := range s.Calls {
		v.sentence(w, fmt.Sprintf("driver call that does not return: %s since %s", c, v.since(c.Since)))
	}
	for _, line := range []struct{ what, text string }{
		{"last scan failed", failedScan(s)}, {"all GPUs", s.Node}, {"driver", s.DriverMismatch},
		{"GPUs and virtual functions given to virtual machines", awayLine(s.GivenAway)}, {"configuration file not used",
			s.ConfigError},
		{"metrics not served", s.MetricsError}, {"labels not written", s.LabelsError},
		{"PodResources not asked", s.PodResourcesError}, {"API server not reached", s.APIServerError}, {"MIG layout",
			layoutLine(s.MIG)},
		{"Dynamic Resource Allocation", allocationLine(s.DRA)}, {"CUDA", validationLine(s.Validation)},
		{"reset", s.Reset.Line(s.GPUs)}, {"change of the driver", s.DriverChange.Line()},
		{"steps", stepsLine(s.Steps)},
	} {
		if line.text != "" {
			v.sentence(w, line.what+": "+line.text)
		}
	}
	printDevices(w, s.GPUs, s.Holders, v)
	printResources(w, s.Resources, v)
	first := true
	for _, kind := range []struct {
		prefix    string
		sentences []string
	}{
		{"fatal error: ", s.NVSwitches}, {"", s.Unwatched}, {"left out: ", s.LeftOut},
		{"next check of ", retries(s, v)},
		{"holder: ", holderSentences(s)},
		{"owner: ", ownerSentences(s.DRA)}, {"claim: ", claimSentences(s.DRA, v)},
		{"not offered yet: ", status.Held(listedHolds(s.Holds))},
		{"no longer offered: ", departingSentences(s.Resources)},
		{"repair: ", status.RepairSentences(s.Repair, s.GPUs)},
		{"warning: ", s.Warnings}, {"MPS: ", s.MPS},
		{"metrics: ", s.MetricsAbsent}, {"CUDA: ", validationSentences(s.Validation)},
		{"waits: ", waitSentences(s, v)},
	} {
		for _, sentence := range kind.sentences {
			if first {
				fmt.Fprintln(w)
			}
			first = false
			v.sentence(w, kind.prefix+sentence)
		}
	}
}

// awayLine returns the number of GPUs that containers cannot use because virtual machines have
// them.
func awayLine(count int) string {
	if count == 0 {
		return ""
	}
	return fmt.Sprint(count)
}

// holderSentences names the containers that hold devices, by the device's index.
func holderSentences(s status.Status) (sentences []string) {
	if s.HoldersError != "" {
		sentences = append(sentences, "not known: "+s.HoldersError)
	}
	for _, h := range s.Holders {
		device := h.Device
		if at := slices.IndexFunc(s.GPUs, func(d status.Device) bool { return d.UUID == h.Device }); at >= 0 {
			device = s.GPUs[at].Index
		}
		text := fmt.Sprintf("GPU %s: %s/%s, container %s", device, h.Namespace, h.Pod, h.Container)
		if h.Claim != "" {
			text += ", claim " + h.Claim
		}
		if h.Receipt != nil {
			text += ": " + h.Receipt.String()
		}
		sentences = append(sentences, text)
	}
	return sentences
}

// failedScan returns why the last scan failed; empty if there was none because the driver is
// released. The line about all GPUs then has this reason.
func failedScan(s status.Status) string {
	if s.Quiet && s.Stale == s.Node {
		return ""
	}
	return s.Stale
}

// layoutLine describes the progress of a MIG layout; empty if none is wanted.
func layoutLine(m *status.MIGLayout) string {
	if m == nil || m.Layout == "" {
		return ""
	}
	text := m.Layout + " of " + m.From + ", " + m.State
	if m.Reason != "" {
		text += ": " + m.Reason
	}
	return text
}

// daemonLine describes the daemon and its driver.
func daemonLine(s status.Status, v view) []string {
	parts := []string{"version " + s.Version, "driver " + cmp.Or(s.Driver, "-")}
	if s.Simulated != "" {
		parts = append(parts, "simulated node "+s.Simulated)
	}
	if !s.Looked.IsZero() {
		parts = append(parts, "last successful scan "+v.ago(s.Looked))
	}
	if s.ConfigFile != "" {
		parts = append(parts, "configuration file "+s.ConfigFile)
	}
	return parts
}

// unitsNote describes the part of a GPU in units and, if holders are known, the part that they
// have; empty for another GPU.
func unitsNote(d status.Device, holders []status.Holder) string {
	if d.UnitsMiB == 0 {
		return ""
	}
	text, held := fmt.Sprintf("in units: %d MiB", d.UnitsMiB), 0
	for _, h := range holders {
		if h.Device == d.UUID && h.Receipt != nil {
			held += h.Receipt.MemoryMiB
		}
	}
	if holders != nil {
		text += fmt.Sprintf(", of which containers have %d MiB", held)
	}
	return text
}

func printDevices(w io.Writer, devices []status.Device, holders []status.Holder, v view) {
	if len(devices) == 0 {
		return
	}
	t := table{titles: []string{"GPU", "UUID", "MODEL", "STATE", "SINCE", "REMEDY"}, flexible: 2}
	uuids := shortened(devices, v)
	whole := status.Device{}
	for i, d := range devices {
		cells := []string{d.Index, uuids[i], d.Model, d.State, v.since(d.Since), remedy(d)}
		r := row{cells: cells, colour: colours[d.State], coloured: 3}
		part := strings.HasPrefix(d.Index, whole.Index+":")
		if d.Reason != "" && (!part || d.Reason != whole.Reason) {
			r.notes = append(r.notes, d.Reason)
		}
		if note := unitsNote(d, holders); note != "" {
			r.notes = append(r.notes, note)
		}
		if len(d.Events) > 0 {
			r.notes = append(r.notes, "events: "+strings.Join(d.Events, "; "))
		}
		if !part {
			whole = d
		}
		t.rows = append(t.rows, r)
	}
	t.print(w, v)
}

// remedy returns the remedy for a device, in words if the name alone does not say what to
// do.
func remedy(d status.Device) string {
	if d.Remedy == string(inventory.RemedyHuman) {
		return "manual (needs an operator)"
	}
	return cmp.Or(d.Remedy, "-")
}

func printResources(w io.Writer, resources []status.Resource, v view) {
	if len(resources) == 0 {
		return
	}
	t := table{titles: []string{"RESOURCE", "DEVICES", "HEALTHY", "SERVER"}, flexible: 0}
	for _, r := range resources {
		server, detail, _ := strings.Cut(r.Server, ": ")
		line := row{cells: []string{r.Name, fmt.Sprint(r.Devices), fmt.Sprint(r.Healthy), server},
			colour:   colours[server],
			coloured: 3}
		for _, note := range []string{detail, r.Problem} {
			if note != "" {
				line.notes = append(line.notes, note)
			}
		}
		t.rows = append(t.rows, line)
	}
	t.print(w, v)
}

func readyNow(r status.Readiness) string {
	text := "no"
	if r.Ready {
		text = "yes"
	}
	if r.Reason != "" {
		text += ": " + r.Reason
	}
	return text
}

// retries returns when unreadable GPUs are checked next, and why if their state does not say so.
func retries(s status.Status, v view) []string {
	var sentences []string
	var known []string
	for _, r := range s.Retries {
		when := fmt.Sprintf("GPU %d at %s", r.Index, cmp.Or(status.Stamp(r.Next), "-"))
		if !v.wide && !r.Next.IsZero() {
			when = fmt.Sprintf("GPU %d in %s", r.Index, age(r.Next.Sub(v.now)))
		}
		if slices.ContainsFunc(s.GPUs,
			func(g status.Device) bool { return g.Index == fmt.Sprint(r.Index) && g.Reason == r.Reason }) {
			known = append(known, when)
		} else {
			sentences = append(sentences, when+": "+r.Reason)
		}
	}
	if known != nil {
		sentences = append(sentences, strings.Join(known, ", "))
	}
	return sentences
}

// listedHolds returns the holds on listed devices. Other held devices are left out, with reasons.
func listedHolds(holds []status.Hold) []status.Hold {
	return slices.DeleteFunc(slices.Clone(holds), func(h status.Hold) bool { return !h.Listed })
}

// maxDeparting is the greatest number of printed departing devices of a resource: there may be a
// thousand replicas.
const maxDeparting = 20

func departingSentences(resources []status.Resource) []string {
	var sentences []string
	for _, r := range resources {
		for _, d := range r.Departing[:min(len(r.Departing), maxDeparting)] {
			sentences = append(sentences, fmt.Sprintf("%s %s: %s; still listed: %s", r.Name, d.ID, d.Reason, d.Waiting))
		}
		if more := len(r.Departing) - maxDeparting; more > 0 {
			devices := wording.Count(more, "more device")
			sentences = append(sentences, fmt.Sprintf("%s: %s, see -o json", r.Name, devices))
		}
	}
	return sentences
}

// since returns a start: the time in a wide view, otherwise its age.
func (v view) since(t time.Time) string {
	if t.IsZero() || v.wide {
		return cmp.Or(status.Stamp(t), "-")
	}
	return v.ago(t)
}

func (v view) ago(t time.Time) string {
	if v.wide {
		return "at " + status.Stamp(t)
	}
	return age(v.now.Sub(t)) + " ago"
}

// age returns a duration with one unit.
func age(d time.Duration) string {
	switch d = max(d, 0); {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// shortUUID is the shortest printed part of a UUID: "GPU-" and eight digits.
const shortUUID = 12

// shortened returns the UUIDs of devices, as short as they remain distinct; complete in a wide
// view.
func shortened(devices []status.Device, v view) []string {
	uuids := make([]string, len(devices))
	for length := shortUUID; ; length += 4 {
		distinct, longer := map[string]bool{}, false
		for i, d := range devices {
			uuids[i] = d.UUID
			if len(d.UUID) > length && !v.wide {
				uuids[i], longer = d.UUID[:length], true
			}
			distinct[uuids[i]] = true
		}
		if len(distinct) == len(devices) || !longer {
			return uuids
		}
	}
}

// A table is printed in columns. In a too wide table the flexible column is narrowed, and
// then the widest column.
type table struct {
	titles   []string
	flexible int
	rows     []row
}

// A row has a cell for each column, one coloured cell, and notes below.
type row struct {
	cells    []string
	coloured int
	colour   string
	notes    []string
}

const (
	gap = 2 // columns between two cells
	// minFlexible is the smallest width of a flexible column.
	minFlexible = 8
)

func (t table) print(w io.Writer, v view) {
	widths := make([]int, len(t.titles))
	total := 0
	for i, title := range t.titles {
		widths[i] = len(title)
		for _, r := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(r.cells[i]))
		}
		total += widths[i] + gap
	}
	if excess := total - gap - v.maxColumns(); excess > 0 && !v.wide {
		before := widths[t.flexible]
		widths[t.flexible] = max(before-excess, minFlexible)
		excess -= before - widths[t.flexible]
		if widest := slices.Index(widths, slices.Max(widths)); excess > 0 {
			widths[widest] = max(widths[widest]-excess, shortUUID)
		}
	}
	fmt.Fprintln(w)
	for _, r := range append([]row{{cells: t.titles, coloured: -1}}, t.rows...) {
		var line strings.Builder
		for i, text := range r.cells {
			cell := cut(text, widths[i])
			padding := strings.Repeat(" ", widths[i]+gap-utf8.RuneCountInString(cell))
			switch r.coloured {
			case i:
				cell = v.paint(cell, r.colour)
			case -1:
				cell = v.paint(cell, bold)
			}
			line.WriteString(cell + padding)
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
		for _, note := range r.notes {
			indent := strings.Repeat(" ", widths[0]+gap)
			if t.flexible == 0 {
				indent = "  "
			}
			fmt.Fprintln(w, v.fold(note, indent))
		}
	}
}

// cut removes the middle of a text wider than width, because names often differ at their end.
func cut(text string, width int) string {
	runes := []rune(text)
	if len(runes) <= width {
		return text
	}
	front := (width - 1) / 2
	return string(runes[:front]) + "…" + string(runes[len(runes)-(width-1-front):])
}

// sentence prints a sentence. Further lines are indented.
func (v view) sentence(w io.Writer, text string) { fmt.Fprintln(w, v.fold(text, "")) }

// fold breaks a text into lines, at spaces if possible. The lines begin with an indent, all but the
// first with two more columns.
func (v view) fold(text, indent string) string {
	if v.wide {
		return indent + strings.Join(strings.Fields(text), " ")
	}
	return terminal.Fold(text, v.maxColumns(), indent)
}

// maxColumns returns how long a line is at most.
func (v view) maxColumns() int { return cmp.Or(v.columns, terminal.DefaultColumns) }
