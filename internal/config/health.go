package config

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
)

// health puts the fault settings of file and environment into the Config. An environment variable
// overrides the file.
func (d *document) health(c *Config, s Sources) {
	interval := c.Health.Interval // set by an option
	c.Health = health.Default()
	c.Health.Interval = interval
	if s.Env != nil {
		disable, _ := s.Env("DP_DISABLE_HEALTHCHECKS")
		enable, _ := s.Env("DP_ENABLE_HEALTHCHECKS")
		overrides, malformed := health.ParseOverrides(disable, enable)
		c.Health.Overrides = overrides
		for _, text := range malformed {
			d.warn("environment", 0, text)
		}
		if overrides.Off() {
			d.warn("environment", 0, "DP_DISABLE_HEALTHCHECKS: all health checks are off, and a GPU is given to "+
				"work whatever is wrong with it")
		}
	}
	given := d.config.Health
	if given == nil {
		return
	}
	if given.XIDs != nil {
		d.xids(c, *given.XIDs)
	}
	c.Health.Manual = d.either("health.recovery", given.Recovery, "auto", "manual")
	c.Health.FabricReported = d.either("health.fabric", given.Fabric, "gate", "report")
	c.Health.IMEXGates = d.either("health.imex", given.IMEX, "report", "gate")
	c.Health.ReopenAlways = d.either("health.reopen", given.Reopen, "careful", "always")
	c.Health.EnergyEvidence = given.EnergyEvidence != nil && *given.EnergyEvidence
	d.length("health.suspectLimit", given.SuspectLimit, &c.Health.SuspectLimit, "1s", "1h")
	d.length("health.unknownGrace", given.UnknownGrace, &c.Health.UnknownGrace, "1s", "24h")
	d.length("health.flapWindow", given.FlapWindow, &c.Health.FlapWindow, "1m", "720h")
	if given.FlapLimit != nil {
		c.Health.FlapLimit = *given.FlapLimit
		if c.Health.FlapLimit < 1 {
			d.refuse("health.flapLimit", fmt.Sprintf("must be 1 or more, not %d", c.Health.FlapLimit))
		}
	}
}

// either reports whether the file has the second of two values for a key; the first is the default.
func (d *document) either(path string, given *string, first, second string) bool {
	if given != nil && *given != first && *given != second {
		d.refuse(path, fmt.Sprintf("%q is not one of: %s, %s", *given, first, second))
	}
	return given != nil && *given == second
}

// xids puts the file's rules for XIDs into the Config, unless the environment has rules.
func (d *document) xids(c *Config, given v1.XIDRules) {
	environment := c.Health.Overrides
	said := map[int]string{}
	for _, list := range []struct {
		path  string
		codes []int
		rule  health.Rule
	}{
		{"health.xids.ignore", given.Ignore, health.RuleIgnore},
		{"health.xids.suspect", given.Suspect, health.RuleSuspect},
		{"health.xids.fatal", given.Fatal, health.RuleFatal},
	} {
		for i, code := range list.codes {
			at := item(list.path, i)
			switch {
			case code < 0:
				d.refuse(at, fmt.Sprintf("%d is not an XID", code))
				continue
			case said[code] != "":
				d.refuse(at, fmt.Sprintf("XID %d already has a rule at %s", code, said[code]))
			}
			said[code] = at
			if environment.Rule(uint64(code)) == health.RuleCatalog {
				c.Health.Overrides = c.Health.Overrides.With(uint64(code), list.rule)
			}
		}
	}
}

// length puts a duration of the file into the Config, within two bounds.
func (d *document) length(path string, given *v1.Duration, into *time.Duration, least, most string) {
	if given == nil {
		return
	}
	*into = time.Duration(*given)
	low, errLow := time.ParseDuration(least)
	high, errHigh := time.ParseDuration(most)
	if err := errors.Join(errLow, errHigh); err != nil {
		panic(err) // the bounds are constants
	}
	if *into < low || *into > high {
		d.refuse(path, fmt.Sprintf("must be from %s to %s, not %s", least, most, *into))
	}
}
