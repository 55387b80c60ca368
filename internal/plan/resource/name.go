package resource

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
)

// Prefix is the vendor part of every resource name.
const Prefix = "nvidia.com/"

// WholeGPU is the resource of whole GPUs, and of MIG devices under the strategy single.
const WholeGPU = Prefix + "gpu"

// maxName is the longest full resource name.
const maxName = 63

// sharedSuffix is appended to the names of shared resources if the configuration renames them.
const sharedSuffix = ".shared"

// SharedName returns the name of a shared resource if the configuration renames shared resources.
func SharedName(name string) string { return name + sharedSuffix }

// ProfileName returns the resource of MIG devices of a profile under the strategy mixed:
// "1g.10gb+me" is nvidia.com/mig-1g.10gb.me. A resource name must not contain a plus sign.
func ProfileName(profile string) string {
	return Prefix + "mig-" + strings.ReplaceAll(profile, "+", ".")
}

// IsName reports whether a configuration can give a resource this name.
func IsName(name string) bool {
	full, err := ParseName(name)
	return err == nil && full == name
}

// nameForm matches a DNS subdomain, as NVIDIA's device plugin does.
var nameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// ParseName returns the full name of a resource, written with or without "nvidia.com/".
func ParseName(text string) (string, error) {
	name, _ := strings.CutPrefix(text, Prefix)
	switch {
	case name == "":
		return "", errors.New("is not a resource name; write one such as nvidia.com/gpu")
	case !nameForm.MatchString(name):
		return "", fmt.Errorf("%q is not a resource name: after %s come lower-case letters, digits, '-' and '.', "+
			"a letter or digit first, last and on both sides of each '.'", text, Prefix)
	case len(Prefix+name) > maxName:
		return "", fmt.Errorf("%q is too long: with %s it has %d characters, of which %d are allowed",
			text, Prefix, len(Prefix+name), maxName)
	}
	return Prefix + name, nil
}

// A Pattern matches a whole string; "*" stands for any characters, also for none.
type Pattern string

// Match reports whether the pattern matches all of text.
func (p Pattern) Match(text string) bool {
	first, rest, wild := strings.Cut(string(p), "*")
	text, ok := strings.CutPrefix(text, first)
	if !wild || !ok {
		return ok && text == ""
	}
	parts := strings.Split(rest, "*")
	last := len(parts) - 1
	for _, part := range parts[:last] {
		_, after, found := strings.Cut(text, part)
		if !found {
			return false
		}
		text = after
	}
	return strings.HasSuffix(text, parts[last])
}

// Meets reports whether any text matches both patterns.
func (p Pattern) Meets(other Pattern) bool {
	a, b := string(p), string(other)
	switch {
	case !strings.Contains(a, "*"):
		return other.Match(a)
	case !strings.Contains(b, "*"):
		return p.Match(b)
	}
	// The parts between the first and the last "*" of both patterns fit into one text, one after the
	// other.
	first, _, _ := strings.Cut(a, "*")
	firstOther, _, _ := strings.Cut(b, "*")
	last, lastOther := a[strings.LastIndex(a, "*")+1:], b[strings.LastIndex(b, "*")+1:]
	return (strings.HasPrefix(first, firstOther) || strings.HasPrefix(firstOther, first)) &&
		(strings.HasSuffix(last, lastOther) || strings.HasSuffix(lastOther, last))
}

// A Ref names a device by index, "i" or "i:j", or by UUID.
type Ref string

// uuidForm matches NVML's UUIDs. Drivers before R470 name MIG devices after their GPU.
const (
	uuidForm = `((GPU|MIG)-` + uuidPart + `|MIG-GPU-` + uuidPart + `/\d+/\d+)`
	uuidPart = `[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`
)

var refForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(\d+(:\d+)?|` + uuidForm + `)$`)
})

// ParseRef returns the Ref in the text of a configuration.
func ParseRef(text string) (Ref, error) {
	if !refForm().MatchString(text) {
		return "", fmt.Errorf("%q does not name a device: write a GPU's index (0), a MIG device's index (0:1) or "+
			"a UUID as nvidia-smi -L prints it", text)
	}
	return Ref(text), nil
}

var pciForm = regexp.MustCompile(`^([0-9a-f]{4,8}:)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$`)

// ParsePCI returns a PCI address in the form of sysfs. The text may lack the domain, or have a
// domain of 4 to 8 digits.
func ParsePCI(text string) (string, error) {
	parts := pciForm.FindStringSubmatch(strings.ToLower(text))
	if parts == nil {
		return "", fmt.Errorf("%q is not a PCI address such as 0000:1b:00.0", text)
	}
	domain := strings.TrimLeft(strings.TrimSuffix(parts[1], ":"), "0")
	return strings.Repeat("0", max(0, 4-len(domain))) + domain + ":" + parts[2], nil
}
