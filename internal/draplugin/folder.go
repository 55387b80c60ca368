package draplugin

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
)

// The name of a socket of this program is gpu-device-plugin-dra-<token>-<n>.sock. The token is the process's, and tokens sort as the
// processes started. n counts the sockets of the process.
const (
	socketPrefix = "gpu-device-plugin-dra-"
	socketSuffix = ".sock"
)

// A folder is kubelet's for the sockets of plugins, as a life sees it.
type folder struct {
	path    string
	token   string          // of this process
	own     string          // name of the socket of this life; empty before it is made
	refused map[string]bool // sockets of other processes of this program that refused connections at the last look
	seen    time.Time       // when one of those was there last
}

// others are the other drivers of the same name.
type others struct {
	foreign string // socket of another program's that accepts connections
	later   bool   // a process of this program that started later accepts connections
	beside  bool   // another process of this program has a socket
}

// look returns which other drivers have sockets in the folder. It removes those of this program's processes that refuse connections now and
// refused them at the look before: a process listens within far less than the time between two. Sockets of others stay.
func (f *folder) look(ctx context.Context) (found others) {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return others{} // to listen there says what is wrong
	}
	before := f.refused
	f.refused = map[string]bool{}
	for _, e := range entries {
		name := e.Name()
		if e.Type()&fs.ModeSocket == 0 || name == f.own {
			continue
		}
		token, ours := parseSocketName(name)
		switch {
		case ours:
			found.beside = true
			if err := dial(ctx, filepath.Join(f.path, name)); !errors.Is(err, syscall.ECONNREFUSED) {
				found.later = token > f.token // names are sorted: the last one is the latest
			} else if f.refused[name] = true; before[name] && os.Remove(filepath.Join(f.path, name)) == nil {
				delete(f.refused, name)
				klog.FromContext(ctx).Info("Removed the socket of a process that ended", "socket", name)
			}
		case strings.HasPrefix(name, dra.Driver) && found.foreign == "": // as all drivers name theirs that use Kubernetes' library
			if err := dial(ctx, filepath.Join(f.path, name)); !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) {
				found.foreign = name
			}
		}
	}
	return found
}

// parseSocketName returns the token in the name of a socket of this program.
func parseSocketName(name string) (token string, ours bool) {
	rest, prefixed := strings.CutPrefix(name, socketPrefix)
	rest, suffixed := strings.CutSuffix(rest, socketSuffix)
	token, _, counted := strings.Cut(rest, "-")
	return token, prefixed && suffixed && counted
}

// dial connects to a socket, and closes the connection at once. It does not wait, so that no end of a wait is taken for a program that is
// there: Unix tells at once whether one listens.
func dial(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(context.WithoutCancel(ctx), "unix", path)
	if err != nil {
		return err
	}
	_ = conn.Close() // nothing was said
	return nil
}
