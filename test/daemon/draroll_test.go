package daemon

import (
	"slices"
	"syscall"
	"testing"
)

// TestModeBackInARollOut: the new process of a roll-out has the mode plugin, gets the GPUs, and
// dies before the old one has ended. The old one publishes those GPUs again that no pod got
// meanwhile, and the others when their pods have ended.
func TestModeBackInARollOut(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	next := c.beside(c.Profile, append(slices.Clone(c.Args), "--state-dir", c.Path("state"), "--cdi-dir", c.Path("cdi"),
		"--dra-mode", "plugin")...)
	next.start()
	c.allocatable(8)
	c.eventually("no GPU is in a slice", func() bool { return len(c.devices()) == 0 })
	held := c.hold("long")
	c.signal(next.Running(), syscall.SIGKILL)
	<-next.Running().Ended()
	_ = next.StopDaemon() // it was killed
	c.owner(held, "leaving-plugin")
	c.published(7)
	for name, uuid := range c.devices() {
		if uuid == held {
			t.Errorf("%s is in a slice although a pod has it by the device plugin", name)
		}
	}
	c.hasNot("long", held)
	c.Remove("long")
	c.published(8)
}
