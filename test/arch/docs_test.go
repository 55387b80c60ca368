package arch

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// TestLinks holds the links of the files at the root, in .github and in docs: each file that they
// name exists, and so does each heading.
func TestLinks(t *testing.T) {
	t.Parallel()
	pages := documents(t)
	links := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for file, text := range pages {
		for _, found := range links.FindAllStringSubmatch(text, -1) {
			link, heading, _ := strings.Cut(found[1], "#")
			if strings.Contains(link, "://") {
				continue
			}
			target := file
			if link != "" {
				target = filepath.Join(filepath.Dir(file), link)
			}
			if _, err := fs.Stat(root, target); err != nil {
				t.Errorf("%s: the link %s names no file", file, found[1])
			} else if heading != "" && !anchors(pages[target])[heading] {
				t.Errorf("%s: the link %s names no heading", file, found[1])
			}
		}
	}
}

// TestPathsOfDocuments: each document that a comment, a message or a manifest names exists, and so
// does its heading.
func TestPathsOfDocuments(t *testing.T) {
	t.Parallel()
	pages := documents(t)
	paths := regexp.MustCompile(`\bdocs/[a-z0-9/-]+\.md(#[a-z0-9-]+)?`)
	found := 0
	for _, folder := range []string{"api", "cmd", "deployments", "hack", "internal", "test"} {
		err := fs.WalkDir(root, folder, func(file string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			if !slices.Contains([]string{".go", ".yaml", ".txt", ".json", ".sh", ".md", ""}, filepath.Ext(file)) {
				return nil
			}
			text, err := fs.ReadFile(root, file)
			if err != nil {
				return err
			}
			for _, path := range paths.FindAllString(string(text), -1) {
				found++
				page, heading, _ := strings.Cut(path, "#")
				if pages[page] == "" || heading != "" && !anchors(pages[page])[heading] {
					t.Errorf("%s: %s is no document, or the document has no such heading", file, path)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 50 {
		t.Errorf("%d paths of documents are found, want at least 50", found)
	}
}

// TestRunbookEntriesAreShort holds an entry of docs/runbook.md to twelve lines, without the empty
// ones and the marks of examples.
func TestRunbookEntriesAreShort(t *testing.T) {
	t.Parallel()
	entry, lines := "", 0
	for line := range strings.Lines(documents(t)["docs/runbook.md"]) {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "## "):
			entry = ""
		case strings.HasPrefix(line, "### "):
			entry, lines = strings.TrimPrefix(line, "### "), 0
		case entry == "", line == "", strings.HasPrefix(line, "```"), strings.HasPrefix(line, "<!--"):
		default:
			if lines++; lines == 13 {
				t.Errorf("the entry %s of docs/runbook.md has more than 12 lines", entry)
			}
		}
	}
}

// TestRunbookNamesMessages: each log message of the table in docs/runbook.md is one of
// docs/dev/messages.md, which follows the source.
func TestRunbookNamesMessages(t *testing.T) {
	t.Parallel()
	pages := documents(t)
	_, table, begins := strings.Cut(pages["docs/runbook.md"], "\n## What the log says\n")
	table, _, ends := strings.Cut(table, "\n## ")
	if !begins || !ends {
		t.Fatal("docs/runbook.md has no section with what the log says")
	}
	found := 0
	for _, message := range regexp.MustCompile("(?m)^[|] `([A-Z][^`…]+)` [|]").FindAllStringSubmatch(table, -1) {
		found++
		if !strings.Contains(pages["docs/dev/messages.md"], "\n| "+message[1]+" |") {
			t.Errorf("docs/runbook.md names the message %q, and docs/dev/messages.md does not", message[1])
		}
	}
	if found < 5 {
		t.Errorf("%d messages are found, want at least 5", found)
	}
}

// documents returns the files in Markdown at the root, in .github and in docs by their paths.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	var paths []string
	for _, pattern := range []string{"*.md", ".github/*.md", "docs/*.md", "docs/*/*.md", "docs/*/*/*.md"} {
		found, err := fs.Glob(root, pattern)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, found...)
	}
	for _, path := range paths {
		text, err := fs.ReadFile(root, path)
		if err != nil {
			t.Fatal(err)
		}
		pages[path] = string(text)
	}
	return pages
}

// anchors returns the names that GitHub gives to the headings of a page.
func anchors(page string) map[string]bool {
	names := map[string]bool{}
	code := false
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "```") {
			code = !code
		}
		title := strings.TrimSpace(strings.TrimLeft(line, "#"))
		if code || !strings.HasPrefix(line, "#") {
			continue
		}
		names[strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, title)] = true
	}
	return names
}
