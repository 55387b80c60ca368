package scenario

import (
	"fmt"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

var lists = []scenario{
	{name: "a list replaces the last", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b", "c")
		p.Send(device("a", v1beta1.Healthy), device("b", v1beta1.Unhealthy))
		l.shows(2, 1)
		p.Send()
		l.shows(0, 0)
		p.Send(devices("a", "b", "c", "d")...)
		l.shows(4, 4)
	}},
	{name: "any health but Healthy is unhealthy", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", "healthy"), device("b", ""), device("c", v1beta1.Healthy))
		l.must(p.Register(l.ctx))
		l.shows(3, 1)
	}},
	{name: "an ID that comes twice counts once, unless its health differs", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a")
		p.Send(devices("a", "b", "b")...)
		l.shows(2, 2)
		p.Send(device("a", v1beta1.Healthy), device("a", v1beta1.Unhealthy))
		l.shows(2, 1)
	}},
	{name: "a list over 4 MiB ends the stream", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a")
		var big []*v1beta1.Device
		for i := range 50_000 {
			big = append(big, device(fmt.Sprintf("%0100d", i), v1beta1.Healthy))
		}
		p.Send(big...)
		l.shows(1, 0)
		l.must(p.WaitStreams(l.ctx, 0))
	}},
	{name: "a stream's end leaves capacity and takes allocatable", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		l.must(p.EndStreams(l.ctx))
		l.shows(2, 0)
		l.refuse("pod", 1, kubelet.UnexpectedAdmission, "no healthy devices present")
		p.Stop()
		l.start("q.sock", Script{}, "a", "b") // a new life makes it whole
		l.admit("pod", 2)
	}},
	{name: "a stream that kubelet drops is a connection that kubelet closes", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		l.same("streams dropped", 1, l.subject.DropStream(resource))
		l.must(p.WaitStreams(l.ctx, 0))
		l.shows(2, 0)
		l.stays(2, 0)
		l.recovers(p) // its path is free again
	}},
	{name: "five minutes after a stream's end the resource is gone", minutes: true, run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		l.admit("pod", 1)
		p.Stop()
		l.shows(2, 0)
		l.setup.Pass(l.subject, stopGrace-margin)
		l.shows(2, 0)
		l.setup.Pass(l.subject, 2*margin)
		l.eventually("the resource is gone", func() bool {
			_, there := l.subject.Resources()[resource]
			return !there
		})
		l.refuse("late", 1, kubelet.UnexpectedAdmission, "unregistered device") // known still, as a pod holds one
		l.subject.Remove("pod")
		l.refuse("later", 1, kubelet.UnexpectedAdmission, "unregistered device")
		l.refuse("last", 1, kubelet.Unschedulable, "") // the admission before has counted afresh
		l.start("q.sock", Script{}, "a", "b")
		l.admit("new", 2)
	}},
	{name: "a Register within the five minutes keeps the resource", minutes: true, run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		p.Stop()
		l.shows(2, 0)
		l.setup.Pass(l.subject, stopGrace/2)
		l.start("q.sock", Script{}, "a", "b")
		l.setup.Pass(l.subject, stopGrace)
		l.stays(2, 2)
	}},
}
