package simulator_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestHang(t *testing.T) {
	type call func(gpu nvml.Device, set nvml.EventSet) nvml.Return
	name := func(d nvml.Device, _ nvml.EventSet) nvml.Return { return second(d.GetName()) }
	wait := func(_ nvml.Device, s nvml.EventSet) nvml.Return { return second(s.Wait(1)) }
	for what, c := range map[string]struct {
		fault       simulator.Fault
		hangs, goes call
		answer      nvml.Return // of the call that hangs, once restored
	}{
		"one call":   {simulator.Fault{Call: "DeviceGetName"}, name, wait, nvml.SUCCESS},
		"one GPU":    {simulator.Fault{GPU: "0"}, name, wait, nvml.SUCCESS},
		"a wait":     {simulator.Fault{Call: "EventSetWait"}, wait, name, nvml.ERROR_TIMEOUT},
		"every call": {simulator.Fault{}, name, nil, nvml.SUCCESS},
	} {
		for end, answer := range map[string]nvml.Return{"restore": c.answer, "close": nvml.ERROR_UNKNOWN} {
			t.Run(what+" until "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n, lib := start(t, "dgx-h100")
					gpu := handle(t, lib, 0)
					set := listen(t, lib, gpu)
					inject(t, n, simulator.Fault{Kind: simulator.KindHang, GPU: c.fault.GPU, Call: c.fault.Call})
					if c.goes != nil {
						_ = c.goes(gpu, set) // the test ends in a deadlock if it hangs
					}
					answers := make(chan nvml.Return, 1)
					go func() { answers <- c.hangs(gpu, set) }()
					time.Sleep(time.Hour)
					select {
					case ret := <-answers:
						t.Fatalf("the call answered %v in spite of the hang", ret)
					default:
					}
					if end == "close" {
						n.Close()
					} else {
						inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: c.fault.GPU})
					}
					if ret := <-answers; ret != answer {
						t.Errorf("after the hang the call answered %v, want %v", ret, answer)
					}
				})
			})
		}
	}
}

func TestWaitThatHangsHalfway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, lib := start(t, "dgx-h100")
		set := listen(t, lib, handle(t, lib, 0))
		answer := make(chan nvml.Return, 1)
		go func() { answer <- second(set.Wait(1000)) }()
		synctest.Wait()
		inject(t, n, simulator.Fault{Kind: simulator.KindHang, Call: "EventSetWait"})
		time.Sleep(time.Minute)
		select {
		case ret := <-answer:
			t.Fatalf("Wait answered %v in spite of the hang", ret)
		default:
		}
		inject(t, n, simulator.Fault{Kind: simulator.KindRestore})
		if ret := <-answer; ret != nvml.ERROR_TIMEOUT {
			t.Errorf("Wait answered %v after the hang", ret)
		}
	})
}

func TestWaitTakesItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, lib := start(t, "dgx-h100")
		set := listen(t, lib, handle(t, lib, 0))
		began := time.Now()
		if _, ret := set.Wait(250); ret != nvml.ERROR_TIMEOUT || time.Since(began) != 250*time.Millisecond {
			t.Errorf("Wait(250) answered %v after %v", ret, time.Since(began))
		}
		time.AfterFunc(time.Second,
			func() { inject(t, n, simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31}) })
		began = time.Now()
		e, ret := set.Wait(5000)
		if ret != nvml.SUCCESS || e.EventData != 31 || time.Since(began) != time.Second {
			t.Errorf("Wait(5000) answered %v, %+v after %v", ret, e, time.Since(began))
		}
	})
}

// TestSlowCalls has calls take longer: on two of three GPUs, the next ones only, and alone by name.
func TestSlowCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, lib := start(t, "dgx-h100")
		gpus := []nvml.Device{handle(t, lib, 0), handle(t, lib, 1), handle(t, lib, 2)}
		set := listen(t, lib, gpus...)
		took := func(what string, want time.Duration, call func()) {
			t.Helper()
			began := time.Now()
			if call(); time.Since(began) != want {
				t.Errorf("%s took %v, want %v", what, time.Since(began), want)
			}
		}
		name := func(gpu int) func() { return func() { must(t, "GetName", second(gpus[gpu].GetName())) } }
		inject(t, n, simulator.Fault{Kind: simulator.KindSlow, GPU: "1", Delay: "45s", Count: 2})
		inject(t, n, simulator.Fault{Kind: simulator.KindSlow, GPU: "2", Call: "DeviceGetName", Delay: "20ms"})
		took("a call on another GPU", 0, name(0))
		took("another call", 0, func() { must(t, "GetUUID", second(gpus[2].GetUUID())) })
		for range 3 {
			took("a call that is always slow", 20*time.Millisecond, name(2))
		}
		took("the first slow call", 45*time.Second, name(1))
		inject(t, n, simulator.Fault{Kind: simulator.KindSlow, Delay: "1s"})
		took("the second, with all calls slow", 46*time.Second, name(1))
		took("the next", time.Second, name(1))
		took("getting a handle", time.Second, func() { handle(t, lib, 2) })
		took("a wait", 1250*time.Millisecond, func() { _, _ = set.Wait(250) })
		time.AfterFunc(time.Second/2, func() { inject(t, n, simulator.Fault{Kind: simulator.KindRestore}) })
		took("a call that is restored", time.Second/2, name(0))
		took("a call afterwards", 0, name(1))
	})
}

