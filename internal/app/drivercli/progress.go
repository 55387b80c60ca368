package drivercli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

// newLine begins the line of a terminal again.
const newLine = "\r\x1b[K"

// A progress shows a step: as a bar in one line of a terminal, otherwise as a line for each step and
// reason.
type progress struct {
	to      io.Writer
	columns int // 0 without a terminal
	last    string
	step    string
	began   time.Time
}

func newProgress(to io.Writer) *progress {
	p := &progress{to: to, columns: terminal.Columns(to)}
	if safe, is := to.(*terminal.Writer); is && p.columns > 0 {
		safe.Keep = []string{newLine}
	}
	return p
}

// line shows the present state of a step.
func (p *progress) line(step string, percent int, reason string) {
	if step != p.step {
		p.step, p.began = step, time.Now()
	}
	reason = terminal.Line(reason)
	text := strings.TrimSuffix(fmt.Sprintf("%-10s %s", step, reason), " ")
	if p.columns == 0 {
		if text != p.last {
			fmt.Fprintln(p.to, strings.TrimSpace(text))
		}
		p.last = text
		return
	}
	text = fmt.Sprintf("%-10s %s %4s %s", step, bar(percent), time.Since(p.began).Truncate(time.Second), reason)
	if characters := []rune(text); len(characters) >= p.columns {
		text = string(characters[:p.columns-1])
	}
	fmt.Fprint(p.to, newLine+text)
	p.last = text
}

// bar returns a bar with the percentage.
func bar(percent int) string {
	const width = 30
	full := min(max(percent, 0), 100) * width / 100
	return fmt.Sprintf("[%s%s] %3d %%", strings.Repeat("#", full), strings.Repeat(" ", width-full), percent)
}

// end ends the line of the bar.
func (p *progress) end() {
	if p.columns > 0 && p.last != "" {
		fmt.Fprintln(p.to)
	}
	p.last = ""
}
