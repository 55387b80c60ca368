package kubelet

import (
	"fmt"
	"time"

	"k8s.io/klog/v2"
)

// A container that mounts kubelet's directory goes on seeing the old one when a filesystem is
// mounted over the directory on the node. Kubelet's socket is still there, and refuses connections
// from the next restart of kubelet on. So does the socket of a kubelet that is down: what tells the
// two apart is whether kubelet calls the readiness probe of this container.
const (
	// staleAfter is how long kubelet's socket has to refuse connections.
	staleAfter = 2 * time.Minute
	// probedWithin is how long ago the readiness probe may have been called by a kubelet that is
	// there.
	probedWithin = time.Minute
)

// refusal is since when a kubelet's socket has refused connections.
type refusal struct {
	socket fileKey
	since  time.Time // zero while it does not
	logged bool
}

// Probed notes that kubelet has called the readiness probe.
func (d *Directory) Probed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.probed = d.clock.Now()
}

// dialled notes whether kubelet's socket refused a connection.
func (d *Directory) dialled(refused bool) {
	key, err := keyOf(d.socket)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !refused || err != nil:
		d.refuses = refusal{}
	case d.refuses.socket != key:
		d.refuses = refusal{socket: key, since: d.clock.Now()}
	}
}

// checkStale returns an error that wraps ErrNoDirectory if the socket that is there has refused
// connections for two minutes, and kubelet is there. Where kubelet does not call a readiness probe,
// nothing tells a kubelet that is down from another directory: the process stays, as its end would
// help with the second one only, and says so once.
func (d *Directory) checkStale(log klog.Logger, socket fileKey) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock.Now()
	refused := now.Sub(d.refuses.since)
	if d.refuses.since.IsZero() || d.refuses.socket != socket || refused < staleAfter {
		return nil
	}
	const mounted = "if kubelet runs, a filesystem was mounted over its directory on the node, and this mount shows the old directory: " +
		"only a new container can see the new one"
	if d.probed.IsZero() || now.Sub(d.probed) > probedWithin {
		if !d.refuses.logged {
			d.refuses.logged = true
			log.Info("Kubelet refuses connections; waiting for it", "socket", d.socket, "reason", mounted)
		}
		return nil
	}
	return fmt.Errorf("%w: %s has refused connections for %v; %s",
		ErrNoDirectory, d.socket, refused.Round(time.Second), mounted)
}
