package kubeapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// A Node has the fields of the daemon's own Node that this program uses. Its UID is empty if the
// Node is unknown or does not exist. A Node is immutable.
type Node struct {
	Name, UID, ResourceVersion string
	Labels, Annotations        map[string]string
	Conditions                 []Condition
	Taints                     []Taint
	// Allocatable has the amount of each resource that pods can request, in Kubernetes' format.
	Allocatable map[string]string
	// restores is the number of restores of the cluster from a backup, as far as known. Versions
	// before and after a restore cannot be compared.
	restores int
}

// A Condition is a condition of the Node in the format of the API.
type Condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	Reason             string    `json:"reason,omitempty"`
	Message            string    `json:"message,omitempty"`
	LastHeartbeatTime  time.Time `json:"lastHeartbeatTime,omitzero"`
	LastTransitionTime time.Time `json:"lastTransitionTime,omitzero"`
}

// nodeObject is a Node in the format of the API.
type nodeObject struct {
	Metadata struct {
		Name            string            `json:"name"`
		UID             string            `json:"uid"`
		ResourceVersion string            `json:"resourceVersion"`
		Labels          map[string]string `json:"labels"`
		Annotations     map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Taints []Taint `json:"taints"`
	} `json:"spec"`
	Status struct {
		Conditions  []Condition       `json:"conditions"`
		Allocatable map[string]string `json:"allocatable"`
	} `json:"status"`
}

func (n *nodeObject) node() Node {
	return Node{
		Name: n.Metadata.Name, UID: n.Metadata.UID, ResourceVersion: n.Metadata.ResourceVersion,
		Labels: n.Metadata.Labels, Annotations: n.Metadata.Annotations, Conditions: n.Status.Conditions,
		Taints:      n.Spec.Taints,
		Allocatable: n.Status.Allocatable,
	}
}

const nodesPath = "/api/v1/nodes"

const (
	// A watch is restarted after a random time between these, so that the watches of a cluster do not
	// gather at one API server.
	minWatch = 30 * time.Minute
	maxWatch = time.Hour
	// minStableWatch is how long a watch must last to reset the count of failures.
	minStableWatch = 10 * time.Second
	// idleTimeout is how long a watch may receive nothing before it is restarted: an API server sends
	// a bookmark about every minute.
	idleTimeout = 3 * time.Minute
)

// Nodes returns the feed of the daemon's own Node. It keeps the last known Node while the API
// server is unavailable.
func (c *Client) Nodes() *feed.Feed[Node] { return c.nodes }

// Problem returns the feed of the reason why the Node cannot be watched; nil while the watch works.
func (c *Client) Problem() *feed.Feed[error] { return c.problem }

// Get returns the latest version of the daemon's own Node; without a UID if it does not exist. It
// sends one request, and publishes nothing.
func (c *Client) Get(ctx context.Context) (Node, error) {
	restores := c.latestNode().restores
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath + "/" + c.node})
	if IsNotFound(err) {
		return Node{restores: restores}, nil
	}
	if err != nil {
		return Node{}, err
	}
	return c.readNode(text, restores)
}

// Watch publishes the daemon's own Node until ctx ends. It then publishes an empty Node and no
// Problem.
func (c *Client) Watch(ctx context.Context, timer clock.Clock) {
	defer c.nodes.Publish(Node{})
	c.watchCollection(ctx, timer, collection{
		what: "the node", problem: c.problem, path: func() string { return nodesPath },
		selector: func() string { return "metadata.name=" + c.node },
		list: func(ctx context.Context, from string) (string, error) {
			before, latest := c.latestNode(), from != anyVersion
			node, version, err := c.listNode(ctx, latest)
			if err != nil {
				return "", err
			}
			if node.restores = before.restores; latest && before.After(node) {
				klog.FromContext(ctx).Info(
					"The Node went back to an older version: the cluster was restored from a backup",
					"version", node.ResourceVersion, "before", before.ResourceVersion)
				node.restores++
			}
			c.nodes.Publish(c.recordNode(node))
			return version, nil
		},
		onEvent: func(kind, _ string, object []byte) error {
			var n nodeObject
			if err := json.Unmarshal(object, &n); err != nil {
				return err
			}
			switch kind {
			case eventAdded, eventModified:
				node := n.node()
				node.restores = c.latestNode().restores
				c.nodes.Publish(c.recordNode(node))
			case eventDeleted:
				c.nodes.Publish(Node{})
			}
			return nil
		},
	})
}

