package kubeapi

import (
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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// A Node is what this program wants to know of its own node. It has no UID if the API server has not told of it, or has none. Nobody
// changes one.
type Node struct {
	Name, UID, ResourceVersion string
	Labels, Annotations        map[string]string
	Conditions                 []Condition
	Taints                     []Taint
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
		Conditions []Condition `json:"conditions"`
	} `json:"status"`
}

func (n *nodeObject) node() Node {
	return Node{
		Name: n.Metadata.Name, UID: n.Metadata.UID, ResourceVersion: n.Metadata.ResourceVersion,
		Labels: n.Metadata.Labels, Annotations: n.Metadata.Annotations, Conditions: n.Status.Conditions, Taints: n.Spec.Taints,
	}
}

const nodesPath = "/api/v1/nodes"

const (
	// A watch is ended and begun anew after a random time between these, so that those of a cluster do not move to one API server.
	minWatch = 30 * time.Minute
	maxWatch = time.Hour
	// provenWatch is how long a watch must last for its end to count as the first again.
	provenWatch = 10 * time.Second
	// maxSilence is how long a watch may say nothing before it is begun anew: an API server sends a bookmark about every minute.
	maxSilence = 3 * time.Minute
)

// Nodes returns the feed of the own node. It holds what was known last while the API server is away.
func (c *Client) Nodes() *feed.Feed[Node] { return c.nodes }

// Problem returns the feed of why the node cannot be watched; nil while it is.
func (c *Client) Problem() *feed.Feed[error] { return c.problem }

// Get returns the own node as the API server has it now; without UID if it has none. It asks once, and publishes nothing.
func (c *Client) Get(ctx context.Context) (Node, error) {
	node, _, err := c.list(ctx)
	return node, err
}

// Watch publishes the own node until ctx ends; then nothing is known of it, and there is no Problem.
func (c *Client) Watch(ctx context.Context, timer clock.Clock) {
	defer c.nodes.Publish(Node{})
	c.follow(ctx, timer, collection{
		what: "the node", problem: c.problem, path: func() string { return nodesPath }, selector: "metadata.name=" + c.node,
		list: func(ctx context.Context) (string, error) {
			node, version, err := c.list(ctx)
			if err == nil {
				c.nodes.Publish(node)
			}
			return version, err
		},
		changed: func(kind, _ string, object []byte) error {
			var n nodeObject
			if err := json.Unmarshal(object, &n); err != nil {
				return err
			}
			switch kind {
			case added, modified:
				c.nodes.Publish(n.node())
			case deleted:
				c.nodes.Publish(Node{})
			}
			return nil
		},
	})
}

// A collection is objects that a watch follows.
type collection struct {
	what     string            // for people
	problem  *feed.Feed[error] // why it cannot be watched; nil while it is
	path     func() string     // such as /api/v1/nodes; it is asked after list
	selector string            // by fields
	list     func(context.Context) (version string, err error)
	// changed is told of each event but errors, bookmarks too, with the version that it brings.
	changed func(kind, version string, object []byte) error
}

// Kinds of events of a watch.
const (
	added    = "ADDED"
	modified = "MODIFIED"
	deleted  = "DELETED"
)

// follow watches a collection until ctx ends; then it has no problem. It lists the collection once, and again only when the watch cannot go
// on with the version that was seen last. A watch from version 0 would tell the same with one request less, but not with an etcd before
// 3.4.25: with that, an API server answers 500 to one that takes bookmarks.
func (c *Client) follow(ctx context.Context, timer clock.Clock, w collection) {
	log := klog.FromContext(ctx).WithValues("what", w.what)
	defer w.problem.Publish(nil)
	version, failures := "", 0
	for ctx.Err() == nil {
		began := timer.Now()
		next, answered, err := c.watchOnce(ctx, timer, w, version)
		version = next
		if ctx.Err() != nil {
			return
		}
		if answered && timer.Since(began) >= provenWatch {
			failures = 0
		}
		failures++
		pause := Pause(err, failures)
		if err == nil || failures == 1 && answered {
			log.V(2).Info("The watch of the API server ended", "after", pause.Round(time.Millisecond).String(), "reason", fmt.Sprint(err))
		} else {
			if w.problem.Value() == nil {
				log.Info("Cannot watch objects of the API server; what was known of them stays in force", "reason", err.Error())
			}
			w.problem.Publish(err)
			log.V(2).Info("Cannot watch objects of the API server", "reason", err.Error(), "after", pause.Round(time.Millisecond).String())
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.After(pause):
		}
	}
}

// watchOnce lists the collection if version is empty, and watches it then until the watch ends. It returns the version that was seen last,
// empty if the next watch has to begin with a list, and whether the API server has answered.
func (c *Client) watchOnce(ctx context.Context, timer clock.Clock, w collection, version string) (last string, answered bool, err error) {
	if version == "" {
		if version, err = w.list(ctx); err != nil {
			return "", false, err
		}
		answered = true
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := timer.NewTimer(maxSilence)
	defer silence.Stop()
	heard := make(chan struct{})
	go func() {
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
	}()
	length := minWatch + rand.N(maxWatch-minWatch)
	body, err := c.open(ctx, request{verb: http.MethodGet, path: w.path(), query: url.Values{
		"watch": {"true"}, "fieldSelector": {w.selector}, "resourceVersion": {version}, "allowWatchBookmarks": {"true"},
		"timeoutSeconds": {strconv.Itoa(int(length.Seconds()))},
	}})
	if err != nil {
		return afterError(version, err), answered, err
	}
	defer body.Close()
	if w.problem.Value() != nil {
		klog.FromContext(ctx).Info("Watching objects of the API server again", "what", w.what)
		w.problem.Publish(nil)
		c.back.Publish(struct{}{})
	}
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
			var syntax *json.SyntaxError
			var kind *json.UnmarshalTypeError
			switch {
			case bounded.N <= 0:
				err, version = fmt.Errorf("an event of the watch has more than %d bytes", maxAnswer), ""
			case errors.Is(err, errSilent):
				version = "" // a cluster that was restored from a backup may not have reached it yet
			case errors.Is(err, io.EOF):
				err = nil
			case errors.As(err, &syntax), errors.As(err, &kind):
				version = "" // what comes is not from an API server
			}
			return version, true, err
		}
		select {
		case <-ctx.Done():
		case heard <- struct{}{}:
		}
		if version, err = w.receive(e.Type, e.Object, version); err != nil {
			return afterError(version, err), true, err
		}
	}
}

// errSilent is the error of a watch that said nothing for too long.
var errSilent = fmt.Errorf("the watch said nothing for %v", maxSilence)

// afterError returns the version that the next watch begins with: none if the API server has forgotten this one, or serves the API in
// another version now.
func afterError(version string, err error) string {
	if IsCode(err, http.StatusGone) || isNotServed(err) {
		return ""
	}
	return version
}

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
		return version, &Refused{Code: s.Code, Reason: s.Reason, Message: s.Message}
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
		return "", fmt.Errorf("the watch went back from version %s to %s: the cluster was restored from a backup", version, next)
	}
	if err := w.changed(kind, next, object); err != nil {
		return "", fmt.Errorf("read an event of the watch: %w", err)
	}
	return next, nil
}

// list returns the own node, and the version that a watch can begin with. If there is no such node it has no UID.
func (c *Client) list(ctx context.Context) (Node, string, error) {
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath, query: url.Values{
		"fieldSelector": {"metadata.name=" + c.node}, "resourceVersion": {"0"},
	}})
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
