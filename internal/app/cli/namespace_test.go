package cli

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func TestConfined(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		root fstest.MapFS
		want bool
	}{
		"host":      {namespace("pid:[4026531836]"), false},
		"container": {namespace("pid:[4026532619]"), true},
		"no /proc":  {fstest.MapFS{}, true},
	} {
		if got := hasOwnPIDNamespace(test.root); got != test.want {
			t.Errorf("%s: hasOwnPIDNamespace() = %v, want %v", name, got, test.want)
		}
		if got := len(unseenProcesses(config.Config{}, test.root)) > 0; got != test.want {
			t.Errorf("%s: a plan warns of processes that are not shown: %v, want %v", name, got, test.want)
		}
		if got := unseenProcesses(config.Config{Startup: config.Startup{Simulate: "t4"}}, test.root); got != nil {
			t.Errorf("%s: a simulated node: %q", name, got)
		}
	}
}

func namespace(name string) fstest.MapFS {
	return fstest.MapFS{"proc/self/ns/pid": {Data: []byte(name), Mode: fs.ModeSymlink}}
}
