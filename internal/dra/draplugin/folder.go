package draplugin

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// socketKind stands in socket names of the driver where socket names of device plugins have the
// resource.
const socketKind = "dra"

// A folder is the kubelet's folder for plugin sockets, as seen by a life.
type folder struct {
	path     string
	driver   string // name of the driver
	token    string // of this process
	left     kubelet.Sweep
	lastSeen time.Time // when another process of this program last had a socket here
}

// others are the other drivers of the same name.
type others struct {
	foreign string // socket of another program that accepts connections
	beside  bool   // another process of this program has a socket
	serves  bool   // the other process accepts connections, so it still runs
}

// registers reports whether a socket has the name that Kubernetes' driver library uses.
func registers(socket, driver string) bool {
	rest, is := strings.CutPrefix(socket, driver)
	return is && (strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, ".sock"))
}

// look returns the other drivers with sockets in the folder. It removes sockets of dead
// processes of this program, and no others.
func (f *folder) look(ctx context.Context) (found others) {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return others{} // listening on the socket will report the problem
	}
	var names []string
	for _, e := range entries {
		name := e.Name()
		if e.Type()&fs.ModeSocket == 0 {
			continue
		}
		kind, token, ours := kubelet.ParseSocketName(name)
		switch {
		case ours && token == f.token: // of this process
		case ours && kind == socketKind:
			names = append(names, name)
		case registers(name, f.driver) && found.foreign == "":
			if err := kubelet.DialOnce(ctx, filepath.Join(f.path, name)); !errors.Is(err, syscall.ECONNREFUSED) &&
				!errors.Is(err, fs.ErrNotExist) {
				found.foreign = name
			}
		}
	}
	found.beside = len(names) > 0
	found.serves = len(f.left.Look(ctx, f.path, names)) < len(names)
	return found
}
