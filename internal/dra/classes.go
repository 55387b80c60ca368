package dra

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A DeviceClass is one by which pods that ask for a resource get devices of claims.
type DeviceClass struct {
	Name                 string `json:"name"`
	ExtendedResourceName string `json:"extendedResourceName"`
	// Selector is an expression of CEL.
	Selector string `json:"selector"`
	// Config is the opaque configuration for its devices.
	Config []ClassConfig `json:"config,omitempty"`
}

// A ClassConfig is a part of the configuration of a DeviceClass.
type ClassConfig struct {
	Opaque ClassParameters `json:"opaque"`
}

// ClassParameters are for the driver of that name.
type ClassParameters struct {
	Driver     string         `json:"driver"`
	Parameters map[string]any `json:"parameters"`
}

// ClassNames returns the names of the classes of whole GPUs and of MIG devices: gpu.nvidia.com and mig.nvidia.com for the driver
// gpu.nvidia.com.
func ClassNames(driver string) (gpu, mig string) {
	return driver, "mig." + strings.TrimPrefix(driver, "gpu.")
}

// A NamedResource is a resource of the device plugin.
type NamedResource struct {
	Name    string
	Devices []NamedDevice
	// Shared says that several containers can have one of its devices, and MPS that they do so by MPS.
	Shared, MPS bool
}

// A NamedDevice is a device of a resource.
type NamedDevice struct {
	UUID, Model string
	Profile     string // of a MIG device
}

// Classes returns a class for each resource. Devices of resources are told apart by the first of these that does: whether they are shared,
// MIG profiles, models, UUIDs.
func Classes(driver string, of []NamedResource) []DeviceClass {
	driver = cmp.Or(driver, Driver)
	var all []DeviceClass
	for i, r := range of {
		if len(r.Devices) == 0 {
			continue
		}
		others := slices.Delete(slices.Clone(of), i, i+1)
		c := DeviceClass{Name: className(driver, r.Name), ExtendedResourceName: r.Name, Selector: r.selector(driver, others)}
		if profiles := r.values(NamedDevice.profile); r.MPS && slices.Equal(profiles, []string{""}) {
			c.Config = []ClassConfig{{ClassParameters{driver, map[string]any{
				"apiVersion": ConfigVersion, "kind": GPUConfig, "sharing": map[string]any{"strategy": string(MPS)},
			}}}}
		}
		all = append(all, c)
	}
	return all
}

var notInClass = regexp.MustCompile(`[^a-z0-9.-]+`)

// className returns the name of the class for a resource: that of GPUs for nvidia.com/gpu.
func className(driver, resource string) string {
	if resource == "nvidia.com/gpu" {
		gpu, _ := ClassNames(driver)
		return gpu
	}
	domain, name, _ := strings.Cut(strings.ToLower(resource), "/")
	return strings.Trim(notInClass.ReplaceAllString(name, "-"), "-.") + "." + domain
}

func (d NamedDevice) profile() string { return d.Profile }
func (d NamedDevice) model() string   { return d.Model }
func (d NamedDevice) uuid() string    { return d.UUID }

// values returns what the devices of a resource have of something, each value once.
func (r NamedResource) values(of func(NamedDevice) string) []string {
	all := make([]string, len(r.Devices))
	for i, d := range r.Devices {
		all[i] = of(d)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// selector returns the expression that is true for the devices of a resource, and for none of others.
func (r NamedResource) selector(driver string, others []NamedResource) string {
	profiles := r.values(NamedDevice.profile)
	parts := []string{fmt.Sprintf("device.driver == '%s'", driver)}
	kinds := []string{typeMIG}
	if i := slices.Index(profiles, ""); i >= 0 {
		if profiles = slices.Delete(profiles, i, i+1); len(profiles) == 0 {
			kinds = nil
		}
		kinds = append([]string{typeGPU}, kinds...)
	}
	parts = append(parts, attributeIn(driver, "type", kinds))
	if len(kinds) == 1 && kinds[0] == typeMIG {
		parts = append(parts, attributeIn(driver, "profile", profiles))
	}
	domain, shared, _ := strings.Cut(SharedAttribute, "/")
	isShared := fmt.Sprintf("'%s' in device.attributes['%s']", shared, domain)
	if !r.Shared {
		isShared = "!(" + isShared + ")"
	}
	parts = append(parts, isShared)
	rivals := slices.DeleteFunc(others, func(o NamedResource) bool {
		return o.Shared != r.Shared || r.apartFrom(o, NamedDevice.profile)
	})
	for _, attribute := range []struct {
		name string
		of   func(NamedDevice) string
	}{{"productName", NamedDevice.model}, {"uuid", NamedDevice.uuid}} {
		if len(rivals) > 0 && !slices.ContainsFunc(rivals, func(o NamedResource) bool { return !r.apartFrom(o, attribute.of) }) {
			parts = append(parts, attributeIn(driver, attribute.name, r.values(attribute.of)))
			break
		}
	}
	return strings.Join(parts, " && ")
}

// apartFrom reports whether two resources have no value of something in common.
func (r NamedResource) apartFrom(other NamedResource, of func(NamedDevice) string) bool {
	there := other.values(of)
	return !slices.ContainsFunc(r.values(of), func(v string) bool { return slices.Contains(there, v) })
}

// attributeIn returns the expression that is true for devices with one of the values.
func attributeIn(driver, name string, values []string) string {
	attribute := fmt.Sprintf("device.attributes['%s'].%s", driver, name)
	if len(values) == 1 {
		return fmt.Sprintf("%s == '%s'", attribute, values[0])
	}
	return fmt.Sprintf("%s in ['%s']", attribute, strings.Join(values, "', '"))
}
