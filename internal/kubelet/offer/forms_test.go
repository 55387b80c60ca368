package offer_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

func TestAGPUThatAPodHoldsIsNotGivenInAnotherForm(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		to     config.Config
		name   string // of the resource after it
		suffix []string
	}{
		"shared":                    {to: shared(""), name: gpu, suffix: []string{"::0", "::1"}},
		"shared under another name": {to: shared(gpu + ".shared"), name: gpu + ".shared", suffix: []string{"::0", "::1"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, true)
			n.start(t)
			n.await(t, "GPU-0 GPU-1 | ", gpu)
			held := n.admit(t, "p", gpu)
			free := "GPU-" + other(held)
			n.clock.Step(20 * time.Second) // it was given long ago
			n.configs.Publish(test.to)
			ids := func(device string) string {
				var all []string
				for _, s := range test.suffix {
					all = append(all, device+s)
				}
				return strings.Join(all, " ")
			}
			both := []string{gpu}
			if test.name != gpu {
				both = append(both, test.name)
			}
			// The GPU that nobody holds changes at once, before the clock moves. Under the same
			// name, it has no more devices at first than before.
			if test.name == gpu {
				n.await(t, listed([]string{held, free + "::0"}, append(strings.Fields(ids(held)), free, free+"::1")), gpu)
				n.clock.Step(time.Second)
			}
			n.await(t, listed(append(strings.Fields(ids(free)), held), append(strings.Fields(ids(held)), free)), both...)
			r, _ := n.daemon.Offered().Value().Resource(test.name)
			d, _ := r.Device(held + "::0")
			if want := "its GPU may still be in use as nvidia.com/gpu " + held + " (pod default/p holds it)"; d.Healthy ||
				d.Reason != want {
				t.Errorf("the device is Healthy %v with reason %q, want %q", d.Healthy, d.Reason, want)
			}
			for range 2 { // so many replicas are free
				n.admit(t, fmt.Sprint("other", n.Mark()), test.name)
			}
			var refused *standin.PodError
			if _, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: test.name,
				Count: 1}); !errors.As(err, &refused) {
				t.Errorf("a third pod was admitted: %v", err)
			}
			n.pass(t, 100)
			if got := n.health(both...); strings.Contains(strings.Split(got, "|")[0], held+"::") {
				t.Errorf("kubelet lists %s while the pod holds the GPU", got)
			}
			n.Remove("p")
			n.until(t, ids("GPU-0")+" "+ids("GPU-1")+" | ", both...)
		})
	}
}

func TestAWholeGPUAndItsMIGDevicesWaitForEachOther(t *testing.T) {
	t.Parallel()
	const mig = "nvidia.com/mig-1g.10gb"
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	if n.admit(t, "p", gpu) != "GPU-0" {
		n.admit(t, "p0", gpu)
	}
	n.clock.Step(20 * time.Second)
	n.snapshots.Publish(partitioned())
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.pass(t, 60)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.Remove("p")
	n.Remove("p0")
	n.until(t, "GPU-1 MIG-0 | ", gpu, mig)
	n.admit(t, "q", mig)
	n.clock.Step(20 * time.Second)
	back := gpus()
	back.Generation = 3
	n.snapshots.Publish(back)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.pass(t, 60)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.Remove("q")
	n.until(t, "GPU-0 GPU-1 | ", gpu, mig)
}

// Kubelet asks for a device, and for that of another plugin after it, before it says anywhere that
// a pod holds it.
func TestAGPUThatKubeletHasJustAskedForWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	id := n.admit(t, "p", gpu)
	n.Remove("p") // as if kubelet did not say so yet
	n.configs.Publish(shared(""))
	free := "GPU-" + other(id)
	n.await(t, listed([]string{free + "::0", id}, []string{free, free + "::1", id + "::0", id + "::1"}), gpu)
	n.clock.Step(time.Second)
	n.await(t, listed([]string{free + "::0", free + "::1", id}, []string{free, id + "::0", id + "::1"}), gpu)
	if seconds := n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | ", gpu); seconds < 9 {
		t.Errorf("free after %d s, want 10", seconds+1)
	}
}