// latestNode returns the newest version of the Node received from the API server.
func (c *Client) latestNode() Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest
}

// recordNode stores a Node received from the API server if it is the newest, and returns it.
func (c *Client) recordNode(n Node) Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n.restores > c.latest.restores || n.restores == c.latest.restores && (n.UID != c.latest.UID ||
		n.After(c.latest)) {
		c.latest = n
	}
	return n
}

// A collection is a set of objects to watch.
type collection struct {
	what     string            // name in the log
	problem  *feed.Feed[error] // why the collection cannot be watched; nil while the watch works
	path     func() string     // for example /api/v1/nodes; called after list
	selector func() string     // field selector; called after list
	// list returns the version of the collection. The list may come from a cache, but is not older
	// than the version from. An empty from requests the latest version.
	list func(ctx context.Context, from string) (version string, err error)
	// onEvent is called with the version of each event, including bookmarks, but not for errors.
	onEvent func(kind, version string, object []byte) error
}

// anyVersion is earlier than all versions.
const anyVersion = "0"

// The types of watch events.
const (
	eventAdded    = "ADDED"
	eventModified = "MODIFIED"
	eventDeleted  = "DELETED"
)

// watchCollection watches a collection until ctx ends, and then clears its problem. Each watch
// starts with a list. A watch that continues from the last version would receive nothing for a long
// time after a restore from a backup. A watch from version 0 would save the list, but an API server
// with an etcd before 3.4.25 responds with 500 to such a watch with bookmarks. The first list may
// come from an API server that lags a little, because it is cheaper and many nodes may start
// together; later lists must not be older than the known version. Only after a possible restore
// does it request the latest version, because an API server with an etcd before 3.4.25 then reads
// all objects of the cluster.
func (c *Client) watchCollection(ctx context.Context, timer clock.Clock, w collection) {
	log := klog.FromContext(ctx).WithValues("what", w.what)
	defer w.problem.Publish(nil)
	from, failures := anyVersion, 0
	for ctx.Err() == nil {
		start := timer.Now()
		version, err := c.watchOnce(ctx, timer, w, from)
		if ctx.Err() != nil {
			return
		}
		listed := version != ""
		if from = cmp.Or(version, from); isOtherHistory(err) {
			from = ""
		}
		if listed && timer.Since(start) >= minStableWatch {
			failures = 0
		}
		failures++
		delay := Backoff(err, failures)
		if err == nil || failures == 1 && listed {
			log.V(2).Info("The watch of the API server ended", "after", delay.Round(time.Millisecond).String(),
				"reason",
				fmt.Sprint(err))
		} else {
			if w.problem.Value() == nil {
				log.Info("Cannot watch objects of the API server; the last known state stays in force", "reason",
					err.Error())
			}
			w.problem.Publish(err)
			log.V(2).Info("Cannot watch objects of the API server", "reason", err.Error(), "after",
				delay.Round(time.Millisecond).String())
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.After(delay):
		}
	}
}

// errRestored is the error of a watch that receives a version before a known version.
var errRestored = errors.New("the cluster was restored from a backup")

// isOtherHistory reports whether known versions may be from before a restore of the cluster.
func isOtherHistory(err error) bool {
	return errors.Is(err, errRestored) || apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}

