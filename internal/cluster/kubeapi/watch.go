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

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// A Node has the fields of the own Node that this program uses. It has no UID if the API server has
// not told of it, or has none. Nobody changes one.
type Node struct {
	Name, UID, ResourceVersion string
	Labels, Annotations        map[string]string
	Conditions                 []Condition
	Taints                     []Taint
	// Allocatable is how many devices or how much of each resource pods can have, in Kubernetes' own
	// words.
	Allocatable map[string]string
	// restores is how often the cluster had been restored from a backup before, as far as is known.
	// Versions of before and after are of different histories.
	restores int
}

// A Condition is one of the node's, as the API has it.
type Condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	Reason             string    `json:"reason,omitempty"`
	Message            string    `json:"message,omitempty"`
	LastHeartbeatTime  time.Time `json:"lastHeartbeatTime,omitzero"`
	LastTransitionTime time.Time `json:"lastTransitionTime,omitzero"`
}

// A Taint is one of the node's, as the API has it.
type Taint struct {
	Key       string    `json:"key"`
	Value     string    `json:"value,omitempty"`
	Effect    string    `json:"effect"`
	TimeAdded time.Time `json:"timeAdded,omitzero"`
}

// nodeObject is a Node in the API's own form.
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
		Labels: n.Metadata.Labels, Annotations: n.Metadata.Annotations, Conditions: n.Status.Conditions, Taints: n.Spec.Taints,
		Allocatable: n.Status.Allocatable,
	}
}

const nodesPath = "/api/v1/nodes"

const (
	// A watch is ended and begun anew after a random time between these, so that those of a cluster do
	// not move to one API server.
	minWatch = 30 * time.Minute
	maxWatch = time.Hour
	// provenWatch is how long a watch must last for its end to count as the first again.
	provenWatch = 10 * time.Second
	// maxSilence is how long a watch may say nothing before it is begun anew: an API server sends a
	// bookmark about every minute.
	maxSilence = 3 * time.Minute
)

// Nodes returns the feed of the own node. It holds what was known last while the API server is
// away.
func (c *Client) Nodes() *feed.Feed[Node] { return c.nodes }

// Problem returns the feed of why the node cannot be watched; nil while it is.
func (c *Client) Problem() *feed.Feed[error] { return c.problem }

// Get returns the own node as the API server has it now; without UID if it has none. It asks once,
// and publishes nothing.
func (c *Client) Get(ctx context.Context) (Node, error) {
	restores := c.newestNode().restores
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath + "/" + c.node})
	if IsNotFound(err) {
		return Node{restores: restores}, nil
	}
	if err != nil {
		return Node{}, err
	}
	return c.readNode(text, restores)
}

// Watch publishes the own node until ctx ends; then nothing is known of it, and there is no
// Problem.
func (c *Client) Watch(ctx context.Context, timer clock.Clock) {
	defer c.nodes.Publish(Node{})
	c.follow(ctx, timer, collection{
		what: "the node", problem: c.problem, path: func() string { return nodesPath },
		selector: func() string { return "metadata.name=" + c.node },
		list: func(ctx context.Context, from string) (string, error) {
			before, latest := c.newestNode(), from != anyVersion
			node, version, err := c.list(ctx, latest)
			if err != nil {
				return "", err
			}
			if node.restores = before.restores; latest && before.After(node) {
				klog.FromContext(ctx).Info("The node is an older one than before: the cluster was restored from a backup",
					"version", node.ResourceVersion, "before", before.ResourceVersion)
				node.restores++
			}
			c.nodes.Publish(c.noteNode(node))
			return version, nil
		},
		changed: func(kind, _ string, object []byte) error {
			var n nodeObject
			if err := json.Unmarshal(object, &n); err != nil {
				return err
			}
			switch kind {
			case added, modified:
				node := n.node()
				node.restores = c.newestNode().restores
				c.nodes.Publish(c.noteNode(node))
			case deleted:
				c.nodes.Publish(Node{})
			}
			return nil
		},
	})
}

// newestNode returns the newest version of the node that the API server has told of.
func (c *Client) newestNode() Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.newest
}

// noteNode notes a node that the API server has told of, and returns it.
func (c *Client) noteNode(n Node) Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n.restores > c.newest.restores || n.restores == c.newest.restores && (n.UID != c.newest.UID || n.After(c.newest)) {
		c.newest = n
	}
	return n
}

// A collection is objects that a watch follows.
type collection struct {
	what     string            // for people
	problem  *feed.Feed[error] // why it cannot be watched; nil while it is
	path     func() string     // such as /api/v1/nodes; it is asked after list
	selector func() string     // by fields; it is asked after list
	// list returns the version of the collection as it is now, or as some API server knows it, but not
	// before the version from. From is empty if it is to be the latest.
	list func(ctx context.Context, from string) (version string, err error)
	// changed is called for each event but errors, bookmarks too, with its version.
	changed func(kind, version string, object []byte) error
}

// anyVersion is before all versions.
const anyVersion = "0"

// Kinds of events of a watch.
const (
	added    = "ADDED"
	modified = "MODIFIED"
	deleted  = "DELETED"
)

