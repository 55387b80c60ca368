package config

import (
	"errors"
	"fmt"
	"net/url"
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
	// Source is the URL of an archive with the driver, and SHA256 the digest of the archive in lower-case
	// hexadecimal. Both are empty if the driver comes from elsewhere, such as an image.
	Source, SHA256 string
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

// setDriverSource sets the URL of an archive. An error does not repeat the URL's query or password.
func setDriverSource(c *Config, text string) error {
	const most = 2048
	u, err := url.Parse(text)
	switch {
	case text == "":
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || len(text) > most:
		return errors.New("is not a URL such as https://drivers.example.com/580.95.05.tar.gz")
	case u.User != nil:
		return errors.New("has a user or a password, which everybody could read here: use a server that needs none; " +
			"driver.sha256 says whether the file is the right one")
	case strings.HasSuffix(u.Path, ".run"):
		return errors.New("is a .run file, which has no kernel modules for the node: pack it first, with gpu-driver " +
			"pack --archive, and give the URL of that archive")
	}
	c.DriverChange.Source = text
	return nil
}

var digestText = regexp.MustCompile(`^[0-9a-f]{64}$`)

func setDriverSHA256(c *Config, text string) error {
	digest := strings.ToLower(strings.TrimPrefix(text, "sha256:"))
	if text != "" && !digestText.MatchString(digest) {
		return fmt.Errorf("%q is not a SHA-256 digest in hexadecimal, which gpu-driver pack prints for the archive",
			text)
	}
	c.DriverChange.SHA256 = digest
	return nil
}

// driver checks the range of accepted drivers, and the driver to which the node changes.
func (d *document) driver(c *Config) {
	v := c.DriverChange.Version
	if v != "" && c.Rollout.Slots == 0 && d.reads("driver-version", "rollout-slots") {
		d.refuse("driver.version", "the cluster has no slots, so no driver could be changed: set rollout.slots")
	}
	switch change := c.DriverChange; {
	case change.Source != "" && change.SHA256 == "":
		d.refuse("driver.source", "nothing is downloaded without its digest: set driver.sha256 to the digest that "+
			"gpu-driver pack prints for the archive")
	case change.Source == "" && change.SHA256 != "":
		d.refuse("driver.sha256", "is the digest of an archive, and no archive is given: set driver.source to its URL")
	case change.Source != "" && v == "":
		d.refuse("driver.source", "the node changes to no driver: set driver.version to the version in the archive")
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
