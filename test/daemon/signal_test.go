package daemon

import (
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestSIGHUPAtTheStart: a daemon that has only begun does not end by the signal that has it look.
func TestSIGHUPAtTheStart(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.start()
	s.logs("Starting")
	s.signal(s.Running(), syscall.SIGHUP)
	s.shows(8, 8)
}