// watchOnce lists the collection and then watches it until the watch ends. It returns the last
// version received; empty if the list failed.
func (c *Client) watchOnce(
	ctx context.Context, timer clock.Clock, w collection, from string,
) (version string, err error) {
	if version, err = w.list(ctx, from); err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	received := make(chan struct{})
	go cancelWhenIdle(ctx, cancel, timer.NewTimer(idleTimeout), received)
	length := minWatch + rand.N(maxWatch-minWatch)
	body, err := c.open(ctx, request{verb: http.MethodGet, path: w.path(), query: url.Values{
		"watch": {"true"}, "fieldSelector": {w.selector()}, "resourceVersion": {version},
		"allowWatchBookmarks": {"true"},
		"timeoutSeconds":      {strconv.Itoa(int(length.Seconds()))},
	}})
	if err != nil {
		return version, err
	}
	defer body.Close()
	if w.problem.Value() != nil {
		klog.FromContext(ctx).Info("Watching objects of the API server again", "what", w.what)
		w.problem.Publish(nil)
		c.watchRestored.Publish(struct{}{})
	}
	return w.readEvents(ctx, body, version, received)
}

// cancelWhenIdle cancels a watch that receives nothing for idleTimeout, and returns when the
// context ends.
func cancelWhenIdle(ctx context.Context, cancel context.CancelCauseFunc, idle clock.Timer, received <-chan struct{}) {
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-received:
			idle.Reset(idleTimeout)
		case <-idle.C():
			cancel(errWatchIdle)
			return
		}
	}
}

// readEvents handles the events of a watch until the watch ends, and returns the last version
// received. It sends to received for each event.
func (w collection) readEvents(
	ctx context.Context, body io.Reader, version string, received chan<- struct{},
) (string, error) {
	limited := &io.LimitedReader{R: body}
	events := json.NewDecoder(limited)
	for {
		limited.N = maxResponse
		var e struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := events.Decode(&e); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			switch {
			case limited.N <= 0:
				err = fmt.Errorf("an event of the watch has more than %d bytes", maxResponse)
			case errors.Is(err, io.EOF):
				err = nil
			}
			return version, err
		}
		select {
		case <-ctx.Done():
		case received <- struct{}{}:
		}
		next, err := w.handleEvent(e.Type, e.Object, version)
		if err != nil {
			return version, err
		}
		version = next
	}
}

// errWatchIdle is the error of a watch that received nothing for too long.
var errWatchIdle = fmt.Errorf("the watch received nothing for %v", idleTimeout)

// handleEvent handles one event of a watch, and returns the last version received.
func (w collection) handleEvent(kind string, object []byte, version string) (string, error) {
	if kind == "ERROR" {
		var s metav1.Status
		if err := json.Unmarshal(object, &s); err != nil {
			return "", fmt.Errorf("read an event of the watch: %w", err)
		}
		return "", fmt.Errorf("the API server answered %d: %w", s.Code, apierrors.FromObject(&s))
	}
	var meta struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(object, &meta); err != nil {
		return "", fmt.Errorf("read an event of the watch: %w", err)
	}
	next := meta.Metadata.ResourceVersion
	switch {
	case next == "":
		return "", errors.New("an event of the watch has no version")
	case isBefore(next, version):
		return "", fmt.Errorf("the watch went back from version %s to %s: %w", version, next, errRestored)
	}
	if err := w.onEvent(kind, next, object); err != nil {
		return "", fmt.Errorf("read an event of the watch: %w", err)
	}
	return next, nil
}

// listNode returns the daemon's own Node, and the version at which a watch can start. The Node has
// no UID if it does not exist.
func (c *Client) listNode(ctx context.Context, latest bool) (Node, string, error) {
	query := url.Values{"fieldSelector": {"metadata.name=" + c.node}}
	if !latest {
		query.Set("resourceVersion", "0")
	}
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath, query: query})
	if err != nil {
		return Node{}, "", err
	}
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []nodeObject `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return Node{}, "", fmt.Errorf("read the answer of the API server: %w", err)
	}
	if len(list.Items) == 0 {
		return Node{}, list.Metadata.ResourceVersion, nil
	}
	return list.Items[0].node(), list.Metadata.ResourceVersion, nil
}
