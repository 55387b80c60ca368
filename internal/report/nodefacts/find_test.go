package nodefacts_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
)

func TestFind(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, name := range []string{"host/etc/containerd", "host/proc", "host/sys", "host/dev", "host/run/nvidia/driver/dev",
		"driver/dev"} {
		if err := os.MkdirAll(filepath.Join(folder, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	host, driver := filepath.Join(folder, "host"), filepath.Join(folder, "driver")
	for name, tt := range map[string]struct {
		roots     nodefacts.Roots
		hostRoot  string
		container bool
		at        string
		host      bool // its files are visible
		libraries bool
		devices   bool
		own       bool // the container's
	}{
		"on the node": {nodefacts.Roots{Driver: "/", Dev: "/", Container: "/none"}, "", false,
			"the node's files: /", true, true, true, false},
		"in the daemon's container": {nodefacts.Roots{Driver: "/", Dev: "/", Container: host}, "", true,
			"the node's files: " + host, true, true, true, true},
		"with a driver container": {nodefacts.Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver",
			Container: driver}, "", true, "not visible", false, true, true, true},
		"with that and the node's /": {nodefacts.Roots{Driver: "/run/nvidia/driver", Dev: "/", Container: driver}, host,
			true, "the node's files: " + host, true, true, true, true},
		"with nothing mounted": {nodefacts.Roots{Driver: "/", Dev: "/", Container: "/none"}, "", true,
			"not visible", false, false, false, true},
		"on a node that is one": {nodefacts.Roots{Driver: "/", Dev: "/", Container: "/none"}, "/", true,
			"the node's files: /", true, true, true, false},
		"a folder that is not there": {nodefacts.Roots{Driver: "/", Dev: "/", Container: "/none"}, "/none", false, "",
			false, false, false, false},
	} {
		p, at, err := nodefacts.Find(tt.roots, tt.hostRoot, tt.container)
		if (err != nil) != (tt.at == "") || !strings.Contains(at, tt.at) {
			t.Errorf("%s: at %q, error %v, want at %q", name, at, err, tt.at)
		}
		got := fmt.Sprint(p.Host != nil, p.Driver != nil, p.Devices != nil, p.Container != nil)
		if want := fmt.Sprint(tt.host, tt.libraries, tt.devices, tt.own); got != want && err == nil {
			t.Errorf("%s: sees host, libraries, devices, container: %s, want %s", name, got, want)
		}
		if (p.Hidden == "") != (p.Host != nil) && err == nil {
			t.Errorf("%s: the node's files are hidden: %q", name, p.Hidden)
		}
		if strings.HasSuffix(at, host) {
			if _, err := fs.Stat(p.Host, "etc/containerd"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
