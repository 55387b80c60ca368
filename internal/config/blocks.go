package config

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// blocks puts the blocks into the Config, which only the file can contain.
func (d *document) blocks(c *Config) {
	if v := d.config.Version; v != "" && v != v1.Version {
		d.refuse("version", fmt.Sprintf("unknown version %q; use %s", v, v1.Version))
	}
	if r := d.config.Resources; r != nil {
		gpus, migs := d.namings("resources.gpus", r.GPUs), d.namings("resources.mig", r.MIGs)
		if len(gpus)+len(migs) > 0 && d.honours(c, "resources", "all resources have their usual names") {
			c.Resource.GPUs, c.Resource.MIGs = gpus, migs
		}
	}
	c.Resource.Selectors = d.selectors()
	d.sharing(c)
	d.units(c)
}

// honours reports whether a key that NVIDIA's device plugin ignores has an effect, and warns unless
// the configuration decides. Without describes the behaviour if the key is ignored.
func (d *document) honours(c *Config, path, without string) bool {
	switch c.Compatibility {
	case CompatibilityNVIDIA:
		d.warn(path, d.line(path), "is ignored, as by NVIDIA's device plugin: "+without+
			"; --compatibility=none gives it its effect")
		return false
	case CompatibilityUnset:
		d.warn(path, d.line(path), "has its effect here; NVIDIA's device plugin ignores it: "+without+
			"; --compatibility=nvidia does so too, and none silences this")
	case CompatibilityNone:
	}
	return true
}

// refuse records a problem with a key of the file, unless the key or a block around it was
// unreadable and thus only seems to be missing.
func (d *document) refuse(path, text string) {
	for _, m := range d.malformed {
		if rest, inside := strings.CutPrefix(path, m.Where); inside &&
			(rest == "" || rest[0] == '.' || rest[0] == '[') {
			return
		}
	}
	d.problem(path, d.line(path), text)
}

func (d *document) namings(path string, given []v1.Resource) []resource.Naming {
	var namings []resource.Naming
	for i, r := range given {
		at := item(path, i)
		var pattern resource.Pattern
		switch null := d.nulls[at+".pattern"]; {
		case r.Pattern == nil && !null:
			d.refuse(at+".pattern", `is missing; use "*" to match everything`)
		case null || *r.Pattern == "":
			d.warn(at+".pattern", d.line(at+".pattern"), `is empty and matches nothing; use "*" to match everything`)
		default:
			pattern = resource.Pattern(*r.Pattern)
		}
		namings = append(namings, resource.Naming{Pattern: pattern, Name: d.name(at+".name", r.Name)})
	}
	return namings
}

// name returns the full name of a resource.
func (d *document) name(path, text string) string {
	name, err := resource.ParseName(text)
	if err != nil {
		d.refuse(path, err.Error())
	}
	return name
}

