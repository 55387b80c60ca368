// Package version says which build this is. Any package may import it.
package version

import "runtime/debug"

// version is set by the linker (-X) in released builds.
var version = "v0.0.0-dev"

// String returns the version, and the commit it was built from where the build recorded one.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return version + "+" + s.Value[:12]
		}
	}
	return version
}
