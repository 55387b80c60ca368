// Command recording runs `make run`, breaks and mends a GPU of it, and writes what the terminal showed as an SVG that plays it.
package main

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

const (
	columns, rows = 104, 18
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

// record plays the story with the programs laptop and gpu-device-plugin in a folder, and writes the file.
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
	screens := make(chan string)
	go read(output, screens)
	// shows waits for a screen that has a text.
	shows := func(text string) (string, error) {
		late := time.After(patience)
		for {
			select {
			case screen, ok := <-screens:
				if !ok || strings.Contains(screen, text) {
					return screen, nil
				}
			case <-late:
				return "", fmt.Errorf("the node does not show %q", text)
			}
		}
	}
	frames := []frame{{"$ make run", shortest}}
	var socket string
	begun := time.Now()
	add := func(command, wants, says string) error {
		if command != "" {
			words := append(strings.Fields(command), "--control-socket", socket)
			begun = time.Now()
			frames = append(frames, frame{frames[len(frames)-1].text + "\n\n$ " + strings.Join(words[:len(words)-2], " "), shortest})
			if out, err := exec.Command(folder+"/gpu-device-plugin", words[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", command, err, out)
			}
		}
		screen, err := shows(wants)
		if err != nil {
			return err
		}
		if socket == "" {
			socket = regexp.MustCompile(`\S+/control\.sock`).FindString(screen)
		}
		var first string
		for !strings.HasPrefix(first, says) {
			status, err := exec.Command(folder+"/gpu-device-plugin", "status", "--control-socket", socket).Output()
			if err != nil {
				return fmt.Errorf("status: %w", err)
			}
			first, _, _ = strings.Cut(string(status), "\n")
		}
		screen, _, _ = strings.Cut(screen, "\nFrom another terminal")
		late := time.Since(begun).Round(10 * time.Millisecond)
		frames = append(frames, frame{fmt.Sprintf("$ make run\n\n%s\n\nafter %v, gpu-device-plugin status says:\n%s",
			strings.TrimSpace(screen), late, first), longest})
		return nil
	}
	for _, step := range [][3]string{
		{"", "allocatable 8", "ready"},
		{"gpu-device-plugin simulate xid --gpu 3 --xid 79", "allocatable 7", "degraded"},
		{"gpu-device-plugin simulate restore --gpu 3", "allocatable 8", "ready"},
	} {
		if err := add(step[0], step[1], step[2]); err != nil {
			return err
		}
	}
	return os.WriteFile(file, []byte(draw(frames)), 0o644)
}

// read sends each screen that laptop prints: what is between two of its titles.
func read(output io.Reader, screens chan<- string) {
	defer close(screens)
	var screen strings.Builder
	for lines := bufio.NewScanner(output); lines.Scan(); {
		screen.WriteString(lines.Text() + "\n")
		if strings.HasPrefix(lines.Text(), "Ctrl-C ends") {
			screens <- screen.String()
			screen.Reset()
		}
	}
}

// draw draws a terminal that shows the frames one after the other, for ever.
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
		fmt.Fprintf(&b, ".f%d { visibility: hidden; animation: f%d %.0fs step-end infinite }\n", i, i, total.Seconds())
		at += f.time
	}
	b.WriteString("text { fill: #d0d7de; white-space: pre } .bad { fill: #ff7b72 } .good { fill: #7ee787 } " +
		".typed { fill: #ffffff; font-weight: bold }\n</style>\n" + `<rect width="100%" height="100%" rx="8" fill="#0d1117"/>` + "\n")
	for i, f := range frames {
		fmt.Fprintf(&b, `<g class="f%d">`+"\n", i)
		for j, text := range strings.Split(f.text, "\n") {
			class := ""
			switch {
			case strings.HasPrefix(text, "$ "):
				class = ` class="typed"`
			case strings.Contains(text, "Unhealthy"), strings.HasPrefix(text, "degraded"):
				class = ` class="bad"`
			case strings.HasPrefix(text, "ready"):
				class = ` class="good"`
			}
			if text != "" {
				fmt.Fprintf(&b, `<text x="16" y="%d"%s xml:space="preserve">%s</text>`+"\n", 28+line*j, class, html.EscapeString(text))
			}
		}
		b.WriteString("</g>\n")
	}
	return b.String() + "</svg>\n"
}
