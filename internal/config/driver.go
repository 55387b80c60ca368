package config

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// A DriverRange is a range of driver versions, such as "580" or "580.95.05".
type DriverRange struct {
	// AtLeast is the oldest accepted version, and Below the oldest version that is too new; empty
	// for none.
	AtLeast, Below string
}

// Refuses returns why a driver is not accepted; empty if it is accepted or its version is unknown.
func (r DriverRange) Refuses(d inventory.Driver) string {
	switch {
	case d.Version == "":
		return ""
	case r.AtLeast != "" && d.Before(r.AtLeast):
		return fmt.Sprintf("driver %s is not accepted: driver.atLeast is %s", d.Version, r.AtLeast)
	case r.Below != "" && !d.Before(r.Below):
		return fmt.Sprintf("driver %s is not accepted: driver.below is %s", d.Version, r.Below)
	}
	return ""
}

var versionText = regexp.MustCompile(`^\d{1,5}(\.\d{1,5}){0,3}$`)

// driverVersion sets an option that is a version of the driver.
func driverVersion(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, text string) error {
		if text != "" && !versionText.MatchString(text) {
			return fmt.Errorf("%q is not a version such as 580 or 580.95.05", text)
		}
		*field(c) = text
		return nil
	}
}

// A DriverChange is the driver to which the node changes.
type DriverChange struct {
	// Version is a version such as 580.95.05, or a digest such as sha256:0a...; empty for none.
	Version string
	Pods    driverchange.Pods
}

var wholeVersion = regexp.MustCompile(`^(\d{3,4}\.\d{1,4}(\.\d{1,4})?|sha256:[0-9a-f]{64})$`)

func setDriverChange(c *Config, text string) error {
	if text != "" && !wholeVersion.MatchString(text) {
		return fmt.Errorf("%q is neither a whole version such as 580.95.05 nor the digest of a driver folder such as "+
			"sha256:0a..., which gpu-driver pack prints", text)
	}
	c.DriverChange.Version = text
	return nil
}

// driver checks the range of accepted drivers, and the driver to which the node changes.
func (d *document) driver(c *Config) {
	v := c.DriverChange.Version
	if v != "" && c.Rollout.Slots == 0 && d.reads("driver-version", "rollout-slots") {
		d.refuse("driver.version", "the cluster has no slots, so no driver could be changed: set rollout.slots")
	}
	if refused := c.Accepted.Refuses(inventory.Driver{Version: v}); refused != "" && !strings.HasPrefix(v, "sha256:") {
		d.refuse("driver.version", refused)
	}
	r := c.Accepted
	if r.AtLeast != "" && r.Below != "" && !(inventory.Driver{Version: r.AtLeast}).Before(r.Below) {
		d.refuse("driver", fmt.Sprintf("no driver is accepted: atLeast is %s and below is %s", r.AtLeast, r.Below))
	}
}

// setSearchPath sets the folders of the driver's libraries: paths of the driver root, with or
// without a leading slash.
func setSearchPath(c *Config, text string) error {
	c.Driver.SearchPath = nil
	for _, folder := range splitList(text) {
		folder = strings.TrimPrefix(path.Join("/", folder), "/")
		if folder == "" {
			return errors.New("names the driver root itself; give a folder below it, such as /opt/nvidia/lib64")
		}
		c.Driver.SearchPath = append(c.Driver.SearchPath, folder)
	}
	return nil
}
