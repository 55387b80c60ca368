package health

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
)

// Rule is how an operator wants an XID to be treated.
type Rule string

// The rules.
const (
	// RuleCatalog: as the catalog says.
	RuleCatalog Rule = ""
	// RuleIgnore: counted, and nothing else.
	RuleIgnore Rule = "ignore"
	// RuleSuspect: the recovery action of the driver decides.
	RuleSuspect Rule = "suspect"
	// RuleFatal: Unhealthy at once, until there is evidence of a reset or an operator clears the
	// fault.
	RuleFatal Rule = "fatal"
)

// Overrides are an operator's rules for XIDs. They win over the catalog, but not over readings: a
// lost GPU is Lost whatever they say. The zero value has no rules. A value is not changed once it
// is in use.
type Overrides struct {
	rest Rule
	xids map[uint64]Rule
}

// Rule returns the rule for an XID.
func (o Overrides) Rule(code uint64) Rule {
	if r, ok := o.xids[code]; ok {
		return r
	}
	return o.rest
}

// Off reports whether the operator switched off all checks, and not only those of some XIDs: every
// XID is ignored.
func (o Overrides) Off() bool {
	if o.rest != RuleIgnore {
		return false
	}
	for _, r := range o.xids {
		if r != RuleIgnore {
			return false
		}
	}
	return true
}

// With returns a copy in which code has the given rule.
func (o Overrides) With(code uint64, r Rule) Overrides {
	xids := maps.Clone(o.xids)
	if xids == nil {
		xids = make(map[uint64]Rule)
	}
	xids[code] = r
	return Overrides{rest: o.rest, xids: xids}
}

// Equal reports whether two Overrides have the same rules.
func (o Overrides) Equal(other Overrides) bool {
	return o.rest == other.rest && maps.Equal(o.xids, other.xids)
}

// ParseOverrides reads the values of DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS: each a
// comma-separated list of XIDs, or "all" ("xids" means the same). A disabled XID is ignored; an
// enabled one is fatal, as every XID is to the reference plugin that these variables come from, and
// wins over a disabled one. For all other XIDs the catalog decides. With all XIDs disabled and none
// enabled, all checks are off, as there. Entries that are no number are left out and returned, each
// as a sentence for a warning.
func ParseOverrides(disable, enable string) (o Overrides, malformed []string) {
	apply := func(variable, list string, r Rule) {
		for entry := range strings.SplitSeq(list, ",") {
			entry = strings.ToLower(strings.TrimSpace(entry))
			switch entry {
			case "":
				continue
			case "all", "xids":
				o = Overrides{rest: r}
				continue
			}
			code, err := strconv.ParseUint(entry, 10, 64)
			if err != nil {
				malformed = append(malformed, fmt.Sprintf("%s: %q is neither an XID nor \"all\" and is left out", variable, entry))
				continue
			}
			o = o.With(code, r)
		}
	}
	apply("DP_DISABLE_HEALTHCHECKS", disable, RuleIgnore)
	apply("DP_ENABLE_HEALTHCHECKS", enable, RuleFatal)
	return o, malformed
}
