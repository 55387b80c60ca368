package dra

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A DeviceClass gives devices of claims to pods that request a resource.
type DeviceClass struct {
	Name                 string `json:"name"`
	ExtendedResourceName string `json:"extendedResourceName"`
	// Selector is a CEL expression.
	Selector string `json:"selector"`
	// Config is the opaque configuration for the devices.
	Config []ClassConfig `json:"config,omitempty"`
}

// A ClassConfig is a part of the configuration of a DeviceClass.
type ClassConfig struct {
	Opaque ClassParameters `json:"opaque"`
}

// ClassParameters are parameters for the driver of that name.
type ClassParameters struct {
	Driver     string         `json:"driver"`
	Parameters map[string]any `json:"parameters"`
}

// ClassNames returns the names of the classes of whole GPUs and of MIG devices: gpu.nvidia.com and
// mig.nvidia.com for the driver gpu.nvidia.com.
func ClassNames(driver string) (gpu, mig string) {
	return driver, "mig." + strings.TrimPrefix(driver, "gpu.")
}

// A NamedResource is a resource of the device plugin.
type NamedResource struct {
	Name    string
	Devices []NamedDevice
	// Profiles are the profiles of MIG devices for claims under this name.
	Profiles []string
	// Shared reports whether several containers can have one device, and MPS whether they share by
	// MPS.
	Shared, MPS bool
}

// A NamedDevice is a device of a resource.
type NamedDevice struct {
	UUID, GPU string
	Profile   string // of a MIG device
}

// A Stranded resource has devices that claims cannot get.
type Stranded struct {
	Resource string
	// Missing is the number of devices without a claim that could get them, and All the number of
	// all devices.
	Missing, All int
	// Reason is a sentence without a full stop.
	Reason string
}

// Classes returns a class for each resource with devices in a pool, and the resources with missing
// devices. A class selects all devices of its resource and no others: by sharing and MIG profile,
// then if necessary by model, and last by UUID.
func Classes(pool Pool, of []NamedResource) (all []DeviceClass, stranded []Stranded) {
	driver := cmp.Or(pool.Driver, Driver)
	var devices []Device
	for _, slice := range pool.Slices {
		devices = append(devices, slice.Devices...)
	}
	all = []DeviceClass{} // written as a list in YAML even if empty
	names := map[string]bool{}
	for _, r := range of {
		var mine, others []Device
		for _, d := range devices {
			switch {
			case r.has(d):
				mine = append(mine, d)
			case slices.ContainsFunc(of, func(o NamedResource) bool { return o.Shared == d.shared() && o.has(d) }):
				others = append(others, d)
			}
		}
		if missing, reason := r.missing(mine, devices); missing > 0 {
			stranded = append(stranded, Stranded{r.Name, missing, len(r.Devices), reason})
		}
		mine = slices.DeleteFunc(mine, func(d Device) bool { return d.shared() != r.Shared })
		if len(mine) == 0 {
			continue
		}
		selector := selectorOf(mine, others)
		c := DeviceClass{Name: className(driver, r.Name), ExtendedResourceName: r.Name,
			Selector: selector.expression(driver)}
		for names[c.Name] {
			c.Name = "another-" + c.Name
		}
		names[c.Name] = true
		if r.MPS && len(selector.profiles) == 0 {
			c.Config = []ClassConfig{{ClassParameters{driver, map[string]any{
				"apiVersion": ConfigVersion, "kind": GPUConfig, "sharing": map[string]any{"strategy": string(MPS)},
			}}}}
		}
		all = append(all, c)
	}
	return all, stranded
}

// has reports whether a device of the pool belongs to the resource.
func (r NamedResource) has(d Device) bool {
	if d.Partition != nil {
		return slices.Contains(r.Profiles, d.Partition.Profile)
	}
	uuid := d.uuid()
	return uuid != "" && slices.ContainsFunc(r.Devices, func(n NamedDevice) bool { return n.UUID == uuid })
}

// missing returns the number of devices of the resource that no claim can get in the form of the
// resource, and why.
func (r NamedResource) missing(mine, pool []Device) (n int, reason string) {
	for _, named := range r.Devices {
		at := slices.IndexFunc(mine, func(d Device) bool { return d.uuid() == named.UUID })
		switch {
		case at >= 0 && mine[at].shared() == r.Shared:
			continue
		case at >= 0 && r.Shared:
			reason = "containers share them, and claims do not"
		case at >= 0:
			reason = "they are not shared, and claims share all devices of a node or none"
		case slices.ContainsFunc(pool, func(d Device) bool { return d.Partition != nil && d.makes(named) }):
			continue // a claim has it now; the next claim can have it created
		case named.Profile == "" && slices.ContainsFunc(pool, func(d Device) bool { return d.parent() == named.UUID }):
			reason = "the GPUs are in MIG mode, and claims get their MIG devices: set the MIG strategy to mixed or " +
				"single"
		default:
			reason = "the ResourceSlices of the node do not have them"
		}
		n++
	}
	return n, reason
}

