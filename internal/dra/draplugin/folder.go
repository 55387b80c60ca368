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

// socketKind is what names of the driver's sockets have where those of plugins have their resource.
const socketKind = "dra"

// A folder is kubelet's for the sockets of plugins, as a life sees it.
type folder struct {
	path   string
	driver string // its name
	token  string // of this process
	left   kubelet.Sweep
	seen   time.Time // when another process of this program had a socket there last
}

// others are the other drivers of the same name.
type others struct {
	foreign string // socket of another program's that accepts connections
	beside  bool   // another process of this program has a socket
	serves  bool   // one of these accepts connections: it has not ended
}

// registers reports whether a socket has the name that all drivers give theirs that use Kubernetes'
// library.
func registers(socket, driver string) bool {
	rest, is := strings.CutPrefix(socket, driver)
	return is && (strings.HasPrefix(rest, "-") || strings.HasPrefix(rest, ".sock"))
}

// look returns which other drivers have sockets in the folder. It removes those that dead processes
// of this program left. Sockets of others stay.
func (f *folder) look(ctx context.Context) (found others) {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return others{} // to listen there says what is wrong
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
