// Package version says which build this is.
package version

import "runtime/debug"

// Number is the release that this source becomes. The chart and the manifests name it too; make
// set-version writes all of them.
const Number = "v0.1.0"

// String returns Number, and the commit it was built from where the build recorded one.
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
