// Package image assembles container images without a registry or a container engine: from a Dockerfile's final stage, or
// from one static program.
package image

import (
	"encoding/json"
	"fmt"
	"strings"
)

// stage is what the final stage of a Dockerfile describes.
type stage struct {
	copies     []copyLine
	env        []string
	labels     map[string]string
	entrypoint []string
}

// copyLine is one COPY --from=STAGE SOURCE DESTINATION.
type copyLine struct{ from, source, destination string }

// finalStage reads the last stage. An instruction that it does not know is an error, so that the image assembled here
// cannot silently differ from the one that a container engine builds.
func finalStage(dockerfile string) (stage, error) {
	lines := instructions(dockerfile)
	last := -1
	for i, line := range lines {
		if strings.HasPrefix(line, "FROM ") {
			last = i
		}
	}
	if last < 0 {
		return stage{}, fmt.Errorf("read Dockerfile: no FROM")
	}
	if lines[last] != "FROM scratch" {
		return stage{}, fmt.Errorf("read Dockerfile: the final stage is %q; only FROM scratch needs no registry", lines[last])
	}
	s := stage{labels: map[string]string{}}
	for _, line := range lines[last+1:] {
		if err := s.add(line); err != nil {
			return stage{}, fmt.Errorf("read Dockerfile: %q: %w", line, err)
		}
	}
	return s, nil
}

func (s *stage) add(line string) error {
	name, rest, _ := strings.Cut(line, " ")
	key, value, assigns := strings.Cut(strings.TrimSpace(rest), "=")
	switch {
	case name == "ENV" && assigns && !strings.ContainsAny(value, " \"$"):
		s.env = append(s.env, key+"="+value)
	case name == "LABEL" && assigns && !strings.ContainsAny(value, " \"$"):
		s.labels[key] = value
	case name == "ENTRYPOINT":
		return json.Unmarshal([]byte(rest), &s.entrypoint)
	case name == "COPY":
		fields := strings.Fields(rest)
		if len(fields) != 3 || !strings.HasPrefix(fields[0], "--from=") {
			return fmt.Errorf("want COPY --from=STAGE SOURCE DESTINATION")
		}
		s.copies = append(s.copies, copyLine{strings.TrimPrefix(fields[0], "--from="), fields[1], fields[2]})
	default:
		return fmt.Errorf("not among the instructions known here (plain COPY --from, ENV, LABEL, ENTRYPOINT)")
	}
	return nil
}

// instructions returns the lines without comments and blanks, continued lines joined.
func instructions(dockerfile string) []string {
	var lines []string
	continued := false
	for line := range strings.Lines(dockerfile) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		text, more := strings.CutSuffix(line, "\\")
		if continued {
			lines[len(lines)-1] += text
		} else {
			lines = append(lines, text)
		}
		continued = more
	}
	return lines
}
