// Package version identifies the build.
package version

import "runtime/debug"

// Number is the next release of this source. The chart and the manifests also contain the number;
// make set-version writes all of them.
const Number = "v0.1.0"

// String returns Number and, if the build recorded one, the commit.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return Number
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return Number + "+" + s.Value[:12]
		}
	}
	return Number
}
