package field_test

import (
	"strings"
	"testing"
)

// TestMistypedCommands: a check in CI that names a command which does not exist fails (E9).
func TestMistypedCommands(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, says string }{
		{"stats", `unknown command "stats", did you mean "status"?; gpu-device-plugin --help lists the commands`},
		{"config chek config.yaml", `unknown command "chek", did you mean "check"?; gpu-device-plugin config --help lists the commands`},
		{"config chek config.yaml --mps-root=/mps", `unknown command "chek"`},
		{"config config.yaml", `unknown command "config.yaml"`},
		{"mig aply --layout all-disabled", `unknown command "aply", did you mean "apply"?`},
		{"simulate xidd --gpu 3", `unknown command "xidd", did you mean "add" or "xid"?`},
		{"health clr", `unknown command "clr"`},
		{"record startt", `unknown command "startt", did you mean "start"?`},
		{"record --control-socket /c.sock startt", `unknown command "startt"`},
		{"claim chek claim.yaml", `unknown command "chek"`},
		{"topology perfer", `unknown command "perfer"`},
		{"mps-control-daemon mount-smh", `unknown command "mount-smh"`},
		{"completion bsh", `unknown command "bsh"`},
		{"help stats", `unknown command "stats"`},
		{"help mig aply", `unknown command "aply"`},
		{"status now", `unknown command "now"`},
	} {
		t.Run(c.args, func(t *testing.T) {
			t.Parallel()
			text, status := run(t, strings.Fields(c.args)...)
			if status != 1 || !strings.Contains(text, c.says) || strings.Count(text, "\n") != 1 {
				t.Errorf("exit status %d, want 1 and one line with %q:\n%s", status, c.says, text)
			}
		})
	}
	for _, args := range []string{"config", "mig --help", "help", "help mig apply", "completion bash"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			if text, status := run(t, strings.Fields(args)...); status != 0 || !strings.Contains(text, "gpu-device-plugin") {
				t.Errorf("exit status %d, want 0 and the help:\n%s", status, text)
			}
		})
	}
}
