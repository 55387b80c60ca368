package field_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// hostile is a text that changes a terminal, and would look like a line of its own.
const hostile = "H100\x1b[2J\x1b]0;title\a\u202e\u009b31m\nready: forged\r\tcell"

// harmless fails the test if an output changes a terminal or has the forged line.
func harmless(t *testing.T, what, text string) {
	t.Helper()
	bad := func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.In(r, unicode.Bidi_Control)
	}
	if strings.ContainsFunc(text, bad) || strings.Contains(text, "\nready: forged") || !strings.Contains(text, "H100") {
		t.Errorf("%s prints %q", what, text)
	}
}

// TestTextsOfOthers: nothing that a driver, a daemon or a file says changes the terminal of an
// operator or forges a line (E8).
func TestTextsOfOthers(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(loopback.Folder(t), "c.sock")
	gpu := status.Device{Index: "0", UUID: "GPU-1", Model: hostile, PCI: hostile, State: "Unhealthy", Reason: hostile}
	s := status.Status{
		Version: hostile, Driver: hostile, GPUs: []status.Device{gpu}, Warnings: []string{hostile}, LeftOut: []string{hostile}, ConfigError: hostile,
		Resources: []status.Resource{{Name: hostile, Devices: 1}}, Holders: []status.Holder{{Device: "GPU-1", Pod: hostile,
			Container: hostile}},
		Readiness: status.Readiness{Ready: true, Reason: hostile},
	}
	planned := layout.Planned{Layout: hostile, Warnings: []string{hostile},
		GPUs: []layout.PlannedGPU{{Model: hostile, Reason: hostile}}}
	answer := func(value any) control.Handler {
		return func(context.Context, json.RawMessage) (any, error) { return value, nil }
	}
	fail := func(context.Context, json.RawMessage) (any, error) { return nil, errors.New(hostile) }
	server := control.NewServer(socket, map[string]control.Handler{
		daemon.CallStatus: answer(s), daemon.CallReady: answer(s.Readiness), daemon.CallAlive: answer([]string{hostile}),
		daemon.CallMIGStatus: answer(daemon.MIGProgress{Layout: hostile,
			GPUs: []daemon.MIGGPU{{Model: hostile, Phase: hostile}}}),
		daemon.CallMIGApply: answer(daemon.OrderedMIG{Plan: &planned}), daemon.CallQuiesce: fail, daemon.CallRecordStart: answer(daemon.RecordAnswer{Dir: hostile}),
		daemon.CallSimulateList: answer([]simulator.Status{{Model: hostile, Faults: []string{hostile}}}),
	}, map[string]control.Stream{
		daemon.CallReset: func(_ context.Context, _ json.RawMessage, send func(any) error) error {
			return errors.Join(send(daemon.ResetProgress{Text: hostile}), errors.New(hostile))
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	poll.Until(t, "the server answers", func() bool { return control.Call(ctx, socket, daemon.CallAlive, nil, nil) == nil })
	for _, args := range []string{
		"status", "status -o wide", "status -o json", "status -o yaml", "ready", "alive", "mig status", "mig apply --layout a --dry-run", "quiesce",
		"record start", "simulate list", "reset --gpu 0", "doctor",
	} {
		text, _ := run(t, append(strings.Fields(args), "--control-socket", socket)...)
		harmless(t, args, text)
	}

	folder := t.TempDir()
	quoted := strconv.QuoteToASCII(strings.ReplaceAll(hostile, "\a", "")) // without an escape that JSON lacks
	quoted = strings.ReplaceAll(quoted, `\x`, `\u00`)
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	layouts := write("layouts.yaml", "version: v1\nmig-configs:\n  "+quoted+
		": [{devices: all, mig-enabled: false}]\n  a: [{devices: all, mig-enabled: true, mig-devices: {}}]\n")
	text, _ := run(t, "mig", "plan", "--simulate=dgx-h100", "--config", layouts, "--layout",
		strings.ReplaceAll(hostile, "\a", ""))
	harmless(t, "mig plan", text)
	text, _ = run(t, "mig", "plan", "--simulate=dgx-h100", "--config", layouts, "--layout", "none")
	harmless(t, "mig plan of another layout", text)
	recorded, err := os.ReadFile("../../internal/report/recording/testdata/dgx-h100-xid-79.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	header, _, _ := strings.Cut(string(recorded), "\n")
	failed := `{"at":"2000-01-01T00:00:00Z","call":"Open","error":{"text":` + quoted + `}}`
	recording := write("recording.jsonl", strings.Replace(header, `"simulated"`, quoted, 1)+"\n"+failed+"\n")
	text, _ = run(t, "simulate", "replay", recording)
	harmless(t, "simulate replay", text)
	text, _ = run(t, "config", "check", write("config.yaml", "version: v1\nflags: {migStrategy: "+quoted+"}\n"))
	harmless(t, "config check", text)
}