// A daemon that starts knows what pods hold from what kubelet has saved alone.
func TestAfterARestartAGPUThatAPodHoldsIsNotGivenInAnotherForm(t *testing.T) {
	t.Parallel()
	for _, name := range []string{gpu, gpu + ".shared"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, false)
			stop := n.start(t)
			n.await(t, "GPU-0 GPU-1 | ", gpu)
			pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1, SingleNode: true}
			got, err := n.Admit(t.Context(), pod)
			if err != nil {
				t.Fatal(err)
			}
			held, free := got.IDs[0], "GPU-"+other(got.IDs[0])
			stop()
			if name == gpu {
				n.configs.Publish(shared(""))
			} else {
				n.configs.Publish(shared(name))
			}
			mark := n.Mark()
			n.start(t)
			want := listed([]string{held, free + "::0", free + "::1"}, []string{held + "::0", held + "::1"})
			n.until(t, want, gpu, name)
			for _, e := range n.Events(mark) {
				for _, d := range e.Devices {
					if e.Kind == standin.Listed && strings.HasPrefix(d.GetID(), held+"::") && d.GetHealth() == "Healthy" {
						t.Fatalf("%s was Healthy in a list", d.GetID())
					}
				}
			}
			n.SetPodsKnown(false)
			if err := n.Restart(); err != nil {
				t.Fatal(err)
			}
			n.until(t, want, gpu, name)
			n.SetPodsKnown(true)
			if _, err := n.Admit(t.Context(), pod); errors.Is(err, standin.ErrCrash) {
				t.Error("kubelet crashed when it admitted the pod again")
			}
		})
	}
}

// Kubelet does not see the end of pods by itself, and NVIDIA's chart does not mount the folder of
// PodResources. A node that is given other resource names after its pods have ended offers
// something under a new name, and all of it as soon as a pod has come.
func TestNewNamesAfterPodsHaveEndedWithoutPodResources(t *testing.T) {
	t.Parallel()
	const other = gpu + ".shared"
	n := newNode(t, false)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	for _, pod := range []string{"p0", "p1"} {
		n.admit(t, pod, gpu)
	}
	n.Remove("p0")
	n.Remove("p1")
	n.clock.Step(20 * time.Second)
	n.configs.Publish(shared(other))
	if seconds := n.until(t, "GPU-0::0 GPU-0::1 | GPU-1::0 GPU-1::1", other); seconds < 10 {
		t.Errorf("offered after %d s, want 30", seconds)
	}
	n.admit(t, "q", other)
	n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | ", other)
}

func TestWithoutAnAccountAGPUIsGivenInAnotherFormWithAWarning(t *testing.T) {
	t.Parallel()
	n := newNode(t, false)
	n.unread = true
	warned := make(chan struct{})
	warn := sync.OnceFunc(func() { close(warned) })
	n.log = funcr.New(func(_, line string) {
		if strings.Contains(line, "Plan warning") && strings.Contains(line, "it is not known which devices pods hold") {
			warn()
		}
	}, funcr.Options{})
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	n.clock.Step(20 * time.Second)
	n.configs.Publish(shared(""))
	n.await(t, "GPU-0 GPU-1 | GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1", gpu)
	if seconds := n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | GPU-0 GPU-1", gpu); seconds < 10 {
		t.Errorf("offered after %d s without an account, want 10", seconds)
	}
	warns := func(w string) bool { return strings.Contains(w, "it is not known which devices pods hold") }
	if !slices.ContainsFunc(n.daemon.Offered().Value().Warnings, warns) {
		t.Errorf("warnings: %q", n.daemon.Offered().Value().Warnings)
	}
	select {
	case <-warned:
	case <-time.After(time.Minute):
		t.Error("the warning is not logged")
	}
}

