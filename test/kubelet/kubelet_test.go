package kubelet_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

const gpu = "nvidia.com/gpu"

// start starts a kubelet in a directory whose name is short enough for sockets, and gives the test
// a deadline.
func start(t *testing.T) (context.Context, *kubelet.Kubelet) {
	t.Helper()
	root := loopback.Folder(t)
	k, err := kubelet.Start(kubelet.Options{
		Dir:                filepath.Join(root, "device-plugins"),
		PodResourcesSocket: filepath.Join(root, "pod-resources", "kubelet.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx, k
}

// serve starts a plugin with two devices and does not register it.
func serve(t *testing.T, k *kubelet.Kubelet, name string, script scenario.Script) *scenario.Plugin {
	t.Helper()
	p, err := scenario.StartPlugin(filepath.Dir(k.Socket()), name, gpu, script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	p.Send(&v1beta1.Device{ID: "a", Health: v1beta1.Healthy}, &v1beta1.Device{ID: "b", Health: v1beta1.Healthy})
	return p
}

// register registers a plugin and waits until kubelet has its list.
func register(ctx context.Context, t *testing.T, k *kubelet.Kubelet, p *scenario.Plugin) {
	t.Helper()
	mark := k.Mark()
	if err := p.Register(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Next(ctx, mark, kubelet.Is(kubelet.Listed, gpu)); err != nil {
		t.Fatal(err)
	}
}

// kinds returns what happened, without the details.
func kinds(events []kubelet.Event) []kubelet.Kind {
	var all []kubelet.Kind
	for _, e := range events {
		all = append(all, e.Kind)
	}
	return all
}

// TestStopLeavesNothingRunning is not parallel: it counts goroutines.
func TestStopLeavesNothingRunning(t *testing.T) {
	before := runtime.NumGoroutine()
	ctx, k := start(t)
	for _, name := range []string{"p.sock", "q.sock"} {
		p := serve(t, k, name, scenario.Script{})
		register(ctx, t, k, p)
		_ = p.Register(ctx) // refused, and its connection stays open
		k.Stop()
		p.Stop()
		for runtime.NumGoroutine() > before && ctx.Err() == nil {
			runtime.Gosched() // gRPC ends its own a moment after its calls return
		}
		if ctx.Err() != nil {
			stacks := make([]byte, 1<<16)
			t.Fatalf("goroutines are left:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
		if err := k.Resume(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStart(t *testing.T) {
	t.Parallel()
	if _, err := kubelet.Start(kubelet.Options{Dir: t.TempDir(), Version: "1.35"}); err == nil {
		t.Error("a version whose rules are not known was taken")
	}
	_, k := start(t)
	if err := k.Resume(); err == nil {
		t.Error("a kubelet that runs was started again")
	}
}

func TestStoppedKubelet(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	p := serve(t, k, "p.sock", scenario.Script{})
	register(ctx, t, k, p)
	k.Stop()
	k.Stop()
	for _, socket := range []string{k.Socket(), k.PodResourcesSocket()} {
		if _, err := os.Lstat(socket); err != nil {
			t.Errorf("a killed kubelet leaves its sockets behind: %v", err)
		}
	}
	if err := p.Register(ctx); status.Code(errors.Unwrap(err)) != codes.Unavailable {
		t.Errorf("register with a stopped kubelet: %v, want it unavailable", err)
	}
	_, err := k.Admit(ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: gpu, Count: 1})
	if !errors.Is(err, kubelet.ErrStopped) {
		t.Errorf("admit: %v, want ErrStopped", err)
	}
	if err := k.RecreateSocket(); !errors.Is(err, kubelet.ErrStopped) {
		t.Errorf("recreate socket: %v, want ErrStopped", err)
	}
	if k.Resources() != nil || k.Devices(gpu) != nil || k.PodStatus("pod") != nil || k.DropStream(gpu) != 0 {
		t.Error("a stopped kubelet shows something")
	}
}

func TestRestartIsSeenInOrder(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	register(ctx, t, k, serve(t, k, "p.sock", scenario.Script{}))
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	register(ctx, t, k, serve(t, k, "q.sock", scenario.Script{}))
	want := []kubelet.Kind{
		kubelet.Started, kubelet.Registering, kubelet.Registered, kubelet.Listed,
		kubelet.Stopped, kubelet.Started, kubelet.Registering, kubelet.Registered, kubelet.Listed,
	}
	if diff := cmp.Diff(want, kinds(k.Events(0))); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestRecreateSocket(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	register(ctx, t, k, serve(t, k, "p.sock", scenario.Script{}))
	mark := k.Mark()
	if err := k.RecreateSocket(); err != nil {
		t.Fatal(err)
	}
	if got := k.Events(mark); len(got) != 0 || k.Allocatable(gpu) != 2 {
		t.Errorf("streams were touched: %v", got)
	}
	register(ctx, t, k, serve(t, k, "q.sock", scenario.Script{}))
}

func TestDirectory(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(*kubelet.Kubelet) error{
		"wiped": (*kubelet.Kubelet).Wipe, "replaced": (*kubelet.Kubelet).ReplaceDirectory,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, k := start(t)
			register(ctx, t, k, serve(t, k, "p.sock", scenario.Script{}))
			k.Stop()
			if err := damage(k); err != nil {
				t.Fatal(err)
			}
			if entries, err := os.ReadDir(filepath.Dir(k.Socket())); err != nil || len(entries) != 0 {
				t.Errorf("in the directory are %v, %v; want nothing", entries, err)
			}
			if err := k.Resume(); err != nil {
				t.Fatal(err)
			}
			if got := k.Resources(); len(got) != 0 {
				t.Errorf("without a checkpoint kubelet knows %v", got)
			}
			register(ctx, t, k, serve(t, k, "q.sock", scenario.Script{}))
		})
	}
}

func TestSetRegister(t *testing.T) {
	t.Parallel()
	tests := []struct {
		mode   kubelet.RegisterMode
		events []kubelet.Kind // until the caller gives up
		code   codes.Code
	}{
		{kubelet.RegisterRefuses, []kubelet.Kind{kubelet.Registering, kubelet.Refused}, codes.Unknown},
		{kubelet.RegisterHangs, []kubelet.Kind{kubelet.Registering}, codes.Canceled},
		{kubelet.RegisterConnects, []kubelet.Kind{kubelet.Registering, kubelet.Registered, kubelet.Listed}, codes.Canceled},
	}
	for _, test := range tests {
		t.Run(test.mode.String(), func(t *testing.T) {
			t.Parallel()
			ctx, k := start(t)
			k.SetRegister(test.mode)
			mark := k.Mark()
			p := serve(t, k, "p.sock", scenario.Script{})
			patient, giveUp := context.WithCancel(ctx)
			defer giveUp()
			answer := make(chan error, 1)
			go func() { answer <- p.Register(patient) }()
			if _, err := k.Next(ctx, mark, kubelet.Is(test.events[len(test.events)-1], gpu)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.events, kinds(k.Events(mark))); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
			if test.code == codes.Canceled {
				giveUp()
			}
			if err := <-answer; status.Code(errors.Unwrap(err)) != test.code {
				t.Errorf("register: %v, want %v", err, test.code)
			}
			k.SetRegister(kubelet.RegisterAnswers)
			register(ctx, t, k, serve(t, k, "q.sock", scenario.Script{}))
		})
	}
}

func TestHangingRegisterGoesOn(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	for _, mode := range []kubelet.RegisterMode{kubelet.RegisterHangs, kubelet.RegisterConnects} {
		k.SetRegister(mode)
		p := serve(t, k, mode.String()+".sock", scenario.Script{})
		mark := k.Mark()
		answer := make(chan error, 1)
		go func() { answer <- p.Register(ctx) }()
		if _, err := k.Next(ctx, mark, kubelet.Is(kubelet.Registering, gpu)); err != nil {
			t.Fatal(err)
		}
		k.SetRegister(kubelet.RegisterAnswers)
		if err := <-answer; err != nil {
			t.Errorf("%v: register: %v", mode, err)
		}
	}
}

func TestDropStream(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	p := serve(t, k, "p.sock", scenario.Script{})
	register(ctx, t, k, p)
	mark := k.Mark()
	if got := k.DropStream(gpu); got != 1 {
		t.Errorf("%d streams dropped, want 1", got)
	}
	if err := p.WaitStreams(ctx, 0); err != nil {
		t.Error(err)
	}
	if _, err := k.Next(ctx, mark, kubelet.Is(kubelet.StreamEnded, gpu)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]bool{"a": false, "b": false}, k.Devices(gpu)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if k.DropStream(gpu) != 0 {
		t.Error("a dropped stream was dropped again")
	}
}

func TestCrashIsAnEvent(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	var p *scenario.Plugin
	p = serve(t, k, "p.sock", scenario.Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
		p.Send()
		err := k.WaitFor(ctx, func() bool { return k.Capacity(gpu) == 0 })
		return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, err
	}})
	register(ctx, t, k, p)
	mark := k.Mark()
	_, err := k.Admit(ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: gpu, Count: 1})
	if !errors.Is(err, kubelet.ErrCrash) {
		t.Errorf("admit: %v, want a crash", err)
	}
	crash, err := k.Next(ctx, mark, kubelet.Is(kubelet.Crash, gpu))
	if err != nil || !errors.Is(crash.Err, kubelet.ErrCrash) {
		t.Errorf("event %v, %v; want a crash", crash, err)
	}
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	ended, cancel := context.WithCancelCause(ctx)
	cause := errors.New("enough")
	cancel(cause)
	if _, err := k.Next(ended, k.Mark(), kubelet.Is(kubelet.Stopped, "")); !errors.Is(err, cause) {
		t.Errorf("next: %v, want %v", err, cause)
	}
	if err := k.WaitFor(ended, func() bool { return false }); !errors.Is(err, cause) {
		t.Errorf("wait: %v, want %v", err, cause)
	}
	var seen []kubelet.Kind
	for e := range k.Follow(ended, 0) {
		seen = append(seen, e.Kind)
	}
	if diff := cmp.Diff([]kubelet.Kind{kubelet.Started}, seen); diff != "" {
		t.Errorf("followed (-want +got):\n%s", diff)
	}
}

// TestForgottenDevicesHaveAPod: the event names the pod that they are allocated to. Devices that an
// admission which failed has left behind are no pod's.
func TestForgottenDevicesHaveAPod(t *testing.T) {
	t.Parallel()
	ctx, k := start(t)
	empty := false
	register(ctx, t, k, serve(t, k, "p.sock", scenario.Script{Allocate: func([]string) (*v1beta1.AllocateResponse, error) {
		if empty {
			return &v1beta1.AllocateResponse{}, nil
		}
		return &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{{}}}, nil
	}}))
	conn, err := grpc.NewClient("unix://"+k.PodResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	lister := podresources.NewPodResourcesListerClient(conn)
	admit := func(pod string) error {
		_, err := k.Admit(ctx, kubelet.Container{Pod: pod, Name: "main", Resource: gpu, Count: 1})
		return err
	}
	for _, want := range []string{"admitted", ""} {
		if err := admit("ended"); err != nil {
			t.Fatal(err)
		}
		mark := k.Mark()
		if want != "" {
			k.WhileAllocating(func(kubelet.Moment) {
				k.Remove("ended")
				if _, err := lister.List(ctx, &podresources.ListPodResourcesRequest{}); err != nil {
					t.Error(err)
				}
			})
			err := admit(want)
			k.WhileAllocating(nil)
			if err != nil {
				t.Fatal(err)
			}
		} else {
			empty = true
			if err := admit("refused"); err == nil {
				t.Fatal("a pod is admitted without an answer")
			}
			empty = false
			k.Remove("ended")
			if err := admit("next"); err != nil {
				t.Fatal(err)
			}
		}
		got, err := k.Next(ctx, mark, kubelet.Is(kubelet.Forgotten, gpu))
		if err != nil || got.Pod != want || len(got.IDs) != 1 {
			t.Errorf("event %v of pod %q, %v; want %q", got, got.Pod, err, want)
		}
		k.Remove(want)
	}
}
