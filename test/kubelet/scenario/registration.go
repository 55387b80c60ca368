package scenario

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

var registration = []scenario{
	{name: "options are asked for inside Register, then the stream begins", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, devices("a")...)
		l.must(p.Register(l.ctx))
		l.same("first call", "GetDevicePluginOptions", p.Calls()[0])
		l.must(p.WaitStreams(l.ctx, 1))
		l.same("calls", []string{"GetDevicePluginOptions", "ListAndWatch"}, p.Calls())
	}},
	{name: "another API version is refused", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, devices("a")...)
		err := p.RegisterWith(l.ctx, func(r *v1beta1.RegisterRequest) { r.Version = "v1" })
		if err == nil || !strings.Contains(err.Error(), "not supported") {
			l.Fatalf("register: %v, want that v1 is not supported", err)
		}
		l.same("calls", 0, len(p.Calls()))
	}},
	{name: "resource names are checked", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, devices("a")...)
		for name, valid := range map[string]bool{
			"nvidia.com/gpu":                             true,
			"nvidia.com/mig-1g.10gb.me":                  true,
			"nvidia.com/GPU_x":                           true,
			"gpu":                                        false,
			"kubernetes.io/gpu":                          false,
			"node.kubernetes.io/gpu":                     false,
			"requests.nvidia.com/gpu":                    false,
			"NVIDIA.com/gpu":                             false,
			"nvidia.com/":                                false,
			"nvidia.com/a/b":                             false,
			"nvidia.com/-gpu":                            false,
			"nvidia.com/" + strings.Repeat("g", 63):      true,
			"nvidia.com/" + strings.Repeat("g", 64):      false,
			strings.Repeat("n", 244) + "/gpu":            true, // 253 with "requests."
			strings.Repeat("n", 245) + "/gpu":            false,
			"nvidia.com/gpu.shared":                      true,
			"nvidia..com/gpu":                            false,
			strings.Repeat("very-", 20) + "long.com/gpu": true,
		} {
			err := p.RegisterWith(l.ctx, func(r *v1beta1.RegisterRequest) { r.ResourceName = name })
			if (err == nil) != valid {
				l.Errorf("%q: %v, want valid %v", name, err, valid)
			}
		}
	}},
	{name: "an absolute endpoint does not leave the directory", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, devices("a")...)
		l.must(p.RegisterWith(l.ctx, func(r *v1beta1.RegisterRequest) { r.Endpoint = "/p.sock" }))
		l.shows(1, 1)
	}},
	{name: "options in the request are not used", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, devices("a")...)
		l.must(p.RegisterWith(l.ctx, func(r *v1beta1.RegisterRequest) {
			r.Options = &v1beta1.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}
		}))
		l.shows(1, 1)
		p.ForgetCalls()
		l.admit("pod", 1)
		l.same("calls", []string{"Allocate"}, p.Calls())
	}},
	{name: "options that change later are not read again", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a")
		p.SetOptions(&v1beta1.DevicePluginOptions{PreStartRequired: true})
		p.Send(devices("a", "b")...)
		l.shows(2, 2)
		p.ForgetCalls()
		l.admit("pod", 1)
		l.same("calls", []string{"Allocate"}, p.Calls())
	}},
	{name: "a plugin that does not serve fails its Register after the dial's ten seconds", run: func(l *lab) {
		if testing.Short() {
			l.Skip("it waits for 10 s: make test-all runs it")
		}
		p := l.serve("p.sock", Script{})
		p.Stop()
		begun := time.Now()
		err := p.Register(l.ctx)
		if err == nil || !strings.Contains(err.Error(), "dial") {
			l.Fatalf("register: %v, want a failed dial", err)
		}
		if took := time.Since(begun); took < 9*time.Second {
			l.Errorf("it took %v, want 10 s", took)
		}
		l.same("resources", 0, len(l.subject.Resources()))
	}},
	{name: "a Register that gave up before the options were answered leaves nothing behind", run: func(l *lab) {
		p := l.serve("p.sock", Script{Hang: true}, devices("a")...)
		ctx, giveUp := context.WithCancel(l.ctx)
		defer giveUp()
		registered := make(chan error, 1)
		go func() { registered <- p.Register(ctx) }()
		l.eventually("the options are asked for", func() bool { return len(p.Calls()) > 0 })
		giveUp()
		if err := <-registered; status.Code(err) != codes.Canceled {
			l.Fatalf("register: %v, want that it was given up", err)
		}
		p.Stop()
		l.start("p.sock", Script{}, "a", "b")
		l.admit("pod", 2)
	}},
	{name: "a second Register of a path whose stream lives", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		err := p.Register(l.ctx)
		if l.setup.Version == kubelet.V136 {
			l.must(err)
			l.must(p.WaitStreams(l.ctx, 2)) // it has another stream, and has forgotten the first
			return
		}
		if err == nil || !strings.Contains(err.Error(), "already connected") {
			l.Fatalf("register: %v, want that it is connected already", err)
		}
		// 1.37 has forgotten the living client: its end is never seen, and the devices stay for ever.
		l.must(p.EndStreams(l.ctx))
		l.stays(2, 2)
		l.admit("one", 1) // the connection is open, and kubelet holds the endpoint for live
		p.Stop()
		l.stays(2, 2)
		l.refuse("two", 1, kubelet.UnexpectedAdmission, "")
		// Another plugin works beside it; when that ends, kubelet goes back to the dead one.
		other := l.start("q.sock", Script{}, "a", "b")
		l.same("served by", "q.sock", l.admit("three", 1).Response.GetEnvs()["SERVED_BY"])
		other.Stop()
		l.stays(2, 2)
		l.saved()
		l.must(l.subject.Restart())
		l.shows(0, 0)
	}},
}
