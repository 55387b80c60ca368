package nodefiles_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
)

func TestPIDNamespace(t *testing.T) {
	t.Parallel()
	namespace := func(name string) fstest.MapFS {
		return fstest.MapFS{"proc/self/ns/pid": {Data: []byte(name), Mode: fs.ModeSymlink}}
	}
	for name, test := range map[string]struct {
		root fstest.MapFS
		want bool
	}{
		"host":      {namespace("pid:[4026531836]"), false},
		"container": {namespace("pid:[4026532619]"), true},
		"no /proc":  {fstest.MapFS{}, true},
	} {
		if got := nodefiles.HasOwnPIDNamespace(test.root); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestHidesProcesses(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{"pid:[4026531836]": false, "pid:[4026532619]": true, "": false} {
		root := fstest.MapFS{}
		if name != "" {
			root["proc/1/ns/pid"] = &fstest.MapFile{Data: []byte(name), Mode: fs.ModeSymlink}
		}
		if got := nodefiles.HidesProcesses(root); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}
