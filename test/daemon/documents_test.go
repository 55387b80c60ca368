package daemon

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const repository = "../.."

// container begins the commands that run in the daemon's container.
var container = regexp.MustCompile(`^kubectl -n kube-system exec \$?POD -- `)

// TestCommandsOfDocuments runs each command of our program that README.md or a file of docs shows,
// beside a daemon on a simulated node. All other commands are in the table of docs/dev/testing.md,
// with what runs them.
func TestCommandsOfDocuments(t *testing.T) {
	t.Parallel()
	commands, err := documents.Commands(repository)
	if err != nil {
		t.Fatal(err)
	}
	listed := listedCommands(t)
	s := open(t, node.Setup{})
	s.goodHost()
	s.Args = []string{"--mig-strategy", "mixed", "--config-file", s.write("daemon.yaml", "mig: {enabled: true}\n")}
	s.start()
	s.shows(8, 8)
	folder := filesOfDocuments(t)
	shown := map[string]bool{}
	for _, c := range commands {
		if shown[c.Text] {
			continue
		}
		shown[c.Text] = true
		command := strings.TrimPrefix(container.ReplaceAllString(c.Text, ""), "bin/")
		switch {
		case listed[c.Text]:
		case strings.HasPrefix(command, "gpu-device-plugin "):
			t.Run(c.Text, func(t *testing.T) { s.documented(t, folder, command) })
		default:
			t.Errorf("%s shows %q, and the table of commands in docs/dev/testing.md does not say what runs it", c.File, c.Text)
		}
	}
	for text := range listed {
		if !shown[text] {
			t.Errorf("no document shows %q, which docs/dev/testing.md lists", text)
		}
	}
}

// documented runs a command of a document in a folder.
func (s *stage) documented(t *testing.T, folder, command string) {
	t.Helper()
	words := strings.Fields(command)[1:]
	if i := slices.Index(words, "--control-socket"); i >= 0 {
		words = words[:i]
	}
	switch kind := strings.Join(words[:min(2, len(words))], " "); {
	case words[0] == "doctor": // its exit status is what it has found
		if status, output, complaint := s.doctor(words[1:]...); status == 1 || output == "" {
			t.Errorf("exit status %d: %s%s", status, output, complaint)
		}
		return
	case kind == "driver preflight": // likewise
		c := exec.CommandContext(t.Context(), binary, append(words, "--control-socket", s.ControlSocket())...)
		if out, err := c.CombinedOutput(); c.ProcessState.ExitCode() == 1 {
			t.Errorf("%v: %s", err, out)
		}
		return
	case slices.Contains([]string{"status", "quiesce", "resume"},
		words[0]), slices.Contains([]string{"mig apply", "mig status", "simulate xid", "health clear"}, kind):
		words = append(words, "--control-socket", s.ControlSocket())
	}
	if slices.Contains(words, "--watch") {
		w := s.watches()
		w.prints("nvidia.com/gpu")
		w.ends()
		return
	}
	c := exec.CommandContext(t.Context(), binary, words...)
	c.Dir, c.Env = folder, append(os.Environ(), "SIMULATE=dgx-h100", "MPS_ROOT=/run/nvidia/mps")
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// filesOfDocuments makes a folder with the files that the commands read: examples of the documents,
// and the repository's own.
func filesOfDocuments(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range map[string]string{
		"config.yaml": example(t, "docs/sharing.md", "sharing:\n  mps:"), "claims.yaml": example(t, "docs/dra.md",
			"kind: ResourceClaim"),
		"layouts.yaml": example(t, "docs/mig.md", "mig-configs:"),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := filepath.Abs(repository)
	if err := errors.Join(err, os.Symlink(filepath.Join(root, "internal"),
		filepath.Join(folder, "internal"))); err != nil {
		t.Fatal(err)
	}
	return folder
}

// example returns the first block of YAML in a document that has a text.
func example(t *testing.T, document, has string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, document))
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(text), "```yaml\n")
	for _, block := range blocks[1:] {
		if block, _, _ := strings.Cut(block, "```"); strings.Contains(block, has) {
			return block
		}
	}
	t.Fatalf("no example of %s has %q", document, has)
	return ""
}

