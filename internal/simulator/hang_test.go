package simulator

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
)

func TestHang(t *testing.T) {
	type call func(gpu nvml.Device, set nvml.EventSet) nvml.Return
	name := func(d nvml.Device, _ nvml.EventSet) nvml.Return { return second(d.GetName()) }
	wait := func(_ nvml.Device, s nvml.EventSet) nvml.Return { return second(s.Wait(1)) }
	for what, c := range map[string]struct {
		fault       Fault
		hangs, goes call
		answer      nvml.Return // of the call that hangs, once restored
	}{
		"one call":   {Fault{Call: "DeviceGetName"}, name, wait, nvml.SUCCESS},
		"one GPU":    {Fault{GPU: "0"}, name, wait, nvml.SUCCESS},
		"a wait":     {Fault{Call: "EventSetWait"}, wait, name, nvml.ERROR_TIMEOUT},
		"every call": {Fault{}, name, nil, nvml.SUCCESS},
	} {
		for end, answer := range map[string]nvml.Return{"restore": c.answer, "close": nvml.ERROR_UNKNOWN} {
			t.Run(what+" until "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n, lib := start(t, "dgx-h100")
					gpu := handle(t, lib, 0)
					set := listen(t, lib, gpu)
					inject(t, n, Fault{Kind: KindHang, GPU: c.fault.GPU, Call: c.fault.Call})
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
						inject(t, n, Fault{Kind: KindRestore, GPU: c.fault.GPU})
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
		inject(t, n, Fault{Kind: KindHang, Call: "EventSetWait"})
		time.Sleep(time.Minute)
		select {
		case ret := <-answer:
			t.Fatalf("Wait answered %v in spite of the hang", ret)
		default:
		}
		inject(t, n, Fault{Kind: KindRestore})
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
		time.AfterFunc(time.Second, func() { inject(t, n, Fault{Kind: KindXID, GPU: "0", XID: 31}) })
		began = time.Now()
		e, ret := set.Wait(5000)
		if ret != nvml.SUCCESS || e.EventData != 31 || time.Since(began) != time.Second {
			t.Errorf("Wait(5000) answered %v, %+v after %v", ret, e, time.Since(began))
		}
	})
}

func TestFailingCalls(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	one, two := handle(t, lib, 1), handle(t, lib, 2)
	inject(t, n, Fault{Kind: KindFail, GPU: "1", Call: "DeviceGetMemoryInfo", Return: "RESET_REQUIRED"})
	if _, ret := one.GetMemoryInfo(); ret != nvml.ERROR_RESET_REQUIRED {
		t.Errorf("the failing call answered %v", ret)
	}
	must(t, "another call", second(one.GetUUID()))
	must(t, "another GPU", second(two.GetMemoryInfo()))
	inject(t, n, Fault{Kind: KindFail, Call: "Init", Return: "UNKNOWN"})
	if ret := n.NVML().Init(); ret != nvml.ERROR_UNKNOWN {
		t.Errorf("Init answered %v", ret)
	}
	inject(t, n, Fault{Kind: KindRestore})
	must(t, "the call after restore", second(one.GetMemoryInfo()))
}

// TestCallsAreListed holds the list of calls that can hang or fail to the calls that the source makes known by name.
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
	if diff := cmp.Diff(want, calls); diff != "" {
		t.Errorf("calls (-source +list):\n%s", diff)
	}
}

// isCall reports whether a string has the form of a call's name.
func isCall(s string) bool {
	if s == "Init" || s == "Shutdown" {
		return true
	}
	return !strings.ContainsAny(s, " .%/:\"") && slices.ContainsFunc(
		[]string{"Device", "System", "EventSet", "GpuInstance", "ComputeInstance"},
		func(prefix string) bool { return strings.HasPrefix(s, prefix) && len(s) > len(prefix) })
}
