package driverroot

import (
	"testing"
	"testing/fstest"
)

func TestLibraryFolders(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64", "lib/aarch64-linux-gnu", "usr/lib64/nvidia",
		"usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib/nvidia", "usr/local/nvidia/lib64", "usr/local/nvidia/lib",
		"usr/local/lib64", "usr/local/lib/x86_64-linux-gnu", "usr/local/lib", "usr/lib", "lib",
	} {
		files, err := Find(fstest.MapFS{folder + "/libcuda.so.580.95.05": {}}, "580.95.05")
		if err != nil || files.LibraryFolder != folder || len(files.Libraries) != 1 {
			t.Errorf("%s: found in %q, %v", folder, files.LibraryFolder, err)
		}
	}
}
