package config_test

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// TestDriversThatAreAccepted: those from one version on, and those before another one. A driver
// that has not answered is not refused.
func TestDriversThatAreAccepted(t *testing.T) {
	t.Parallel()
	for file, versions := range map[string]map[string]string{
		"": {"": "", "340.108": "", "620.1": ""},
		`driver: {atLeast: "580.95.05"}`: {"": "", "580.95.05": "", "580.126": "", "595.1": "",
			"580.95.04": "atLeast is 580.95.05", "580": "atLeast"},
		`driver: {below: "595"}`: {"": "", "580.95.05": "", "595": "below is 595", "595.0.1": "below",
			"610.43.02": "below"},
		`driver: {atLeast: "580", below: "580.100"}`: {"580.95.05": "", "580.100": "below", "575.1": "atLeast"},
	} {
		c, _, err := sources(t, "", "").Resolve("", []byte(file))
		if err != nil {
			t.Fatal(err)
		}
		for version, want := range versions {
			if got := c.Accepted.Refuses(inventory.Driver{Version: version}); (got == "") != (want == "") ||
				!strings.Contains(got, want) {
				t.Errorf("%s: driver %q is refused: %q, want %q", file, version, got, want)
			}
		}
	}
	for file, want := range map[string]string{
		`driver: {atLeast: "R580"}`:                  `driver.atLeast: "R580" is not a version such as 580 or 580.95.05`,
		`driver: {atLeast: "595", below: "595"}`:     "driver: no driver is accepted: atLeast is 595 and below is 595",
		`driver: {atLeast: "580", below: "570.100"}`: "no driver is accepted",
	} {
		if _, _, err := sources(t, "", "").Resolve("", []byte(file)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
	c, _, err := sources(t, "DRIVER_BELOW=600", "--driver-at-least=595").Resolve("", []byte(`driver: {atLeast: "580"}`))
	if err != nil || c.Accepted.AtLeast != "595" || c.Accepted.Below != "600" {
		t.Errorf("%+v, %v", c.Accepted, err)
	}
}

// TestDriverChange: the driver to which a node changes is a whole version or a digest, within the
// accepted ones, and the change needs slots and gpu-node-agent.
func TestDriverChange(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0a", 32)
	const archive = "https://drivers.example.com/a/580.tar.gz?token=b"
	for file, want := range map[string]config.DriverChange{
		"":                      {},
		`driver: {version: ""}`: {},
		`driver: {version: "580.95.05"}, rollout: {slots: 1}`:                             {Version: "580.95.05"},
		`driver: {version: "550.163.01", pods: none}, rollout: {slots: 1}`:                {Version: "550.163.01", Pods: driverchange.None},
		`driver: {version: "` + digest + `", pods: evict}, rollout: {slots: 2}`:           {Version: digest, Pods: driverchange.Evict},
		`driver: {version: "` + digest + `", atLeast: "580"}, rollout: {slots: 2}`:        {Version: digest},
		`driver: {version: "580.95.05", atLeast: "580", pods: wait}, rollout: {slots: 1}`: {Version: "580.95.05"},
		`driver: {version: "580.95.05", source: "` + archive + `", sha256: "` + digest[7:] + `"}, rollout: {slots: 1}`: {Version: "580.95.05",
			Source: archive, SHA256: digest[7:]},
		`driver: {version: "580.95.05", source: "http://a:8080/b", sha256: "` + strings.ToUpper(digest[7:]) + `"}, rollout: {slots: 1}`: {Version: "580.95.05",
			Source: "http://a:8080/b", SHA256: digest[7:]},
		`driver: {version: "` + digest + `", source: "http://a/b", sha256: "` + digest + `"}, rollout: {slots: 1}`: {Version: digest,
			Source: "http://a/b", SHA256: digest[7:]},
	} {
		s := sources(t, "", "--node-name=n")
		s.Program = config.NodeAgent
		if c, _, err := s.Resolve("", []byte("{"+file+"}")); err != nil || c.DriverChange != want {
			t.Errorf("%s: %+v, %v; want %+v", file, c.DriverChange, err, want)
		}
	}
	for file, want := range map[string]string{
		`driver: {version: "580"}, rollout: {slots: 1}`:                                                  `driver.version: "580" is neither a whole version`,
		`driver: {version: "sha256:0a"}, rollout: {slots: 1}`:                                            "nor the digest of a driver folder",
		`driver: {version: "580.95.05"}`:                                                                 "the cluster has no slots, so no driver could be changed",
		`driver: {version: "580.95.05", below: "580"}, rollout: {slots: 1}`:                              "driver.version: driver 580.95.05 is not accepted",
		`driver: {version: "580.95.05", source: "https://a/b"}, rollout: {slots: 1}`:                     "driver.source: nothing is downloaded without its digest: set driver.sha256",
		`driver: {version: "580.95.05", sha256: "` + digest + `"}, rollout: {slots: 1}`:                  "driver.sha256: is the digest of an archive, and no archive is given: set driver.source",
		`driver: {source: "https://a/b", sha256: "` + digest + `"}`:                                      "driver.source: the node changes to no driver: set driver.version",
		`driver: {version: "580.95.05", source: "ftp://a/b", sha256: "` + digest + `"}`:                  "driver.source: is not a URL such as https://",
		`driver: {version: "580.95.05", source: "drivers/580.tar.gz", sha256: "` + digest + `"}`:         "driver.source: is not a URL such as https://",
		`driver: {version: "580.95.05", source: "https://u:p@a/b", sha256: "` + digest + `"}`:            "driver.source: has a user or a password",
		`driver: {version: "580.95.05", source: "https://a/NVIDIA-Linux.run", sha256: "` + digest + `"}`: "driver.source: is a .run file, which has no kernel modules for the node: pack it first",
		`driver: {version: "580.95.05", source: "https://a/b", sha256: "md5:0a"}, rollout: {slots: 1}`:   `driver.sha256: "md5:0a" is not a SHA-256 digest`,
		`driver: {version: "580.95.05", pods: kill}, rollout: {slots: 1}`:                                `driver.pods: "kill" is not one of: wait, evict, none`,
	} {
		s := sources(t, "", "--node-name=n")
		s.Program = config.NodeAgent
		if _, _, err := s.Resolve("", []byte("{"+file+"}")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
	s := sources(t, "", "")
	s.Program = config.DevicePlugin
	if _, _, err := s.Resolve("", []byte(`{driver: {version: "580.95.05"}, rollout: {slots: 1}}`)); err == nil ||
		!strings.Contains(err.Error(), "run gpu-node-agent instead") {
		t.Errorf("the device plugin alone: %v", err)
	}
}