// TestConfigurationOfDocuments: each configuration file that a document shows is valid, without a
// warning.
func TestConfigurationOfDocuments(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob(repository + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range strings.Split(string(text), "```yaml\n")[1:] {
			block, _, _ = strings.Cut(block, "```")
			if !strings.HasPrefix(block, "version: v1\n") || strings.Contains(block, "mig-configs:") {
				continue
			}
			checked++
			file := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(block), 0o600); err != nil {
				t.Fatal(err)
			}
			c := exec.CommandContext(t.Context(), binary, "config", "check", file)
			c.Env = append(os.Environ(), "MPS_ROOT=/run/nvidia/mps")
			if out, err := c.CombinedOutput(); err != nil || strings.Contains(string(out), "warning") {
				t.Errorf("%s: %v: %s\n%s", filepath.Base(page), err, out, block)
			}
		}
	}
	if checked < 4 {
		t.Errorf("%d configuration files are found, want at least 4", checked)
	}
}

// listedCommands returns the commands of the table in docs/dev/testing.md. What runs them must be
// there: a test, a story on a real node, or a target of make.
func listedCommands(t *testing.T) map[string]bool {
	t.Helper()
	read := func(pattern string) string {
		paths, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("no file is %s: %v", pattern, err)
		}
		var all strings.Builder
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(text)
		}
		return all.String()
	}
	tests := read("internal/maintenance/driver/*/*_test.go") + read("internal/app/drivercli/*_test.go") + read("test/*/*_test.go") + read("cmd/kubectl-gpu/internal/*/*_test.go") + read("hack/*/*_test.go")
	makefile := read("Makefile")
	_, table, _ := strings.Cut(read("docs/dev/testing.md"), "| command of a document | what runs it |\n|---|---|\n")
	listed := map[string]bool{}
	quoted := regexp.MustCompile("`([^`]+)`")
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "| ") {
			break
		}
		cells := strings.Split(strings.ReplaceAll(line, `\|`, "\x00"), "|")
		for _, command := range quoted.FindAllStringSubmatch(cells[1], -1) {
			listed[strings.ReplaceAll(command[1], "\x00", "|")] = true
		}
		for _, by := range quoted.FindAllStringSubmatch(cells[2], -1) {
			name := by[1]
			target, isTarget := strings.CutPrefix(name, "make ")
			if !strings.Contains(tests, "func "+name+"(") && !strings.Contains(tests, `{name: "`+name+`"`) &&
				!(isTarget && strings.Contains(makefile, "\n"+target+":")) && name != ".ci/run" {
				t.Errorf("docs/dev/testing.md names %q, which is no test, story or target", name)
			}
		}
	}
	return listed
}

// TestMakeRun runs what make run does until it shows the GPUs, and then the commands that it prints.
// It refuses a wrong profile before anything starts.
func TestMakeRun(t *testing.T) {
	t.Parallel()
	laptop := filepath.Join(t.TempDir(), "laptop")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", laptop,
		repository+"/test/kubelet/cmd/laptop").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), laptop, "run", "--daemon", "/nowhere", "--profile", "dgx-h10").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `no simulator profile is called "dgx-h10": give one of `) {
		t.Errorf("a wrong profile: %v, %s", err, out)
	}
	c := exec.Command(laptop, "run", "--daemon", binary, "--profile", "t4")
	output, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = c.Process.Kill() })
	defer late.Stop()
	shown := false
	var commands []string // of the screen that is being read
	for lines := bufio.NewScanner(output); lines.Scan(); {
		command, is := strings.CutPrefix(lines.Text(), "  ")
		if utf8.RuneCountInString(lines.Text()) > 80 && !strings.HasPrefix(command, "export ") {
			t.Errorf("a line has more than 80 columns: %s", lines.Text())
		}
		switch {
		case is && !strings.HasPrefix(command, " "):
			commands = append(commands, command)
		case strings.Contains(lines.Text(), "allocatable "):
			commands = nil
			shown = shown || strings.Contains(lines.Text(), "allocatable 1")
		case strings.HasPrefix(lines.Text(), "Ctrl-C stops") && shown && len(commands) > 0:
			shellRuns(t, commands)
			if err := c.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
			shown = false
		}
	}
	if err := c.Wait(); err != nil || len(commands) != 5 {
		t.Errorf("the commands were %q; it ended with %v", commands, err)
	}
}

// shellRuns runs commands in a shell as they are; each has to succeed.
func shellRuns(t *testing.T, commands []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "sh", "-ec", strings.Join(commands, "\n")).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "GPU 0: xid simulated") || !strings.Contains(string(out), "T4") {
		t.Errorf("%q: %v, %s", commands, err, out)
	}
}
