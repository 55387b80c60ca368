package nodeevents

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// maxText is how many bytes the note of an Event and the message of a condition may have. The first
// is Kubernetes' limit.
const maxText = 1024

// A NodeEvent is an Event that is to be written.
type NodeEvent struct {
	Reason Reason
	// Note is a sentence of at most 1024 bytes.
	Note string
	// Devices are the UUIDs of the GPUs and MIG devices that it is about, in ascending order; none if
	// it is about the node.
	Devices []string
	// XID is the driver's error number that is the cause; 0 if there is none.
	XID uint64
	// Cause tells Events apart that have all of the above in common, but for the note.
	Cause string
	// At is when the fact was seen.
	At time.Time
	// AtStart says that the fact was there when the daemon began to report: an earlier process may
	// have reported it.
	AtStart bool
}

// Key is the same for Events of the same reason about the same devices, with the same XID and
// cause: 16 characters of hexadecimal digits. Two daemons on one node, and a daemon before and
// after its restart, give one fact the same key.
func (e NodeEvent) Key() string {
	sum := sha256.Sum256([]byte(strings.Join([]string{
		string(e.Reason), strings.Join(e.Devices, ","), fmt.Sprint(e.XID), e.Cause,
	}, "\x00")))
	return hex.EncodeToString(sum[:8])
}

// line returns text in one line and in valid UTF-8, with at most maxText bytes.
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

// list joins as many items as fit, and says how many more there are.
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
