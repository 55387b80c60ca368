package cluster

import (
	"context"
	"encoding/json"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// rebootAnnotation is there while only a restart of the node cures a GPU.
const rebootAnnotation = "gpu-device-plugin.github.io/reboot.required"

// rebootPace is the shortest time between two writes of the annotation: another program may undo each of them.
const rebootPace = 10 * time.Second

// A rebootRequest is the content of the annotation, in JSON.
type rebootRequest struct {
	Since time.Time `json:"since"`
	// Boot is the boot ID that is to end. The Node has that of now, so that a request from before a restart can be told from a new one.
	Boot   string `json:"boot,omitempty"`
	Reason string `json:"reason"`
}

// nextRequest returns what the annotation is to be, by what it is; empty for none. While nothing is known of the GPUs it stays, unless it
// is of an earlier boot: the driver may not come, and the node would be restarted again and again.
func nextRequest(is, boot, reason string, known bool, now time.Time) string {
	var before rebootRequest
	_ = json.Unmarshal([]byte(is), &before) // one that somebody else wrote says nothing
	former := before.Boot != "" && boot != "" && before.Boot != boot
	if !known && !former {
		return is
	}
	if !known || reason == "" {
		return ""
	}
	next := rebootRequest{Since: now.UTC().Truncate(time.Second), Boot: boot, Reason: reason}
	if before.Boot == boot && !before.Since.IsZero() && before.Since.Before(now) {
		next.Since = before.Since.UTC()
	}
	text, err := json.Marshal(next)
	if err != nil { // of a year that RFC 3339 does not have
		return is
	}
	return string(text)
}

// A rebooter keeps the annotation.
type rebooter struct {
	client *kubeapi.Client
	daemon daemon.View
	boot   string
	again  *feed.Alarm

	sighting
	kept  bool      // this process keeps the annotation, or has to take it away
	wrote time.Time // when it was written last
	left  string    // what is left after it was taken away: that of another program
}

// askForReboot keeps the annotation until ctx ends, while the configuration wants that. It stays then.
func (c *Cluster) askForReboot(ctx context.Context, d daemon.View) {
	r := &rebooter{client: c.client, daemon: d, boot: c.spread.boot, again: new(feed.Alarm)}
	wake := func() []<-chan struct{} {
		_, node := r.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		_, looked := d.Snapshots.Latest()
		return []<-chan struct{}{node, configured, looked, r.again.Rings()}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "request of a restart", wake, r.step)
}

// step writes once, if the node's annotation is not as it is to be.
func (r *rebooter) step(ctx context.Context) error {
	on, node, now := r.daemon.Configs.Value().Features.Reboot, r.client.Nodes().Value(), time.Now()
	if r.kept = r.kept || on; !r.kept || node.UID == "" {
		return nil
	}
	r.see(node, now)
	reason, known := daemon.NeedsReboot(r.daemon.Snapshots.Value())
	if !on {
		reason, known = "", true
	}
	is := r.node.Annotations[rebootAnnotation]
	wanted := nextRequest(is, r.boot, oneLine(reason), known, now)
	if wanted == is || wanted == "" && is == r.left {
		r.kept = on
		return nil
	}
	if wait := rebootPace - now.Sub(r.wrote); wait > 0 {
		r.again.After(ctx, wait)
		return nil
	}
	return r.write(ctx, wanted, now)
}

// write gives the node the annotation, or takes it away.
func (r *rebooter) write(ctx context.Context, wanted string, now time.Time) error {
	var annotations map[string]string
	if wanted != "" {
		annotations = map[string]string{rebootAnnotation: wanted}
	}
	after, err := r.client.ApplyAnnotations(ctx, kubeapi.ForReboot, r.node.UID, r.node.ResourceVersion, annotations)
	if err := r.takeIn(ctx, r.client, after, err, now); err != nil {
		return err
	}
	r.wrote, r.left = now, ""
	if wanted == "" {
		r.left = after.Annotations[rebootAnnotation]
	}
	klog.FromContext(ctx).Info("Wrote to the node whether it has to be restarted", "request", wanted)
	return nil
}
