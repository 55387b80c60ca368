// Command recording runs `make run`, breaks and mends a GPU of it, and writes what the terminal
// showed as an SVG that plays it.
package main

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	columns, rows = 104, 22
	patience      = time.Minute     // for what the node is to show
	shortest      = 2 * time.Second // that a frame is shown for; longer waits are cut to the longest
	longest       = 4 * time.Second
)

// A frame is what the terminal showed, and for how long. The text says how late it was in truth.
type frame struct {
	text string
	time time.Duration
}

func main() {
	if err := record(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
}

// record plays the story with the programs laptop and gpu-device-plugin in a folder, and writes the
// file.
func record(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("usage: recording FOLDER FILE.svg")
	}
	folder, file := args[0], args[1]
	laptop := exec.Command(folder+"/laptop", "run", "--daemon", folder+"/gpu-device-plugin")
	output, err := laptop.StdoutPipe()
	if err != nil {
		return err
	}
	if err := laptop.Start(); err != nil {
		return err
	}
	defer func() {
		_ = laptop.Process.Signal(os.Interrupt)
		_ = laptop.Wait()
	}()
	r := recorder{program: folder + "/gpu-device-plugin", screens: make(chan string),
		frames: []frame{{"$ make run", shortest}}}
	go read(output, r.screens)
	for _, step := range []struct {
		command           []string // of gpu-device-plugin; nil for none
		allocatable, says string   // the screen that is waited for, and the first word of the status then
	}{
		{nil, "allocatable 8", "ready"},
		{[]string{"simulate", "xid", "--gpu", "3", "--xid", "79"}, "allocatable 7", "degraded"},
		{[]string{"simulate", "restore", "--gpu", "3"}, "allocatable 8", "ready"},
	} {
		r.begun = time.Now()
		if step.command != nil {
			if err := r.run(step.command); err != nil {
				return err
			}
		}
		if err := r.show(step.allocatable, step.says); err != nil {
			return err
		}
	}
	return os.WriteFile(file, []byte(draw(r.frames)), 0o644)
}

// A recorder makes the frames of a recording.
type recorder struct {
	program string // gpu-device-plugin
	screens chan string
	frames  []frame
	fault   string    // what status said of the GPU that failed
	socket  string    // the control socket of the daemon, once a screen has shown it
	begun   time.Time // when the step began
}

