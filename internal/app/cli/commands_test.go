package cli_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// calls are the calls received at a control socket, as "NAME ARGUMENTS".
type calls struct {
	mu    sync.Mutex
	texts []string
}

func (c *calls) all() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.texts)
}

// answering serves a control socket until the test ends: the n-th call of a name gets the n-th
// answer, and further calls the last.
func answering(t *testing.T, answers map[string][]any) (socket string, came *calls) {
	t.Helper()
	folder := loopback.Folder(t)
	socket, came = filepath.Join(folder, "c.sock"), &calls{}
	serveAt(t, socket, answers, came)
	return socket, came
}

func serveAt(t *testing.T, socket string, answers map[string][]any, came *calls) {
	t.Helper()
	handlers := map[string]control.Handler{"there": func(context.Context, json.RawMessage) (any, error) {
		return nil, nil
	}}
	for name, all := range answers {
		times := 0
		handlers[name] = func(_ context.Context, arguments json.RawMessage) (any, error) {
			came.mu.Lock()
			defer came.mu.Unlock()
			came.texts = append(came.texts, name+" "+string(arguments))
			answer := all[min(times, len(all)-1)]
			times++
			if err, failed := answer.(error); failed {
				return nil, err
			}
			return answer, nil
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- control.NewServer(socket, handlers, nil).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	poll.Until(t, "the socket is answered", func() bool { return control.Call(ctx, socket, "there", nil, nil) == nil })
}

// subcommands returns the names of the commands that the help of a command lists.
func subcommands(t *testing.T, path []string) (names []string) {
	t.Helper()
	help, err := printed(t, append(slices.Clone(path), "--help")...)
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(help, "\nAvailable Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for line := range strings.Lines(list) {
		names = append(names, strings.Fields(line)[0])
	}
	return names
}

// TestUnknownCommands: each command and each group of commands refuses an argument that it does not
// know, by its name.
func TestUnknownCommands(t *testing.T) {
	files := []string{"claim check", "config check", "driver target", "simulate replay"} // their arguments
	commands := 0
	var check func(path []string)
	check = func(path []string) {
		commands++
		if !slices.Contains(files, strings.Join(path, " ")) {
			_, err := printed(t, append(slices.Clone(path), "mistyped")...)
			if err == nil || !strings.Contains(err.Error(), `unknown command "mistyped"`) {
				t.Errorf("%v mistyped: %v", path, err)
			}
		}
		for _, name := range subcommands(t, path) {
			check(append(slices.Clone(path), name))
		}
	}
	check(nil)
	if commands < 50 {
		t.Errorf("the help lists %d commands", commands)
	}
}

// TestCommandsThatAsk: the question of each command to the daemon, its output for the answer, and
// its errors.
func TestCommandsThatAsk(t *testing.T) {
	t.Parallel()
	plan := &layout.Planned{Layout: "a", Possible: true, GPUs: []layout.PlannedGPU{}}
	const planText = "Layout a is possible. It changes 0 of 0 GPUs.\n"
	const called = "GPU 3  H100  GPU-3\n  done\n"
	for name, test := range map[string]struct {
		args    string
		answers map[string][]any
		asked   []string
		prints  string
		fails   string
	}{
		"alive": {"alive", map[string][]any{daemon.CallAlive: {[]string{}}}, []string{"alive null"}, "alive\n", ""},
		"stuck": {"alive", map[string][]any{daemon.CallAlive: {[]string{"a", "b"}}}, []string{"alive null"}, "",
			"stuck: a; b"},
		"not asked right": {"alive", map[string][]any{daemon.CallAlive: {errors.New("no")}}, []string{"alive null"}, "",
			"no"},
		"ready": {"ready", map[string][]any{daemon.CallReady: {status.Readiness{Ready: true}}},
			[]string{`ready {"waitMilliseconds":0}`}, "ready\n", ""},
		"ready, with a reason": {"ready", map[string][]any{daemon.CallReady: {status.Readiness{Ready: true,
			Reason: "no GPUs"}}},
			[]string{`ready {"waitMilliseconds":0}`}, "ready: no GPUs\n", ""},
		"not ready": {"ready", map[string][]any{daemon.CallReady: {status.Readiness{Reason: "starting"}}},
			[]string{`ready {"waitMilliseconds":0}`}, "", "not ready: starting"},
		"quiesce": {"quiesce", map[string][]any{daemon.CallQuiesce: {nil}},
			[]string{`quiesce {"allocate":false}`},
			"driver released, and new pods get no GPU; to end this, run: gpu-device-plugin resume\n", ""},
		"quiesce, with pods": {"quiesce --allocate", map[string][]any{daemon.CallQuiesce: {nil}},
			[]string{`quiesce {"allocate":true}`},
			"driver released, and new pods get GPUs; to end this, run: gpu-device-plugin resume\n", ""},
		"quiesce, refused": {"quiesce", map[string][]any{daemon.CallQuiesce: {errors.New("no")}},
			[]string{`quiesce {"allocate":false}`}, "", "no"},
		"resume": {"resume", map[string][]any{daemon.CallResume: {nil}}, []string{"resume null"},
			"driver in use again\n", ""},
		"record stop": {"record stop", map[string][]any{daemon.CallRecordStop: {nil}}, []string{"record.stop null"},
			"recording stopped\n", ""},
		"health clear": {"health clear --gpu 3", map[string][]any{daemon.CallHealthClear: {nil}},
			[]string{`health.clear {"gpu":"3"}`}, "GPU 3: faults cleared\n", ""},
		"health clear of one": {"health clear", nil, nil, "", `required flag(s) "gpu" not set`},
		"MIG status": {"mig status", map[string][]any{daemon.CallMIGStatus: {daemon.MIGProgress{GPUs: []daemon.MIGGPU{{Index: 3, Model: "H100", UUID: "GPU-3", Phase: "done"}}}}},
			[]string{"mig.status null"}, "No layout is selected. GPUs stay unchanged.\n\n" + called, ""},
		"MIG status in YAML": {"mig status -o yaml",
			map[string][]any{daemon.CallMIGStatus: {daemon.MIGProgress{Layout: "a"}}}, []string{"mig.status null"},
			"gpus: null\nlayout: a\n", ""},
		"MIG status, refused": {"mig status", map[string][]any{daemon.CallMIGStatus: {errors.New("off")}},
			[]string{"mig.status null"}, "", "off"},
		"neither":             {"mig apply", nil, nil, "", "give either --layout, or --forget alone"},
		"both":                {"mig apply --layout a --forget", nil, nil, "", "give either --layout, or --forget alone"},
		"forget as a dry run": {"mig apply --forget --dry-run", nil, nil, "", "give either --layout, or --forget alone"},
		"forget of a GPU":     {"mig apply --forget --gpu 1", nil, nil, "", "give either --layout, or --forget alone"},
		"no GPU": {"mig apply --layout a --gpu=", nil, nil, "",
			"--gpu names no GPU: give an index or a UUID, or leave it out for all GPUs"},
		"apply, without a wait": {"mig apply --layout a --wait 0",
			map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Plan: plan,
				Again: 7}}}, []string{`mig.apply {"layout":"a"}`}, planText, ""},
		"apply, as a dry run": {"mig apply --layout a --gpu 1,GPU-2 --dry-run",
			map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Plan: plan}}},
			[]string{`mig.apply {"layout":"a","gpus":["1","GPU-2"],"dryRun":true}`}, planText, ""},
		"apply, impossible": {"mig apply --layout a",
			map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Plan: &layout.Planned{Layout: "a",
				GPUs: []layout.PlannedGPU{{Index: 4, Reason: "r"}, {Index: 5}}}}}},
			[]string{`mig.apply {"layout":"a"}`}, "", "layout a is not possible on GPU 4: the plan says why"},
		"apply, and wait": {"mig apply --layout a", map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Plan: plan,
			Again: 7}}, daemon.CallMIGStatus: {
			daemon.MIGProgress{Layout: "a", From: "mig apply", Again: 7, State: "success"},
		}}, []string{`mig.apply {"layout":"a"}`, "mig.status null"}, planText + "\nLayout a of mig apply: success\n", ""},
		"forget": {"mig apply --forget", map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Again: 7}},
			daemon.CallMIGStatus: {daemon.MIGProgress{Again: 7}}},
			[]string{`mig.apply {"forget":true}`, "mig.status null"}, "\nNo layout is selected. GPUs stay unchanged.\n", ""},
		"the plan for a program": {"mig apply --layout a -o json", map[string][]any{
			daemon.CallMIGApply: {daemon.OrderedMIG{Plan: plan, Again: 7}}, daemon.CallMIGStatus: {daemon.MIGProgress{Again: 7,
				State: "success"}},
		}, []string{`mig.apply {"layout":"a"}`, "mig.status null"},
			"{\n  \"layout\": \"a\",\n  \"possible\": true,\n  \"gpus\": []\n}\n", ""},
		"simulate list": {"simulate list", map[string][]any{daemon.CallSimulateList: {[]simulator.Status{
			{Index: 1, UUID: "GPU-1", BDF: "0000:01:00.0", Model: "h100", State: "present", Faults: []string{"a", "b"},
				MIG: []simulator.MIGStatus{{Index: 2, UUID: "MIG-1", Profile: "1g", GI: 3, CI: 4}}},
		}}}, []string{"simulate.list null"}, "GPU   UUID    BDF            MODEL    STATE     FAULTS\n" +
			"1     GPU-1   0000:01:00.0   h100     present   a; b\n1:2   MIG-1   GI 3, CI 4     MIG 1g             \n", ""},
		"simulate list, of real GPUs": {"simulate list",
			map[string][]any{daemon.CallSimulateList: {errors.New("not simulated")}}, []string{"simulate.list null"}, "",
			"not simulated"},
		"status of nothing": {"status -o yaml", map[string][]any{daemon.CallStatus: {status.Status{Version: "v1"}}},
			[]string{"status {}"}, "gpus: null\nresources: null\nversion: v1\n", ""},
		"status, refused": {"status", map[string][]any{daemon.CallStatus: {errors.New("no")}},
			[]string{"status {}"}, "", "no"},
		"status with holders": {"status --holders -o yaml",
			map[string][]any{daemon.CallStatus: {status.Status{Version: "v1"}}},
			[]string{`status {"holders":true}`}, "gpus: null\nresources: null\nversion: v1\n", ""},
		"a watch in YAML": {"status --watch -o yaml", nil, nil, "", "--watch prints no YAML: give -o json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			socket, came := answering(t, test.answers)
			got, err := printed(t, append(strings.Fields(test.args), "--control-socket", socket)...)
			if problem := fmt.Sprint(err); problem != test.fails && (err != nil || test.fails != "") {
				t.Errorf("it fails with %q, want %q", problem, test.fails)
			}
			if name != "apply, impossible" {
				if diff := cmp.Diff(test.prints, got); diff != "" {
					t.Errorf("it prints (-want +got):\n%s", diff)
				}
			}
			if diff := cmp.Diff(test.asked, came.all()); diff != "" {
				t.Errorf("it asks (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMissingArguments: the error names the missing argument and the usage.
func TestMissingArguments(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"config check":     "config check needs a file: gpu-device-plugin config check FILE",
		"config check a b": "config check needs a file and no more arguments: gpu-device-plugin config check FILE",
		"claim check":      "claim check needs a file: gpu-device-plugin claim check FILE...",
		"simulate replay":  "simulate replay needs a recording: gpu-device-plugin simulate replay PATH",
	} {
		if _, err := printed(t, strings.Fields(args)...); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}

// TestFaultsAsCommands: each flag reaches the daemon, and an optional number is sent only if given.
func TestFaultsAsCommands(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"xid --gpu 3 --xid 79":                                     `{"kind":"xid","gpu":"3","xid":79}`,
		"xid --gpu 3 --xid 79 --gi 0 --ci 1 --action reset":        `{"kind":"xid","gpu":"3","xid":79,"gi":0,"ci":1,"action":"reset"}`,
		"logged-xid --gpu 3 --xid 79 --count 2":                    `{"kind":"logged-xid","gpu":"3","xid":79,"count":2}`,
		"event --gpu 1 --event double-bit-ecc":                     `{"kind":"event","gpu":"1","event":"double-bit-ecc"}`,
		"restore":                                                  `{"kind":"restore"}`,
		"mig --gpu 0 --profile 1g.10gb --profile 2g.20gb":          `{"kind":"mig","gpu":"0","profiles":["1g.10gb","2g.20gb"]}`,
		"slow --gpu 0 --call DeviceGetName --count 3 --delay 20ms": `{"kind":"slow","gpu":"0","call":"DeviceGetName","count":3,"delay":"20ms"}`,
		"fail --call Init --return UNKNOWN":                        `{"kind":"fail","call":"Init","return":"UNKNOWN"}`,
		"answer --gpu 0 --call DeviceGetName --value x":            `{"kind":"answer","gpu":"0","call":"DeviceGetName","value":"x"}`,
		"fabric --gpu 0 --state in-progress --return UNKNOWN":      `{"kind":"fabric","gpu":"0","return":"UNKNOWN","state":"in-progress"}`,
		"nvlink --gpu 0":                                           `{"kind":"nvlink","gpu":"0"}`,
		"nvlink --gpu 0 --link 0":                                  `{"kind":"nvlink","gpu":"0","link":0}`,
		"driver --driver missing":                                  `{"kind":"driver","driver":"missing"}`,
		"processes --gpu 0:1 --count 1":                            `{"kind":"processes","gpu":"0:1","count":1}`,
		"recovery-action --gpu 0 --action reboot":                  `{"kind":"recovery-action","gpu":"0","action":"reboot"}`,
		"hang --gpu GPU-0 --call EventSetWait --count 1":           `{"kind":"hang","gpu":"GPU-0","call":"EventSetWait","count":1}`,
		"persistence --gpu 0 --state off":                          `{"kind":"persistence","gpu":"0","state":"off"}`,
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			socket, came := answering(t, map[string][]any{daemon.CallSimulateInject: {nil}})
			got, err := printed(t, append(append([]string{"simulate"}, strings.Fields(args)...), "--control-socket",
				socket)...)
			kind, _, _ := strings.Cut(args, " ")
			if err != nil || !strings.HasSuffix(got, ": "+kind+" simulated\n") && got != "the node: faults removed\n" {
				t.Fatalf("it prints %q: %v", got, err)
			}
			if diff := cmp.Diff([]string{daemon.CallSimulateInject + " " + want}, came.all()); diff != "" {
				t.Errorf("it asks (-want +got):\n%s", diff)
			}
		})
	}
}