// item returns the key path of the i-th entry of a list.
func item(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// refs returns the Refs in a list of indices and UUIDs.
func (d *document) refs(path string, given []string) []resource.Ref {
	return parsed(d, path, given, resource.ParseRef)
}

// parsed returns the parsed entries of a list of the file.
func parsed[T any](d *document, path string, given []string, parse func(string) (T, error)) []T {
	var all []T
	for i, text := range given {
		value, err := parse(text)
		if err != nil {
			d.refuse(item(path, i), err.Error())
			continue
		}
		all = append(all, value)
	}
	return all
}

// sharing puts the sharing block into the Config. MPS takes precedence over time-slicing, but both
// have to be valid.
func (d *document) sharing(c *Config) {
	s := d.config.Sharing
	if s == nil {
		return
	}
	if d.nulls["sharing.timeSlicing"] {
		// The rules of this mapping are refused; a null at mps means none.
		s.TimeSlicing = &v1.Replicated{}
	}
	c.Resource.Sharing = d.replicated(c, "sharing.timeSlicing", s.TimeSlicing, resource.TimeSliced, false)
	if s.MPS == nil {
		return
	}
	if s.TimeSlicing != nil {
		d.warn("sharing.timeSlicing", d.line("sharing.timeSlicing"), "is ignored because sharing.mps is set")
	}
	c.Resource.Sharing = d.replicated(c, "sharing.mps", s.MPS, resource.MPS, true)
	if c.Resource.MIG == resource.MIGMixed && d.reads("mig-strategy") {
		d.refuse("sharing.mps", "MPS is not supported with the MIG strategy mixed; use time-slicing, or another MIG "+
			"strategy")
	}
	if c.Edits.MPSRoot == "" && !c.Discovery.On && d.reads("mps-root") {
		d.refuse("sharing.mps", "needs --mps-root, the directory on the host with the MPS state, such as "+
			"/run/nvidia/mps")
	}
}

// replicated returns the rules of one way of sharing. The parameter one is the default for refusing
// requests for several replicas.
func (d *document) replicated(c *Config, path string, given *v1.Replicated, mode resource.SharingMode,
	one bool) resource.Sharing {
	if given == nil {
		return resource.Sharing{}
	}
	s := resource.Sharing{Mode: mode, OnePerRequest: one}
	if given.RenameByDefault != nil {
		s.RenameByDefault = *given.RenameByDefault
	}
	if given.FailRequestsGreaterThanOne != nil {
		s.OnePerRequest = *given.FailRequestsGreaterThanOne
	}
	if len(given.Resources) == 0 {
		d.refuse(path+".resources", "no resources specified; add at least one entry with name and replicas")
	}
	rules := map[string]*resourceRules{}
	for i, r := range given.Resources {
		rule := d.rule(c, item(path+".resources", i), r, s.RenameByDefault)
		if rules[rule.Name] == nil {
			rules[rule.Name] = &resourceRules{named: mentions{}}
		}
		if text := rules[rule.Name].overlap(rule); text != "" && rule.Name != "" {
			d.warn(rule.Where, d.line(rule.Where), text+"; the larger number of replicas counts")
		}
		s.Rules = append(s.Rules, rule)
	}
	return s
}

func (d *document) rule(c *Config, path string, given v1.ReplicatedResource, renamed bool) resource.SharingRule {
	rule := resource.SharingRule{Where: path}
	if given.Name == nil {
		d.refuse(path+".name", "no resource name specified; use a name such as nvidia.com/gpu")
	} else {
		rule.Name = d.name(path+".name", *given.Name)
	}
	for _, key := range []string{".rename", ".devices"} {
		if d.nulls[path+key] {
			d.refuse(path+key, "is empty; give it a value or leave it out")
		}
	}
	if given.Rename != nil {
		rename, usual := d.name(path+".rename", *given.Rename), rule.Name
		if renamed {
			usual = resource.SharedName(usual)
		}
		if rename != usual && d.honours(c, path+".rename", "the resource is "+usual) {
			rule.Rename = rename
		}
	}
	if set := given.Devices; set != nil && !set.All {
		refs := d.refs(path+".devices", set.List)
		if d.honours(c, path+".devices", "all devices of "+rule.Name+" are shared") {
			rule.First, rule.Devices = set.Count, refs
			if set.Count == 0 && len(set.List) == 0 {
				d.refuse(path+".devices", "lists no device; leave it out for all devices")
			}
		}
	}
	switch {
	case given.Replicas == nil:
		d.refuse(path+".replicas", "no replicas specified; set the number of containers that share a device, 2 or more")
	case *given.Replicas < 2:
		d.refuse(path+".replicas", fmt.Sprintf("number of replicas must be >= 2, not %d", *given.Replicas))
	default:
		rule.Replicas = *given.Replicas
	}
	return rule
}

// resourceRules has the rules of one resource.
type resourceRules struct {
	first string // position of the first rule
	all   string // position of the first rule without devices
	named mentions
}

// overlap adds a rule. It describes how the rule and an earlier one affect the same device
// on every node with the device. The text is empty if the rules need not overlap.
func (r *resourceRules) overlap(rule resource.SharingRule) string {
	earlier := r.all
	if rule.Devices == nil {
		earlier = r.first
		r.all = cmp.Or(r.all, rule.Where)
	}
	r.first = cmp.Or(r.first, rule.Where)
	device, other, found := r.named.add(rule.Where, rule.Devices)
	switch {
	case earlier != "":
		return fmt.Sprintf("overlaps with %s, which also applies to %s", earlier, rule.Name)
	case found:
		return fmt.Sprintf("overlaps with %s: device %s is also device %s there", other.where, device, other.device)
	}
	return ""
}
