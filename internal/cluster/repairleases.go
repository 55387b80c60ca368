package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// The annotations of Leases about repairs. kubectl-gpu shows them.
const (
	repairStatus = "gpu-device-plugin.github.io/repair.status"
	repairAsked  = "gpu-device-plugin.github.io/repair.asked"
	repairReason = "gpu-device-plugin.github.io/repair.reason"
)

// gpuNodes selects the GPU nodes of the cluster.
const gpuNodes = "nvidia.com/gpu.present=true"

const (
	// repairReread is how long an answer of the cluster counts while a node asks for a repair.
	repairReread = time.Minute
	// maxReason limits a reason in the Lease, in bytes, and maxShown the repairs.
	maxReason = 300
	maxShown  = 16
)

// waitingForRepair is the answer before the cluster was asked.
const waitingForRepair = "waiting for the other nodes' repairs to be read"

// A repairs task has the Lease of this node with its repairs, and knows whether the repairs of the
// cluster are stopped. A node without a broken GPU has no Lease, and reads them once at its start.
type repairs struct {
	client    *kubeapi.Client
	daemon    daemon.View
	alarm     *feed.Alarm
	admission *admission // to repair a GPU

	// Used by the task alone.
	listed    bool           // the Leases were read since the start
	namespace string         // of the Leases
	own       *kubeapi.Lease // nil if this node has none
	askedAt   time.Time      // since when the node asks; zero if it does not
	nextRead  time.Time
}

func newRepairs() *repairs {
	return &repairs{alarm: new(feed.Alarm), admission: newAdmission(waitingForRepair, waitingForRepair)}
}

// RequestRepair returns why a repair of this node must not begin now; nil while the repairs of the cluster
// are not stopped and the node has a slot. The caller repeats the request until then.
func (c *Cluster) RequestRepair(what string) error {
	if err := c.repairs.admission.request(what); err != nil {
		return err
	}
	return c.RequestSlot(what)
}

// followRepairs keeps the Lease of this node until ctx ends.
func (c *Cluster) followRepairs(ctx context.Context, d daemon.View) {
	r := c.repairs
	r.client, r.daemon, r.listed, r.own, r.askedAt = c.client, d, false, nil, time.Time{}
	defer r.admission.answer("this process does not lead", time.Time{})
	wake := func() []<-chan struct{} {
		_, nodeChanged := r.client.Nodes().Latest()
		_, configChanged := d.Configs.Latest()
		_, repairsChanged := d.Repairs.Latest()
		_, requestChanged := r.admission.begun.Latest()
		return []<-chan struct{}{nodeChanged, configChanged, repairsChanged, requestChanged, r.alarm.Rings()}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "repairs of the cluster", wake, func(ctx context.Context) error {
		err := r.step(ctx)
		if err != nil {
			r.admission.answer(err.Error(), time.Time{})
			r.nextRead = time.Time{}
		}
		return err
	})
}

// step writes the Lease of this node, and answers a request.
func (r *repairs) step(ctx context.Context) error {
	c, node, s, now := r.daemon.Configs.Value(), r.client.Nodes().Value(), r.daemon.Repairs.Value(), time.Now()
	isOff := c.Repair == repair.Off
	if isOff && r.own == nil || !isOff && (node.UID == "" || !s.Known) {
		return nil
	}
	if node.UID == "" {
		node = holderOf(*r.own)
	}
	if !r.listed {
		r.namespace = cmp.Or(c.Rollout.Namespace, c.Namespace)
		if _, err := r.read(ctx, node); err != nil {
			return err
		}
	}
	switch asking := r.admission.pending(now) != ""; {
	case !asking:
		r.askedAt, r.nextRead = time.Time{}, time.Time{}
	case r.askedAt.IsZero():
		r.askedAt = now
	}
	if err := r.write(ctx, node, s, now); err != nil {
		return err
	}
	if r.askedAt.IsZero() {
		return nil
	}
	r.alarm.After(ctx, requestLife) // to notice the end of the request
	if now.Before(r.nextRead) {
		return nil
	}
	reason, err := r.judge(ctx, node, now)
	if err != nil {
		return err
	}
	r.admission.answer(reason, time.Time{})
	r.nextRead = now.Add(repairReread/2 + rand.N(repairReread/2))
	return nil
}