// TestCountedHang has only the next call hang.
func TestCountedHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, lib := start(t, "dgx-h100")
		gpu := handle(t, lib, 3)
		inject(t, n, simulator.Fault{Kind: simulator.KindHang, GPU: "3", Count: 1})
		answered := make(chan nvml.Return, 1)
		go func() { answered <- second(gpu.GetName()) }()
		time.Sleep(time.Hour)
		must(t, "the call after the one that hangs", second(gpu.GetName()))
		if faults := n.List()[3].Faults; !slices.Equal(faults, []string{"every call hangs, 0 times more"}) {
			t.Errorf("the faults are %q", faults)
		}
		select {
		case ret := <-answered:
			t.Fatalf("the call answered %v in spite of the hang", ret)
		default:
		}
		inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		must(t, "the call that hung", <-answered)
	})
}

// TestPersistence has GPUs forget what a driver without users forgets.
func TestPersistence(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	inject(t, n, simulator.Fault{Kind: simulator.KindPersistence, GPU: "1", State: "off"})
	for gpu, want := range []nvml.EnableState{nvml.FEATURE_ENABLED, nvml.FEATURE_DISABLED} {
		d := handle(t, lib, gpu)
		if mode, ret := d.GetPersistenceMode(); mode != want || ret != nvml.SUCCESS {
			t.Errorf("GPU %d has persistence mode %v, %v", gpu, mode, ret)
		}
		must(t, "SetComputeMode", d.SetComputeMode(nvml.COMPUTEMODE_PROHIBITED))
		inject(t, n, simulator.Fault{Kind: simulator.KindECC, GPU: uuid(t, d)})
	}
	other := open(t, n)
	must(t, "Shutdown", lib.Shutdown())
	if mode, _ := handle(t, other, 1).GetComputeMode(); mode != nvml.COMPUTEMODE_PROHIBITED {
		t.Errorf("GPU 1 forgot its compute mode while it had a user")
	}
	must(t, "Shutdown", other.Shutdown())
	lib = open(t, n)
	for gpu, kept := range []bool{true, false} {
		d := handle(t, lib, gpu)
		mode, _ := d.GetComputeMode()
		count, _ := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		if (mode == nvml.COMPUTEMODE_PROHIBITED) != kept || (count == 1) != kept {
			t.Errorf("GPU %d came back with compute mode %v and %d memory errors", gpu, mode, count)
		}
	}
}

func TestFailingCalls(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	one, two := handle(t, lib, 1), handle(t, lib, 2)
	inject(t, n, simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetMemoryInfo",
		Return: "RESET_REQUIRED"})
	if _, ret := one.GetMemoryInfo(); ret != nvml.ERROR_RESET_REQUIRED {
		t.Errorf("the failing call answered %v", ret)
	}
	must(t, "another call", second(one.GetUUID()))
	must(t, "another GPU", second(two.GetMemoryInfo()))
	inject(t, n, simulator.Fault{Kind: simulator.KindFail, Call: "Init", Return: "UNKNOWN"})
	if ret := n.NVML().Init(); ret != nvml.ERROR_UNKNOWN {
		t.Errorf("Init answered %v", ret)
	}
	inject(t, n, simulator.Fault{Kind: simulator.KindRestore})
	must(t, "the call after restore", second(one.GetMemoryInfo()))
}

// TestCallsAreListed holds the list of calls that can hang or fail to the calls that the source
// makes known by name.
func TestCallsAreListed(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "zz_") {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(node ast.Node) bool {
			if list, ok := node.(*ast.ValueSpec); ok && list.Names[0].Name == "calls" {
				return false
			}
			if lit, ok := node.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, _ := strconv.Unquote(lit.Value); isCall(s) {
					named[s] = true
				}
			}
			return true
		})
	}
	var want []string
	for name := range named {
		want = append(want, name)
	}
	slices.Sort(want)
	n, _ := start(t, "t4")
	err = n.Inject(simulator.Fault{Kind: simulator.KindHang, Call: "Unknown"})
	if err == nil {
		t.Fatal("a call that is not known hangs")
	}
	_, list, _ := strings.Cut(err.Error(), "give one of ")
	list, _, _ = strings.Cut(list, ", or none")
	if diff := cmp.Diff(want, strings.Split(list, ", ")); diff != "" {
		t.Errorf("calls (-source +list):\n%s", diff)
	}
}

// isCall reports whether a string has the form of a call's name.
func isCall(s string) bool {
	if s == "Init" || s == "Shutdown" {
		return true
	}
	return !strings.ContainsAny(s, " .%/:\"") && slices.ContainsFunc(
		[]string{"Device", "System", "EventSet", "GpuInstance", "ComputeInstance", "Gpm"},
		func(prefix string) bool { return strings.HasPrefix(s, prefix) && len(s) > len(prefix) })
}
