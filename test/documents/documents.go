// Package documents finds the commands that README.md and the files in docs and docs/dev show, so
// that tests can run them.
package documents

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// A Command is a command of a document.
type Command struct {
	File string // relative to the root of the repository
	Text string // one line, without the prompt and without a comment behind it
}

var (
	fence   = regexp.MustCompile("^ *```(.*)$")
	prompt  = regexp.MustCompile(`^ *[$#] +`)
	program = regexp.MustCompile(`^ *(?:\$ )?(bin/)?(gpu-device-plugin|gpu-node-agent|kubectl|helm|make|cd|curl) `)
	comment = regexp.MustCompile(`\s+# .*$`)
)

// Commands returns the commands of all documents below a root, in order: in blocks of the language
// console the lines with a prompt, and in blocks without a language those that begin with a
// program's name.
func Commands(root string) ([]Command, error) {
	paths := []string{filepath.Join(root, "README.md")}
	for _, pattern := range []string{"docs/*.md", "docs/dev/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			return nil, fmt.Errorf("find the documents %s: %d, %w", pattern, len(found), err)
		}
		paths = append(paths, found...)
	}
	var commands []Command
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read a document: %w", err)
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return nil, fmt.Errorf("read a document: %w", err)
		}
		for _, text := range commandsOf(string(text)) {
			commands = append(commands, Command{name, text})
		}
	}
	return commands, nil
}

func commandsOf(text string) (commands []string) {
	var begins *regexp.Regexp // of a command, in the block that is read
	inside, goesOn := false, false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if f := fence.FindStringSubmatch(line); f != nil {
			inside, goesOn = !inside, false
			begins = map[string]*regexp.Regexp{"console": prompt, "": program}[f[1]]
			continue
		}
		if !inside || begins == nil || !goesOn && !begins.MatchString(line) {
			continue
		}
		if !goesOn {
			line = prompt.ReplaceAllString(line, "")
		}
		line = strings.TrimSpace(comment.ReplaceAllString(line, ""))
		if goesOn {
			commands[len(commands)-1] += " " + line
		} else {
			commands = append(commands, line)
		}
		last := &commands[len(commands)-1]
		goesOn = strings.HasSuffix(*last, `\`) || strings.HasSuffix(*last, "|")
		*last = strings.TrimSpace(strings.TrimSuffix(*last, `\`))
	}
	return commands
}