// Pods come and go while the configuration changes at any moment. No GPU is ever held in two forms.
func TestNoGPUIsEverHeldInTwoForms(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	forms := []config.Config{whole(), shared(""), shared(gpu + ".shared"), shared(gpu + ".other")}
	var pods []string
	admitted, changes := 0, 0
	names := []string{gpu, gpu, gpu + ".shared", gpu + ".other"} // of the forms
	form := 0
	for round := range 400 {
		switch random.IntN(16) {
		case 0:
			form = random.IntN(len(forms))
			n.configs.Publish(forms[form])
			changes++
		case 1, 2, 3, 4:
			if len(pods) > 0 {
				n.Remove(pods[0])
				pods = pods[1:]
			}
		case 5, 6, 7:
			for range 5 {
				n.settle()
			}
		default:
			c := standin.Container{Pod: fmt.Sprint("p", round), Name: "c", Resource: names[form], Count: 1}
			if random.IntN(4) == 0 {
				c.Resource = names[random.IntN(len(names))]
			}
			if _, err := n.Admit(t.Context(), c); err == nil {
				pods = append(pods, c.Pod)
				admitted++
			} else if errors.Is(err, standin.ErrCrash) {
				t.Fatal(err)
			}
		}
		saved, err := n.directory.Checkpoint()
		if err != nil {
			t.Fatal(err)
		}
		formOf := map[string]string{}
		for _, d := range saved.Held {
			uuid, replica, _ := strings.Cut(d.ID, "::")
			now := fmt.Sprintf("%s shared %v", d.Resource, replica != "")
			if !slices.Contains(pods, strings.TrimPrefix(d.Pod, "with UID ")) {
				continue // it has ended
			}
			if before, known := formOf[uuid]; known && before != now {
				for _, e := range n.Events(0) {
					t.Log(e.String())
				}
				t.Logf("%+v pods %v", saved.Held, pods)
				t.Fatalf("round %d: %s is held as %s and as %s", round, uuid, before, now)
			}
			formOf[uuid] = now
		}
	}
	t.Logf("%d pods, %d changes", admitted, changes)
	if admitted < 5 || changes < 5 {
		t.Errorf("%d pods were admitted over %d changes; the test shows little", admitted, changes)
	}
}

// Another device plugin offers the GPUs under another name. What it offers is not given out here,
// and it is left to serve what pods hold; when it has ended, this daemon serves that until the pods
// have ended, too.
func TestAGPUThatAnotherPluginOffersWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	theirs, err := scenario.StartPlugin(n.dir, "other.sock", gpu, scenario.Script{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(theirs.Stop)
	theirs.Send(&v1beta1.Device{ID: "GPU-0", Health: v1beta1.Healthy},
		&v1beta1.Device{ID: "GPU-1", Health: v1beta1.Healthy})
	if err := theirs.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	held := n.admit(t, "p", gpu)
	free := "GPU-" + other(held)

	const ours = "nvidia.com/ours"
	c := whole()
	c.Resource.GPUs = []resource.Naming{{Pattern: resource.Pattern("*"), Name: ours}}
	n.configs.Publish(c)
	mark := n.Mark()
	n.start(t)
	n.await(t, " | GPU-0 GPU-1", ours)
	n.pass(t, 60)
	if got := n.health(gpu) + n.health(ours); got != "GPU-0 GPU-1 |  | GPU-0 GPU-1" {
		t.Errorf("kubelet lists %s", got)
	}
	for _, e := range n.Events(mark) {
		if e.Kind == standin.Registered && e.Resource == gpu {
			t.Fatal("the daemon registered what another plugin serves")
		}
	}
	theirs.Stop()
	n.until(t, free+" | "+held, ours)
	n.until(t, held+" | ", gpu)
	n.Remove("p")
	n.until(t, "GPU-0 GPU-1 | ", ours)
	n.until(t, " | ", gpu)
}
