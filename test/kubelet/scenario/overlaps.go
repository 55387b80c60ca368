package scenario

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// rounds is how often a race is tried.
const rounds = 20

var overlaps = []scenario{
	{name: "the newest plugin is asked, and the other takes over when it ends", run: func(l *lab) {
		l.start("old.sock", Script{}, "a", "b")
		later := l.start("new.sock", Script{}, "a", "b")
		l.same("served by", "new.sock", l.admit("first", 1).Response.GetEnvs()["SERVED_BY"])
		later.Stop()
		if l.setup.Version == kubelet.V136 {
			l.shows(2, 0) // the old one's stream lives, but nobody looks at it
			return
		}
		l.eventually("the survivor answers", func() bool {
			got, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "second", Name: "main", Resource: resource, Count: 1})
			return err == nil && got.Response.GetEnvs()["SERVED_BY"] == "old.sock"
		})
		l.stays(2, 2)
	}},
	{name: "the end of an old plugin's stream", run: func(l *lab) {
		old := l.start("old.sock", Script{}, "a", "b")
		later := l.start("new.sock", Script{}, "a", "b")
		old.Stop()
		if l.setup.Version == kubelet.V136 {
			// Kubelet takes it for the end of the new one: it closes that connection.
			l.must(later.WaitStreams(l.ctx, 0))
			l.shows(2, 0)
			l.recovers(l.serve("newer.sock", Script{}, devices("a", "b")...))
			return
		}
		l.stays(2, 2)
		l.same("served by", "new.sock", l.admit("pod", 2).Response.GetEnvs()["SERVED_BY"])
	}},
	{name: "a Register whose options are refused, and then the end of an old plugin's stream", run: func(l *lab) {
		old := l.start("old.sock", Script{}, "a", "b")
		later := l.start("new.sock", Script{}, "a", "b")
		l.forget()
		old.Stop()
		l.stays(2, 2) // 1.36 knows no client of the resource any more, and 1.37 knows whose stream it was
		l.same("served by", "new.sock", l.admit("pod", 1).Response.GetEnvs()["SERVED_BY"])
		later.Send(devices("a", "b", "c")...)
		l.shows(3, 3)
		later.Stop()
		if l.setup.Version == kubelet.V137 {
			l.shows(3, 0)
			return
		}
		l.stays(3, 3) // 1.36 does not see the end of this one either
		l.refuse("another", 1, kubelet.UnexpectedAdmission, "")
	}},
	{name: "a second registration of the newest plugin, beside its first stream", run: func(l *lab) {
		old := l.start("old.sock", Script{}, "a", "b")
		first := l.start("new.sock", Script{}, "a", "b")
		l.forget()
		old.Stop()
		l.stays(2, 2)
		second := l.start("newer.sock", Script{}, "a", "b")
		l.stays(2, 2)
		l.same("served by", "newer.sock", l.admit("pod", 1).Response.GetEnvs()["SERVED_BY"])
		first.Stop() // both end, as one process does
		second.Stop()
		l.shows(2, 0)
	}},
	{name: "one plugin follows another that has ended", run: func(l *lab) {
		l.start("ours.sock", Script{}, "a", "b").Stop()
		l.shows(2, 0)
		// Kubelet stops the resource a little later, and would stop the new one with it.
		l.recovers(l.serve("nvidia-gpu.sock", Script{}, devices("a", "b")...))
		l.stays(2, 2)
	}},
	{name: "a plugin that registers once, beside another that then ends", run: func(l *lab) {
		ours := l.start("ours.sock", Script{}, "a", "b")
		theirs := l.start("nvidia-gpu.sock", Script{}, "a", "b")
		ours.Stop()
		if l.setup.Version == kubelet.V137 {
			l.stays(2, 2)
			l.same("served by", "nvidia-gpu.sock", l.admit("pod", 1).Response.GetEnvs()["SERVED_BY"])
			return
		}
		l.must(theirs.WaitStreams(l.ctx, 0)) // and it does not know: it waits for another kubelet.sock
		l.refuse("pod", 1, kubelet.UnexpectedAdmission, "")
		l.must(l.subject.Restart())
		theirs.Stop() // and serves again
		l.start("nvidia-gpu.sock", Script{}, "a", "b")
		l.same("served by", "nvidia-gpu.sock", l.admit("pod", 1).Response.GetEnvs()["SERVED_BY"])
	}},
	{name: "an empty farewell zeroes the survivor until it speaks again", run: func(l *lab) {
		survivor := l.start("old.sock", Script{}, "a", "b")
		leaving := l.start("new.sock", Script{}, "a", "b")
		leaving.Send()
		l.shows(0, 0)
		leaving.Stop()
		l.stays(0, 0)
		if l.setup.Version == kubelet.V136 {
			l.stopped(survivor)
			return
		}
		survivor.Send(devices("a", "b")...)
		l.shows(2, 2)
		l.eventually("the survivor is asked", func() bool { // nothing tells that the end of the other has been looked at
			_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 2})
			return err == nil
		})
	}},
	{name: "lists of two plugins are not merged", run: func(l *lab) {
		l.start("one.sock", Script{}, "a", "b", "c")
		two := l.serve("two.sock", Script{}, devices("x")...)
		l.must(two.Register(l.ctx))
		l.shows(1, 1)
		l.same("allocation", []string{"x"}, l.admit("pod", 1).IDs)
	}},
	{name: "the list is that of the plugin that sent last, and asked is the one that registered last", run: func(l *lab) {
		old := l.start("old.sock", Script{}, "a", "b", "c")
		later := l.serve("new.sock", Script{}, devices("x")...)
		l.must(later.Register(l.ctx))
		l.shows(1, 1)
		l.same("served by", "new.sock", l.admit("first", 1).Response.GetEnvs()["SERVED_BY"])
		old.Send(devices("a", "b", "c")...)
		l.shows(3, 3)
		got := l.admit("second", 2) // of the old plugin's devices, by the new plugin
		l.same("served by", "new.sock", got.Response.GetEnvs()["SERVED_BY"])
		later.Send(devices("x")...)
		l.shows(1, 1)
	}},
	{name: "a fresh path at once after a stream's end", run: func(l *lab) {
		lost := 0
		for round := range rounds {
			old := l.start(fmt.Sprintf("%d.sock", 2*round), Script{}, "a", "b")
			l.must(old.EndStreams(l.ctx))
			later := l.serve(fmt.Sprintf("%d.sock", 2*round+1), Script{}, devices("a", "b")...)
			if l.setup.Version == kubelet.V137 {
				l.must(later.Register(l.ctx))
				l.shows(2, 2)
				l.stays(2, 2)
				l.admit("pod", 2)
			} else if !l.comesUp(later) {
				lost++ // 1.36 may take the old stream's end for the new one's
			}
			l.subject.Remove("pod")
			old.Stop()
			later.Stop()
			l.saved()
			l.must(l.subject.Restart())
			l.shows(0, 0)
		}
		l.Logf("%d of %d rounds lost", lost, rounds)
	}},
}

