package cdi

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// An image of Debian's kind may run on a host of Red Hat's kind, whose folder does not tell the
// architecture.
func TestLoadersLookInFoldersOfTheirArchitecture(t *testing.T) {
	t.Parallel()
	for arch, want := range map[string][]string{
		"amd64": {"/usr/lib/x86_64-linux-gnu", "/usr/lib64"},
		"arm64": {"/usr/lib/aarch64-linux-gnu", "/usr/lib64"},
	} {
		if diff := cmp.Diff(want, loaderFolders(arch)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", arch, diff)
		}
	}
}