func (d Device) shared() bool   { return d.SharedBy != "" }
func (d Device) uuid() string   { return d.Attributes["uuid"].Value }
func (d Device) parent() string { return d.Attributes["parentUUID"].Value }
func (d Device) model() string  { return d.Attributes["productName"].Value }

// makes reports whether the device, created for a claim, would equal a MIG device.
func (d Device) makes(of NamedDevice) bool {
	return of.Profile != "" && d.parent() == of.GPU && d.Partition.Profile == of.Profile
}

var notInClass = regexp.MustCompile(`[^a-z0-9.-]+`)

// className returns the name of the class for a resource: the class of GPUs for nvidia.com/gpu.
func className(driver, resource string) string {
	if resource == "nvidia.com/gpu" {
		gpu, _ := ClassNames(driver)
		return gpu
	}
	domain, name, _ := strings.Cut(strings.ToLower(resource), "/")
	return strings.Trim(notInClass.ReplaceAllString(name, "-"), "-.") + "." + domain
}

// A classSelector selects devices.
type classSelector struct {
	gpus     bool     // GPUs
	profiles []string // MIG devices with one of these profiles
	shared   bool
	models   []string // with one of these models; nil for any
	uuids    []string // with one of these UUIDs; nil for any
	made     bool     // beside uuids: MIG devices created for claims, without a UUID yet
}

// selectorOf returns the shortest selector for devices that excludes others.
func selectorOf(devices, others []Device) classSelector {
	s := classSelector{shared: devices[0].shared()}
	for _, d := range devices {
		if d.Attributes["type"].Value == typeGPU {
			s.gpus = true
		} else {
			s.profiles = append(s.profiles, d.Attributes["profile"].Value)
		}
	}
	s.profiles = distinct(s.profiles)
	apart := func(s classSelector) bool { return !slices.ContainsFunc(others, s.matches) }
	if apart(s) {
		return s
	}
	byModel, byUUID := s, s
	for _, d := range devices {
		byModel.models = append(byModel.models, d.model())
		if uuid := d.uuid(); uuid != "" {
			byUUID.uuids = append(byUUID.uuids, uuid)
		} else {
			byUUID.made = true
		}
	}
	byModel.models, byUUID.uuids = distinct(byModel.models), distinct(byUUID.uuids)
	switch {
	case !slices.Contains(byModel.models, "") && apart(byModel):
		return byModel
	case apart(byUUID):
		return byUUID
	}
	return s // two resources have the same devices
}

func distinct(values []string) []string {
	slices.Sort(values)
	return slices.Compact(values)
}

// matches reports whether the expression of the selector is true for a device.
func (s classSelector) matches(d Device) bool {
	kind := s.gpus && d.Attributes["type"].Value == typeGPU ||
		slices.Contains(s.profiles, d.Attributes["profile"].Value)
	uuid := d.uuid()
	return kind && d.shared() == s.shared && (s.models == nil || slices.Contains(s.models, d.model())) &&
		(s.uuids == nil && !s.made || s.made && uuid == "" || slices.Contains(s.uuids, uuid))
}

// expression returns the selector in CEL. Reading an absent attribute is an error, which prevents
// an allocation: the expression first tests for attributes that may be absent.
func (s classSelector) expression(driver string) string {
	attributes := fmt.Sprintf("device.attributes['%s']", driver)
	has := func(name string) string { return fmt.Sprintf("'%s' in %s", name, attributes) }
	in := func(name string, values ...string) string { return attributeIn(attributes+"."+name, values) }
	kind := in("type", typeGPU)
	if len(s.profiles) > 0 {
		mig := in("type", typeMIG) + " && " + in("profile", s.profiles...)
		if kind = mig; s.gpus {
			kind = fmt.Sprintf("(%s || %s)", in("type", typeGPU), mig)
		}
	}
	domain, shared, _ := strings.Cut(SharedAttribute, "/")
	isShared := fmt.Sprintf("'%s' in device.attributes['%s']", shared, domain)
	if !s.shared {
		isShared = "!(" + isShared + ")"
	}
	parts := []string{fmt.Sprintf("device.driver == '%s'", driver), kind, isShared}
	if s.models != nil {
		parts = append(parts, has("productName"), in("productName", s.models...))
	}
	switch {
	case s.uuids != nil && s.made:
		parts = append(parts, fmt.Sprintf("(!(%s) || %s)", has("uuid"), in("uuid", s.uuids...)))
	case s.made:
		parts = append(parts, "!("+has("uuid")+")")
	case s.uuids != nil:
		parts = append(parts, has("uuid"), in("uuid", s.uuids...))
	}
	return strings.Join(parts, " && ")
}

// attributeIn returns the expression for devices whose attribute has one of the values.
func attributeIn(attribute string, values []string) string {
	literals := make([]string, len(values))
	for i, v := range values {
		literals[i] = "'" + inLiteral.Replace(v) + "'"
	}
	if len(literals) == 1 {
		return attribute + " == " + literals[0]
	}
	return fmt.Sprintf("%s in [%s]", attribute, strings.Join(literals, ", "))
}

// inLiteral escapes characters for a CEL string.
var inLiteral = strings.NewReplacer(`\`, `\\`, `'`, `\'`, "\n", `\n`, "\r", `\r`)