// TestControlSocketOfTheEnvironment: commands and the daemon read the same variable; an empty
// variable has no effect.
func TestControlSocketOfTheEnvironment(t *testing.T) {
	for value, want := range map[string]string{"/nowhere/c.sock": "/nowhere/c.sock", "": config.DefaultControlSocket} {
		t.Setenv("CONTROL_SOCKET", value)
		if help, err := printed(t, "alive", "--help"); err != nil || !strings.Contains(help, `(default "`+want+`")`) {
			t.Errorf("with %q: %v\n%s", value, err, help)
		}
	}
}

// TestMIGIsWaitedFor: changes of the progress are printed, pending states only after a second, and
// states of an earlier order never.
func TestMIGIsWaitedFor(t *testing.T) {
	const poll = 200 * time.Millisecond // how often the daemon is asked
	pending := daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "pending", Reason: "GPU 0: in use"}
	for name, test := range map[string]struct {
		statuses []any
		most     time.Duration
		prints   string
		fails    string
		took     time.Duration
	}{
		"made at once": {[]any{daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "success"}}, time.Minute,
			"\nLayout a of b: success\n", "", 0},
		"a later order": {[]any{daemon.MIGProgress{Layout: "a", From: "b", Again: 8, State: "success"}}, time.Minute,
			"\nLayout a of b: success\n", "", 0},
		"forgotten": {[]any{daemon.MIGProgress{Again: 7}}, time.Minute,
			"\nNo layout is selected. GPUs stay unchanged.\n", "", 0},
		"an earlier one": {[]any{daemon.MIGProgress{Layout: "a", Again: 6, State: "failed"},
			daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "success"}}, time.Minute, "\nLayout a of b: success\n",
			"", poll},
		"it cannot be": {[]any{daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "failed", Reason: "r"}},
			time.Minute, "\nLayout a of b: failed: r\n", "layout a is not made: mig status says how each GPU is", 0},
		"quickly": {[]any{pending, pending, daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "success"}},
			time.Minute, "\nLayout a of b: success\n", "", 2 * poll},
		"never": {[]any{pending}, time.Minute, "\nLayout a of b: pending: GPU 0: in use\n",
			"layout not applied after 1m0s: the daemon keeps trying; check progress with: gpu-device-plugin mig status",
			time.Minute},
		"after a reset": {[]any{daemon.MIGProgress{Layout: "a", From: "b", Again: 7, State: "rebooting"},
			daemon.MIGProgress{Again: 7, State: "success", Layout: "a",
				From: "b"}}, time.Minute, "\nLayout a of b: rebooting\n\nLayout a of b: success\n", "", poll},
		"a short wait": {[]any{pending}, 700 * time.Millisecond, "\nLayout a of b: pending: GPU 0: in use\n",
			"layout not applied after 700ms: the daemon keeps trying; check progress with: gpu-device-plugin mig status",
			700 * time.Millisecond},
		"a daemon's error": {[]any{pending, errors.New("no")}, time.Minute, "", "no", poll},
	} {
		t.Run(name, func(t *testing.T) {
			socket, _ := answering(t, map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Again: 7}},
				daemon.CallMIGStatus: test.statuses})
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				got, err := printed(t, "mig", "apply", "--forget", "--wait", test.most.String(), "--control-socket", socket)
				if problem := fmt.Sprint(err); problem != test.fails && (err != nil || test.fails != "") {
					t.Errorf("it fails with %q, want %q", problem, test.fails)
				}
				if diff := cmp.Diff(test.prints, got); diff != "" {
					t.Errorf("it prints (-want +got):\n%s", diff)
				}
				if took := time.Since(began); took != test.took {
					t.Errorf("it took %v, want %v", took, test.took)
				}
			})
		})
	}
	socket, _ := answering(t, map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{Again: 7}},
		daemon.CallMIGStatus: {daemon.MIGProgress{Again: 6}}})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := cli.DevicePlugin().Execute(ctx, "gpu-device-plugin", []string{"mig", "apply", "--forget",
			"--control-socket", socket}, io.Discard)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a wait that was ended: %v", err)
		}
	})
}

