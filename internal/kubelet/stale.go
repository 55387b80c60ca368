package kubelet

import (
	"fmt"
	"time"

	"k8s.io/klog/v2"
)

// A container that mounts the kubelet's directory keeps seeing the old directory when a
// filesystem is mounted over the directory on the node. The old kubelet socket is still
// there, and refuses connections after the next restart of the kubelet. So does the socket
// of a stopped kubelet. The readiness probe tells the two apart: only a running kubelet
// calls the probe of this container.
const (
	// staleAfter is how long the kubelet's socket must refuse connections.
	staleAfter = 2 * time.Minute
	// probedWithin is the greatest age of a readiness probe that shows a running kubelet.
	probedWithin = time.Minute
)

// refusal records since when the kubelet's socket has refused connections.
type refusal struct {
	socket fileKey
	since  time.Time // zero while the socket accepts connections
	logged bool
}

// Probed records that the kubelet has called the readiness probe.
func (d *Directory) Probed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lastProbe = d.clock.Now()
}

// recordDial records whether the kubelet's socket refused a connection.
func (d *Directory) recordDial(refused bool) {
	key, err := keyOf(d.socket)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !refused || err != nil:
		d.refusal = refusal{}
	case d.refusal.socket != key:
		d.refusal = refusal{socket: key, since: d.clock.Now()}
	}
}

// checkStale returns an error that wraps ErrNoDirectory if the current socket has refused
// connections for two minutes although the kubelet runs. Without a readiness probe, a
// stopped kubelet and a replaced directory look the same. Then the process stays and logs
// the refusal once, because its exit would only help with a replaced directory.
func (d *Directory) checkStale(log klog.Logger, socket fileKey) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock.Now()
	refused := now.Sub(d.refusal.since)
	if d.refusal.since.IsZero() || d.refusal.socket != socket || refused < staleAfter {
		return nil
	}
	const mounted = "if the kubelet runs, a filesystem was mounted over its directory on the node, and this mount " +
		"shows the old directory: only a new container can see the new one"
	if d.lastProbe.IsZero() || now.Sub(d.lastProbe) > probedWithin {
		if !d.refusal.logged {
			d.refusal.logged = true
			log.Info("The kubelet refuses connections; waiting for it", "socket", d.socket, "reason", mounted)
		}
		return nil
	}
	return fmt.Errorf("%w: %s has refused connections for %v; %s",
		ErrNoDirectory, d.socket, refused.Round(time.Second), mounted)
}
