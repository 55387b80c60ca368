package nodeevents

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// maxText is the greatest size of the note of an Event and of the message of a condition, in bytes.
// The limit for notes is Kubernetes'.
const maxText = 1024

// A NodeEvent is an Event to be written.
type NodeEvent struct {
	Reason Reason
	// Note is a sentence of at most 1024 bytes.
	Note string
	// Devices are the UUIDs of the affected GPUs and MIG devices, in ascending order; none for
	// Events about the node.
	Devices []string
	// XID is the driver's error number of the cause; 0 if there is none.
	XID uint64
	// Cause distinguishes Events that are equal in all fields above, except for the note.
	Cause string
	// At is when the fact was observed.
	At time.Time
	// AtStart is true if the fact was there when the daemon began to report: an earlier process may
	// have reported it.
	AtStart bool
}

// Key returns 16 hexadecimal digits. The key is the same for Events with the same reason, devices,
// XID and cause, also in two daemons on a node, and before and after a restart of the daemon.
func (e NodeEvent) Key() string {
	sum := sha256.Sum256([]byte(strings.Join([]string{
		string(e.Reason), strings.Join(e.Devices, ","), fmt.Sprint(e.XID), e.Cause,
	}, "\x00")))
	return hex.EncodeToString(sum[:8])
}

// line returns text in one line of valid UTF-8, with at most maxText bytes.
func line(text string) string {
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "?")
	if len(text) <= maxText {
		return text
	}
	const more = "…"
	end := maxText - len(more)
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + more
}

// list joins as many items as fit, and adds the number of omitted items.
func list(prefix string, items []string) string {
	const room = len("; and 1000 more")
	text := prefix
	for i, item := range items {
		separator := "; "
		if i == 0 {
			separator = ""
		}
		rest := room
		if i == len(items)-1 {
			rest = 0
		}
		if len(text)+len(separator)+len(item)+rest > maxText {
			return line(fmt.Sprintf("%s%sand %d more", text, separator, len(items)-i))
		}
		text += separator + item
	}
	return line(text)
}
