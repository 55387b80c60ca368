package kernellog

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// kernelFacility is the lowest priority of a record written by a process: the kernel's own facility
// is 0, and the lowest three bits are the level.
const kernelFacility = 8

// xidLine matches a record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg) with an XID: priority,
// sequence number and so on, then the driver's line. Drivers before R352 omit "PCI:".
var xidLine = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(
		`^(\d{1,9}),[^;]*;NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.\d)?` +
			`(?: GPU-I:(\d{1,4})(?: GPU-CI:(\d{1,4}))?)?\): (\d{1,9})(?:\D|$)`)
})

// parse returns the XID of a record of the log; false for any other record. Records written by
// processes do not come from the driver, and are ignored.
func parse(line []byte) (inventory.Event, bool) {
	if !bytes.Contains(line, []byte("NVRM: Xid (")) {
		return inventory.Event{}, false
	}
	m := xidLine().FindSubmatch(line)
	if len(m) == 0 || number(m[1], 10) >= kernelFacility {
		return inventory.Event{}, false
	}
	e := inventory.Event{
		Kind: inventory.EventXID, XID: number(m[7], 10), GI: inventory.Unattributed, CI: inventory.Unattributed,
		Logged: true,
		BDF:    fmt.Sprintf("%04x:%02x:%02x.0", number(m[2], 16), number(m[3], 16), number(m[4], 16)),
	}
	if len(m[5]) > 0 {
		e.GI = int(number(m[5], 10))
	}
	if len(m[6]) > 0 {
		e.CI = int(number(m[6], 10))
	}
	return e, true
}

// switchLine matches a record with an error of an NVSwitch, like xidLine: PCI address, SXid, and
// whether the error is fatal for the switch's links.
var switchLine = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(\d{1,9}),[^;]*;nvidia-nvswitch\d{1,4}: SXid \(PCI:([0-9A-Fa-f:.]{10,16})\): ` +
		`(\d{1,9}), (Fatal|Non-fatal)(?:\W|$)`)
})

// A switchError is an error of an NVSwitch.
type switchError struct {
	bdf   string
	sxid  uint64
	fatal bool
}

// parseSwitch returns the NVSwitch error of a record of the log, and false for any other record.
func parseSwitch(line []byte) (switchError, bool) {
	if !bytes.Contains(line, []byte(": SXid (")) {
		return switchError{}, false
	}
	m := switchLine().FindSubmatch(line)
	if len(m) == 0 || number(m[1], 10) >= kernelFacility {
		return switchError{}, false
	}
	return switchError{bdf: strings.ToLower(string(m[2])), sxid: number(m[3], 10), fatal: string(m[4]) == "Fatal"}, true
}

// number parses digits matched by an expression: they always fit.
func number(digits []byte, base int) uint64 {
	n, _ := strconv.ParseUint(string(digits), base, 64)
	return n
}