// TestReadyIsWaitedFor: the wait includes the start of the daemon, and takes at most the given time
// and 20 s.
func TestReadyIsWaitedFor(t *testing.T) {
	socket, came := answering(t, map[string][]any{daemon.CallReady: {status.Readiness{Ready: true}}})
	for wait, want := range map[string]string{"0s": "0", "1500ms": "1500", "20s": "20000", "1h": "20000"} {
		came.texts = nil
		synctest.Test(t, func(t *testing.T) { // no time passes
			if _, err := printed(t, "ready", "--wait", wait, "--control-socket", socket); err != nil {
				t.Error(err)
			}
		})
		if diff := cmp.Diff([]string{`ready {"waitMilliseconds":` + want + `}`}, came.all()); diff != "" {
			t.Errorf("--wait %s asks (-want +got):\n%s", wait, diff)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		nowhere := filepath.Join(t.TempDir(), "c.sock")
		began := time.Now()
		if _, err := printed(t, "ready", "--wait=10s", "--control-socket", nowhere); !errors.Is(err,
			control.ErrNoDaemon) || time.Since(began) != 10*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := cli.DevicePlugin().Execute(ctx, "gpu-device-plugin", []string{"ready", "--wait=10s", "--control-socket",
			nowhere}, io.Discard)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a wait that was ended: %v", err)
		}
	})
	late := filepath.Join(filepath.Dir(socket), "late.sock")
	answer := make(chan error, 1)
	go func() {
		_, err := printed(t, "ready", "--wait=20s", "--control-socket", late)
		answer <- err
	}()
	serveAt(t, late, map[string][]any{daemon.CallReady: {status.Readiness{Ready: true}}}, &calls{})
	if err := <-answer; err != nil {
		t.Errorf("of a daemon that comes later: %v", err)
	}
}