// forget registers a plugin that refuses to tell its options.
func (l *lab) forget() {
	l.Helper()
	p := l.serve("refuses.sock", Script{Refuse: true})
	if err := p.Register(l.ctx); err == nil {
		l.Fatal("the registration is accepted")
	}
	p.Stop()
}

// comesUp registers a plugin and says whether a pod gets its devices then.
func (l *lab) comesUp(p *Plugin) bool {
	if p.Register(l.ctx) != nil {
		return false
	}
	_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 2})
	return err == nil
}

// attempt bounds one attempt of recovers.
const attempt = time.Second

// recovers registers a plugin until its list shows and a pod gets its two devices. The end of a
// stream hits whichever plugin has the resource, on 1.37 the path, by the time that kubelet looks
// at it, and nothing tells that it has; so the first attempt need not be the one that holds.
func (l *lab) recovers(p *Plugin) {
	l.Helper()
	l.eventually("a pod gets the devices", func() bool {
		begun := time.Now()
		if p.Register(l.ctx) == nil {
			l.until(func() bool { return l.looksLike(2, 2) || time.Since(begun) > attempt })
			_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 2})
			if err == nil {
				return true
			}
			l.Logf("an attempt did not hold: %v", err)
		}
		l.must(p.EndStreams(l.ctx))
		return false
	})
}

// stopped has a plugin send its two devices until the node shows them and refuses them: capacity is
// there, and no way to it. Before kubelet has looked at the end of the plugin that it goes by, it
// refuses them for another reason, and that end takes away what was sent.
func (l *lab) stopped(p *Plugin) {
	l.Helper()
	l.eventually("a refusal because the endpoint has been stopped", func() bool {
		begun := time.Now()
		p.Send(devices("a", "b")...)
		l.until(func() bool { return l.looksLike(2, 2) || time.Since(begun) > attempt })
		_, err := l.subject.Admit(l.ctx, kubelet.Container{Pod: "pod", Name: "main", Resource: resource, Count: 1})
		return err != nil && strings.Contains(err.Error(), "has been stopped") && l.looksLike(2, 2)
	})
}