// run adds a frame with a command of gpu-device-plugin, and runs it.
func (r *recorder) run(command []string) error {
	line := "gpu-device-plugin " + strings.Join(command, " ")
	r.frames = append(r.frames, frame{r.frames[len(r.frames)-1].text + "\n\n$ " + line, shortest})
	if out, err := exec.Command(r.program, append(slices.Clone(command), "--control-socket",
		r.socket)...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

// show adds a frame with the next screen that has a text, and with the first line of the status
// once that begins with says.
func (r *recorder) show(text, says string) error {
	screen, err := r.await(text)
	if err != nil {
		return err
	}
	if r.socket == "" {
		r.socket = regexp.MustCompile(`/\S+/control\.sock`).FindString(screen)
	}
	var first, bad string
	for !strings.HasPrefix(first, says) {
		status, err := exec.Command(r.program, "status", "--control-socket", r.socket).Output()
		if err != nil {
			return fmt.Errorf("status: %w", err)
		}
		first, _, _ = strings.Cut(string(status), "\n")
		bad = failed(string(status))
	}
	screen, _, _ = strings.Cut(screen, "\nIn another terminal")
	late := time.Since(r.begun).Round(10 * time.Millisecond)
	shown := fmt.Sprintf("$ make run\n\n%s\n\nafter %v, gpu-device-plugin status says:\n%s",
		strings.TrimSpace(screen), late, first)
	switch {
	case bad != "":
		r.fault = bad
		shown += "\n\n" + bad
	case r.fault != "": // the last frame is all that is shown where nothing is animated
		shown += "\n\nwhile the GPU was lost, it said:\n" + r.fault
	}
	r.frames = append(r.frames, frame{shown, longest})
	return nil
}

// failed returns the rows of a status about GPUs that are lost, with their titles and reasons; empty
// if none is.
func failed(status string) string {
	var lines []string
	titles, isBad := "", false
	for line := range strings.SplitSeq(status, "\n") {
		switch {
		case strings.HasPrefix(line, "GPU  "):
			titles = line
		case !strings.HasPrefix(line, " "):
			isBad = strings.Contains(line, " Lost ")
		case strings.HasPrefix(strings.TrimLeft(line, " "), "events: "):
			isBad = false
		}
		if isBad {
			lines = append(lines, line)
		}
	}
	if lines == nil {
		return ""
	}
	return strings.Join(append([]string{titles}, lines...), "\n")
}

// await returns the next screen that has a text.
func (r *recorder) await(text string) (string, error) {
	late := time.After(patience)
	for {
		select {
		case screen, ok := <-r.screens:
			if !ok || strings.Contains(screen, text) {
				return screen, nil
			}
		case <-late:
			return "", fmt.Errorf("the node does not show %q", text)
		}
	}
}

// read sends each screen that laptop prints: what is between two of its titles.
func read(output io.Reader, screens chan<- string) {
	defer close(screens)
	var screen strings.Builder
	for lines := bufio.NewScanner(output); lines.Scan(); {
		screen.WriteString(lines.Text() + "\n")
		if strings.HasPrefix(lines.Text(), "Ctrl-C stops") {
			screens <- screen.String()
			screen.Reset()
		}
	}
}

// draw draws a terminal that shows the frames one after the other, for ever. Where nothing is
// animated, it shows the last one.
func draw(frames []frame) string {
	const width, height, line = columns*7.8 + 32, rows*18 + 32, 18
	var total, at time.Duration
	for _, f := range frames {
		total += f.time
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" `+
		`font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">`+"\n", width, height)
	b.WriteString("<title>make run: a GPU of a simulated node fails and comes back</title>\n<style>\n")
	for i, f := range frames {
		from, to := 100*at.Seconds()/total.Seconds(), 100*(at+f.time).Seconds()/total.Seconds()
		fmt.Fprintf(&b, "@keyframes f%d { 0%%, %.2f%% { visibility: hidden } %.2f%%, %.2f%% { visibility: visible } "+
			"%.2f%%, 100%% { visibility: hidden } }\n", i, max(0, from-0.01), from, to, min(100, to+0.01))
		fmt.Fprintf(&b, ".f%d { animation: f%d %.0fs step-end infinite }\n", i, i, total.Seconds())
		at += f.time
	}
	b.WriteString("@media (prefers-reduced-motion: reduce) { g { animation: none !important } }\n")
	b.WriteString("text { fill: #d0d7de; white-space: pre } .bad { fill: #ff7b72 } .good { fill: #7ee787 } " +
		".typed { fill: #ffffff; font-weight: bold }\n</style>\n" +
		`<rect width="100%" height="100%" rx="8" fill="#0d1117"/>` + "\n")
	for i, f := range frames {
		visibility := "hidden"
		if i == len(frames)-1 {
			visibility = "visible"
		}
		fmt.Fprintf(&b, `<g class="f%d" visibility="%s">`+"\n", i, visibility)
		for j, text := range strings.Split(f.text, "\n") {
			class := ""
			switch {
			case strings.HasPrefix(text, "$ "):
				class = ` class="typed"`
			case strings.Contains(text, "Unhealthy"), strings.Contains(text, " Lost "),
				strings.HasPrefix(text, "degraded"):
				class = ` class="bad"`
			case strings.HasPrefix(text, "ready"):
				class = ` class="good"`
			}
			if text != "" {
				fmt.Fprintf(&b, `<text x="16" y="%d"%s xml:space="preserve">%s</text>`+"\n", 28+line*j, class,
					html.EscapeString(text))
			}
		}
		b.WriteString("</g>\n")
	}
	return b.String() + "</svg>\n"
}
