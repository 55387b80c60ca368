package inventory

import (
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxName  = 96        // bytes of a UUID or a model: NVML's limit
	maxMinor = 1<<20 - 1 // the kernel's limit
	maxShown = 40        // bytes of a wrong name in a reason
)

// A UUID is a device ID of the kubelet, an element of comma-separated lists and a name in CDI
// specs. Without NVIDIA's prefix, a UUID could be an element with a special meaning: all, none,
// void or an index. Drivers before R470 have MIG device names with slashes.
var (
	gpuPattern = regexp.MustCompile(`^GPU-[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)
	migPattern = regexp.MustCompile(`^MIG-([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|GPU-[A-Za-z0-9-]+/\d+/\d+)$`)
)

// Identify returns the Snapshot without the GPUs and MIG devices that have no valid or unique name.
// LeftOut has these GPUs and devices, with the reason. Of several devices with the same UUID,
// Identify keeps the device with the UUID in the last Snapshot, or else the first one. An
// unprintable driver version is quoted. Models are reduced to printable characters and NVML's
// length limit.
func Identify(s, last Snapshot) Snapshot {
	before, owners := maps.Collect(last.places()), map[string]place{} // by UUID
	for uuid, p := range s.places() {
		if _, claimed := owners[uuid]; !claimed || before[uuid] == p {
			owners[uuid] = p
		}
	}
	wrong := func(uuid string, p place) string {
		pattern, prefix := gpuPattern, "GPU-"
		if p.mig >= 0 {
			pattern, prefix = migPattern, "MIG-"
		}
		switch {
		case len(uuid) > maxName || !pattern.MatchString(uuid):
			return fmt.Sprintf("its UUID %s is not one of NVIDIA's, which begin with %s", quoted(uuid), prefix)
		case owners[uuid] != p:
			return fmt.Sprintf("its UUID %s is that of another device", quoted(uuid))
		}
		return ""
	}
	s = printable(s)
	sound := s
	sound.GPUs, sound.LeftOut = nil, slices.Clone(s.LeftOut)
	leaveOut := func(index int, format string, args ...any) {
		sound.LeftOut = append(sound.LeftOut, LeftOut{Index: index, Reason: fmt.Sprintf(format, args...)})
	}
	for _, g := range s.GPUs {
		reason := wrong(g.UUID, g.place())
		switch {
		case reason != "":
		case g.Minor < 0 || g.Minor > maxMinor:
			reason = fmt.Sprintf("its minor number %d is out of range", g.Minor)
		}
		if reason != "" {
			leaveOut(g.Index, "the GPU cannot be identified: %s", reason)
			continue
		}
		g.MIGDevices = slices.DeleteFunc(slices.Clone(g.MIGDevices), func(m MIGDevice) bool {
			reason := wrong(m.UUID, m.place(g))
			if reason != "" {
				leaveOut(g.Index, "MIG device %d:%d cannot be identified: %s", g.Index, m.Index, reason)
			}
			return reason != ""
		})
		sound.GPUs = append(sound.GPUs, g)
	}
	if len(sound.LeftOut) == len(s.LeftOut) {
		return s
	}
	for i, g := range sound.GPUs {
		sound.GPUs[i].Links = slices.DeleteFunc(slices.Clone(g.Links), func(l Link) bool {
			return !slices.ContainsFunc(sound.GPUs, func(peer GPU) bool { return peer.Index == l.PeerIndex })
		})
	}
	slices.SortStableFunc(sound.LeftOut, func(a, b LeftOut) int { return a.Index - b.Index })
	return sound
}

// printable returns the Snapshot with a printable driver version and printable GPU models.
func printable(s Snapshot) Snapshot {
	// The version is only displayed and searched for in file names.
	if version := s.Driver.Version; len(version) > maxName || !isPlain(version) {
		s.Driver.Version = quoted(version)
	}
	for i, g := range s.GPUs {
		if model := plain(g.Model); model != g.Model {
			s.GPUs = slices.Clone(s.GPUs)
			s.GPUs[i].Model = model
		}
	}
	return s
}

// A place is the position of a device in a Snapshot, unique for each device.
type place struct {
	index, mig int // mig is -1 for a GPU
	bdf        string
}

func (g GPU) place() place { return place{g.Index, -1, g.BDF} }

func (m MIGDevice) place(g GPU) place { return place{g.Index, m.Index, g.BDF} }

// places yields the UUIDs and places of all devices, GPUs first.
func (s Snapshot) places() iter.Seq2[string, place] {
	return func(yield func(string, place) bool) {
		for _, g := range s.GPUs {
			if !yield(g.UUID, g.place()) {
				return
			}
		}
		for _, g := range s.GPUs {
			for _, m := range g.MIGDevices {
				if !yield(m.UUID, m.place(g)) {
					return
				}
			}
		}
	}
}

// isPlain reports whether text is valid UTF-8 and printable on one line.
func isPlain(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}

// plain returns the printable characters of name, cut at NVML's length limit.
func plain(name string) string {
	if len(name) <= maxName && isPlain(name) {
		return name
	}
	name = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, name)
	end := min(len(name), maxName)
	for end < len(name) && !utf8.RuneStart(name[end]) {
		end--
	}
	return strings.TrimSpace(name[:end])
}

// quoted returns name quoted and escaped, cut if it is long.
func quoted(name string) string {
	if len(name) > maxShown {
		return fmt.Sprintf("%q... (%d bytes)", name[:maxShown], len(name))
	}
	return strconv.Quote(name)
}