// judge returns why no repair may begin; empty if it may. It stops the repairs of the cluster if too
// many nodes ask.
func (r *repairs) judge(ctx context.Context, node kubeapi.Node, now time.Time) (string, error) {
	f, err := r.read(ctx, node)
	if err != nil {
		return "", err
	}
	if f.isStopped {
		return stoppedText(f.reason), nil
	}
	f.asks = append(f.asks, repair.Ask{Node: node.Name, At: r.askedAt})
	asking := repair.Asking(f.asks, f.resumed, now)
	if repair.StopReason(asking, 0) == "" { // few nodes, whatever the size of the cluster
		return "", nil
	}
	nodes, err := r.client.NodesWith(ctx, gpuNodes, true)
	if err != nil {
		return "", err
	}
	reason := repair.StopReason(asking, len(nodes))
	if reason == "" {
		return "", nil
	}
	klog.FromContext(ctx).Info("Stopping the repairs of the cluster", "reason", reason)
	_, err = r.client.CreateLease(ctx, r.namespace, kubeapi.Lease{
		Name: repair.Stopped, IsRepair: true, Holder: node.Name, Acquired: now, Renewed: now,
		Annotations: map[string]string{repairReason: keeper.OneLine(reason)},
	})
	if err != nil && !kubeapi.IsStale(err) { // another node may have stopped them
		return "", err
	}
	return stoppedText(reason), nil
}

func stoppedText(reason string) string {
	return fmt.Sprintf("the repairs of the cluster are stopped: %s; look for a common cause, and continue with "+
		"kubectl gpu repair resume", reason)
}

// A fleet is what the Leases say about the other nodes.
type fleet struct {
	isStopped bool
	reason    string
	resumed   time.Time
	asks      []repair.Ask
}

// read reads the Leases, and sets own.
func (r *repairs) read(ctx context.Context, node kubeapi.Node) (fleet, error) {
	leases, err := r.client.RepairLeases(ctx, r.namespace)
	if err != nil {
		return fleet{}, err
	}
	r.listed, r.own = true, nil
	var f fleet
	for _, l := range leases {
		switch asked, err := time.Parse(time.RFC3339, l.Annotations[repairAsked]); {
		case l.Name == repair.Stopped:
			f.isStopped, f.reason = true, l.Annotations[repairReason]
		case l.Name == repair.Resumed:
			f.resumed = l.Renewed
		case !strings.HasPrefix(l.Name, repair.LeasePrefix):
		case l.Holder == node.Name && l.HolderUID == node.UID:
			r.own = &l
		case err == nil:
			f.asks = append(f.asks, repair.Ask{Node: strings.TrimPrefix(l.Name, repair.LeasePrefix), At: asked})
		}
	}
	return f, nil
}

// write makes the Lease of this node show the repairs. A node without any has no Lease.
func (r *repairs) write(ctx context.Context, node kubeapi.Node, s repair.Status, now time.Time) error {
	if len(s.Steps)+len(s.Attempts) == 0 {
		if r.own == nil {
			return nil
		}
		if err := r.client.DeleteLease(ctx, r.namespace, *r.own); err != nil {
			return err
		}
		r.own = nil
		return nil
	}
	text, err := json.Marshal(shorten(s))
	if err != nil {
		return fmt.Errorf("encode the repairs: %w", err)
	}
	wanted := map[string]string{repairStatus: string(text)}
	switch {
	case !r.askedAt.IsZero():
		wanted[repairAsked] = r.askedAt.UTC().Format(time.RFC3339)
	case r.own != nil && r.own.Annotations[repairAsked] != "":
		wanted[repairAsked] = r.own.Annotations[repairAsked]
	}
	if r.own != nil && maps.Equal(r.own.Annotations, wanted) {
		return nil
	}
	next := kubeapi.Lease{Name: repair.LeasePrefix + node.Name, Holder: node.Name, HolderUID: node.UID, Acquired: now}
	write := r.client.CreateLease
	if r.own != nil {
		next, write = *r.own, r.client.UpdateLease
	}
	next.IsRepair, next.Renewed, next.Annotations = true, now, wanted
	stored, err := write(ctx, r.namespace, next)
	if kubeapi.IsStale(err) { // of an earlier Node of this name, or written by somebody else
		r.listed = false
	}
	if err != nil {
		return err
	}
	r.own = &stored
	return nil
}

// shorten limits the size of the annotation. The newest repairs stay.
func shorten(s repair.Status) repair.Status {
	short := func(text string) string {
		text = keeper.OneLine(text)
		if len(text) > maxReason {
			text = strings.ToValidUTF8(text[:maxReason], "") + "…"
		}
		return text
	}
	steps := append([]repair.Step(nil), s.Steps...)
	for i := range steps {
		steps[i].Reason, steps[i].Fault = short(steps[i].Reason), short(steps[i].Fault)
	}
	attempts := append([]repair.Attempt(nil), s.Attempts[max(0, len(s.Attempts)-maxShown):]...)
	for i := range attempts {
		attempts[i].Before, attempts[i].After = short(attempts[i].Before), short(attempts[i].After)
	}
	s.Steps, s.Attempts = steps[:min(len(steps), maxShown)], attempts
	return s
}