// follow watches a collection until ctx ends; then it has no problem. Each watch begins with a
// list. One that goes on where the last one ended would say nothing for long in a cluster that was
// restored from a backup. One from version 0 would tell the same with one request less, but not
// with an etcd before 3.4.25: with that, an API server answers 500 to one that takes bookmarks. The
// first list may be that of an API server that is a little behind, as it costs less and many may
// ask; a further one may not be of before what is known. Only where the versions may have begun
// anew it is to be the latest: with an etcd before 3.4.25, that reads all objects of the cluster.
func (c *Client) follow(ctx context.Context, timer clock.Clock, w collection) {
	log := klog.FromContext(ctx).WithValues("what", w.what)
	defer w.problem.Publish(nil)
	from, failures := anyVersion, 0
	for ctx.Err() == nil {
		began := timer.Now()
		version, err := c.watchOnce(ctx, timer, w, from)
		if ctx.Err() != nil {
			return
		}
		answered := version != ""
		if from = cmp.Or(version, from); isOtherHistory(err) {
			from = ""
		}
		if answered && timer.Since(began) >= provenWatch {
			failures = 0
		}
		failures++
		pause := Pause(err, failures)
		if err == nil || failures == 1 && answered {
			log.V(2).Info("The watch of the API server ended", "after", pause.Round(time.Millisecond).String(), "reason",
				fmt.Sprint(err))
		} else {
			if w.problem.Value() == nil {
				log.Info("Cannot watch objects of the API server; what was known of them stays in force", "reason", err.Error())
			}
			w.problem.Publish(err)
			log.V(2).Info("Cannot watch objects of the API server", "reason", err.Error(), "after",
				pause.Round(time.Millisecond).String())
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.After(pause):
		}
	}
}

// errWentBack is the error of a watch that tells of a version before one that was known.
var errWentBack = errors.New("the cluster was restored from a backup")

// isOtherHistory reports whether err says that what was known may be of another history of the
// cluster.
func isOtherHistory(err error) bool {
	var refused *Refused
	return errors.Is(err, errWentBack) || errors.As(err, &refused) && refused.Unknown
}

// watchOnce lists the collection and then watches it until the watch ends. It returns the version
// that was seen last; none if the API server has not answered.
func (c *Client) watchOnce(ctx context.Context, timer clock.Clock, w collection, from string) (version string,
	err error) {
	if version, err = w.list(ctx, from); err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	heard := make(chan struct{})
	go cancelWhenSilent(ctx, cancel, timer.NewTimer(maxSilence), heard)
	length := minWatch + rand.N(maxWatch-minWatch)
	body, err := c.open(ctx, request{verb: http.MethodGet, path: w.path(), query: url.Values{
		"watch": {"true"}, "fieldSelector": {w.selector()}, "resourceVersion": {version}, "allowWatchBookmarks": {"true"},
		"timeoutSeconds": {strconv.Itoa(int(length.Seconds()))},
	}})
	if err != nil {
		return version, err
	}
	defer body.Close()
	if w.problem.Value() != nil {
		klog.FromContext(ctx).Info("Watching objects of the API server again", "what", w.what)
		w.problem.Publish(nil)
		c.back.Publish(struct{}{})
	}
	return w.follow(ctx, body, version, heard)
}

// cancelWhenSilent cancels a watch of which nothing is heard for maxSilence, until its context
// ends.
func cancelWhenSilent(ctx context.Context, cancel context.CancelCauseFunc, silence clock.Timer, heard <-chan struct{}) {
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-heard:
			silence.Reset(maxSilence)
		case <-silence.C():
			cancel(errSilent)
			return
		}
	}
}

// follow hands on the events of a watch until it ends, and returns the version that was seen last.
// heard is called for each event.
func (w collection) follow(ctx context.Context, body io.Reader, version string, heard chan<- struct{}) (string, error) {
	bounded := &io.LimitedReader{R: body}
	events := json.NewDecoder(bounded)
	for {
		bounded.N = maxAnswer
		var e struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := events.Decode(&e); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			switch {
			case bounded.N <= 0:
				err = fmt.Errorf("an event of the watch has more than %d bytes", maxAnswer)
			case errors.Is(err, io.EOF):
				err = nil
			}
			return version, err
		}
		select {
		case <-ctx.Done():
		case heard <- struct{}{}:
		}
		next, err := w.receive(e.Type, e.Object, version)
		if err != nil {
			return version, err
		}
		version = next
	}
}

// errSilent is the error of a watch that said nothing for too long.
var errSilent = fmt.Errorf("the watch said nothing for %v", maxSilence)

// receive hands on what an event of a watch tells, and returns the version that was seen last.
func (w collection) receive(kind string, object []byte, version string) (string, error) {
	if kind == "ERROR" {
		var s struct {
			Code            int
			Reason, Message string
		}
		if err := json.Unmarshal(object, &s); err != nil {
			return "", fmt.Errorf("read an event of the watch: %w", err)
		}
		return "", &Refused{Code: s.Code, Reason: s.Reason, Message: s.Message}
	}
	var has struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(object, &has); err != nil {
		return "", fmt.Errorf("read an event of the watch: %w", err)
	}
	next := has.Metadata.ResourceVersion
	switch {
	case next == "":
		return "", errors.New("an event of the watch has no version")
	case isBefore(next, version):
		return "", fmt.Errorf("the watch went back from version %s to %s: %w", version, next, errWentBack)
	}
	if err := w.changed(kind, next, object); err != nil {
		return "", fmt.Errorf("read an event of the watch: %w", err)
	}
	return next, nil
}

// list returns the own node, and the version that a watch can begin with. If there is no such node
// it has no UID.
func (c *Client) list(ctx context.Context, latest bool) (Node, string, error) {
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