// TestOutputFormats: each command has its formats, and the first is the one for people.
func TestOutputFormats(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"doctor": "table|yaml|json", "mig status": "text|yaml|json", "mig export": "yaml|json",
		"status": "table|yaml|json|wide", "plan": "table|yaml|json|classes", "topology": "matrix|json|dot",
	} {
		words := strings.Fields(command)
		first, _, _ := strings.Cut(want, "|")
		help, err := printed(t, append(words, "--help")...)
		if err != nil || !strings.Contains(help, "--output "+want+" ") || !strings.Contains(help, "(default "+first+")") {
			t.Errorf("%s --help: %v\n%s", command, err, help)
		}
		formats := strings.ReplaceAll(want, "|", ", ")
		_, err = printed(t, append(words, "-o", "xml")...)
		if err == nil || !strings.Contains(err.Error(), `unknown output "xml": give `) ||
			!strings.Contains(strings.ReplaceAll(err.Error(), " or ", ", "), formats) {
			t.Errorf("%s -o xml: %v", command, err)
		}
	}
}

// TestOneDash: one dash becomes two before a flag of the command with more than one letter, and
// before nothing else.
func TestOneDash(t *testing.T) {
	for args, want := range map[string]string{
		"-mig-strategy=some":                     "--mig-strategy",
		"-mig-strategy some":                     "--mig-strategy",
		"mps-control-daemon -mig-strategy=some":  "--mig-strategy",
		"gpu-feature-discovery -oneshot -some":   "-some",
		"-oneshot":                               "-oneshot",
		"plan -oneshot":                          `"neshot" for "-o, --output"`,
		"-no-such-flag status -":                 "-no-such-flag",
		"--mig-strategy=none -v 2 -v=2 -no-such": "-no-such",
	} {
		given := strings.Fields(args)
		_, err := printed(t, given...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Join(given, " ") != args {
			t.Errorf("%s: %v, want %s; the arguments are %v", args, err, want, given)
		}
	}
}

// TestDoctorOfADaemon: what doctor says of a daemon that answers, one that does not, and one that
// cannot be asked.
func TestDoctorOfADaemon(t *testing.T) {
	t.Parallel()
	socket, _ := answering(t, map[string][]any{daemon.CallStatus: {errors.New("no")}})
	fine, _ := answering(t, map[string][]any{daemon.CallStatus: {status.Status{Version: "v1"}}})
	for socket, want := range map[string]string{
		socket:            "warning: The daemon does not tell its status: no",
		fine:              "ok: ",
		"/nowhere/c.sock": "not checked: No daemon answers at /nowhere/c.sock: ",
		"":                "not checked: The daemon has no control socket: --control-socket is empty",
	} {
		text, err := printed(t, "doctor", "--simulate=t4", "--kubelet-socket=", "--pod-resources-socket=", "-o", "json",
			"--control-socket", socket)
		if exit := cli.ExitStatus(0); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		var report struct {
			Findings []struct{ Check, Severity, Message string }
		}
		if err := json.Unmarshal([]byte(text), &report); err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, f := range report.Findings {
			if f.Check == "daemon" {
				got += f.Severity + ": " + f.Message
			}
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%q: %s, want %s", socket, got, want)
		}
	}
}

// TestChoiceByALabel: if a label of the node chooses the file, commands use the running daemon's
// file, unless a file is named.
func TestChoiceByALabel(t *testing.T) {
	t.Setenv("CONFIG_FILE", "")
	socket, came := answering(t, map[string][]any{daemon.CallStatus: {status.Status{ConfigFile: excluding(t)}}})
	other := filepath.Join(t.TempDir(), "other.yaml")
	if err := os.WriteFile(other, []byte("version: v1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, chosen := range map[string]bool{
		"--node-config-dir=/configs":                        true,
		"--node-config-dir=/configs --config-file=" + other: false,
		"": false,
	} {
		asked := len(came.all())
		text, err := printed(t, append(strings.Fields("plan --simulate=t4 "+args), "--control-socket", socket)...)
		if err != nil || strings.Contains(text, "it is excluded by") != chosen || (len(came.all()) > asked) != chosen {
			t.Errorf("%s: %v, and it asks %v:\n%s", args, err, came.all()[asked:], text)
		}
	}
}

// TestContainerIsChecked: by the variable of this process, which is not in a container with GPUs.
func TestContainerIsChecked(t *testing.T) {
	for visible, test := range map[string]struct{ args, prints, fails string }{
		"GPU-a,GPU-b": {"--devices 2 --simulated", "devices: GPU-a, GPU-b; device nodes: ", ""},
		"GPU-a":       {"--devices 2 --simulated", "", "the container requested 2 devices and got others"},
		"all":         {"", "", "no devices were allocated for this container"},
	} {
		t.Setenv("NVIDIA_VISIBLE_DEVICES", visible)
		got, err := printed(t, append([]string{"check-container"}, strings.Fields(test.args)...)...)
		if !strings.HasPrefix(got, test.prints) || (err == nil) != (test.fails == "") ||
			err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%s: %q, %v", visible, got, err)
		}
	}
}

// helpOn returns the help of a command in a terminal.
func helpOn(t *testing.T, columns int, command string) string {
	t.Helper()
	device := newScreen(t, uint16(columns))
	if err := cli.DevicePlugin().Execute(t.Context(), "gpu-device-plugin", append(strings.Fields(command), "--help"),
		device.File); err != nil {
		t.Fatal(err)
	}
	return device.text()
}

// TestHelpFitsTheTerminal: lines about flags have at most the columns of the terminal, and nothing is
// lost. Without a terminal each flag has one line.
func TestHelpFitsTheTerminal(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"", "doctor", "status", "simulate xid"} {
		plain, err := printed(t, append(strings.Fields(command), "--help")...)
		if err != nil {
			t.Fatal(err)
		}
		help := helpOn(t, 80, command)
		_, flags, _ := strings.Cut(help, "\nFlags:\n")
		for line := range strings.Lines(flags) {
			if columns := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); columns > 80 {
				t.Errorf("%s --help has %d columns: %s", command, columns, line)
			}
		}
		if strings.Join(strings.Fields(plain), "") != strings.Join(strings.Fields(help), "") {
			t.Errorf("%s --help differs in a terminal:\n%s\nwithout:\n%s", command, help, plain)
		}
		if strings.Count(help, "\n") <= strings.Count(plain, "\n") {
			t.Errorf("%s --help is not wrapped:\n%s", command, help)
		}
	}
	plain, err := printed(t, "doctor", "--help")
	if err != nil {
		t.Fatal(err)
	}
	widest := 0
	for line := range strings.Lines(plain) {
		widest = max(widest, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
	}
	for columns, same := range map[int]bool{0: true, widest: true, widest - 1: false} {
		if help := helpOn(t, columns, "doctor"); (help == plain) != same {
			t.Errorf("in %d columns, of which it needs %d:\n%s", columns, widest, help)
		}
	}
	const ignored = "\nOther flags of the daemon are accepted and have no effect.\n"
	if help := helpOn(t, 20, "doctor"); !strings.Contains(help, "\n  gpu-device-plugin doctor [flags]\n") ||
		!strings.HasSuffix(help, ignored) || strings.Contains(helpOn(t, 80, "status"), ignored) {
		t.Errorf("what is no flag, in 20 columns:\n%s", help)
	}
}
