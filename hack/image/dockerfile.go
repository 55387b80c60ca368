// Package image assembles container images without a registry or a container engine: from a stage
// of a Dockerfile, or from one static program.
package image

import (
	"encoding/json"
	"fmt"
	"strings"
)

// stage is what a stage of a Dockerfile describes, with those that it begins from.
type stage struct {
	copies     []copyLine
	env        []string
	labels     map[string]string
	entrypoint []string
}

// copyLine is one COPY --from=STAGE SOURCE DESTINATION.
type copyLine struct{ from, source, destination string }

// readStage reads the stage with a name, or the last one if the name is empty. An instruction that
// it does not know is an error, so that the image assembled here cannot silently differ from the
// one that a container engine builds.
func readStage(dockerfile, name string) (stage, error) {
	lines := instructions(dockerfile)
	first := -1
	for i, line := range lines {
		if from, named, _ := parseFrom(line); from != "" && (name == "" || named == name) {
			first = i
		}
	}
	if first < 0 {
		return stage{}, fmt.Errorf("read Dockerfile: no FROM of stage %q", name)
	}
	s := stage{labels: map[string]string{}}
	base, _, err := parseFrom(lines[first])
	switch {
	case err != nil:
		return stage{}, fmt.Errorf("read Dockerfile: %q: %w", lines[first], err)
	case base != "scratch":
		if s, err = readStage(strings.Join(lines[:first], "\n"), base); err != nil {
			return stage{}, fmt.Errorf("%q needs a registry, unless it begins from another stage: %w",
				lines[first], err)
		}
	}
	for _, line := range lines[first+1:] {
		if from, _, _ := parseFrom(line); from != "" {
			break
		}
		if err := s.add(line); err != nil {
			return stage{}, fmt.Errorf("read Dockerfile: %q: %w", line, err)
		}
	}
	return s, nil
}

// parseFrom reads FROM BASE or FROM BASE AS NAME. The base is empty in another line.
func parseFrom(line string) (base, name string, err error) {
	fields := strings.Fields(line)
	switch {
	case len(fields) == 0 || fields[0] != "FROM":
		return "", "", nil
	case len(fields) == 2:
		return fields[1], "", nil
	case len(fields) == 4 && fields[2] == "AS":
		return fields[1], fields[3], nil
	}
	return fields[len(fields)-1], fields[len(fields)-1], fmt.Errorf("want FROM BASE AS NAME")
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
