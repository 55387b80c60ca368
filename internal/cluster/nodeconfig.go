package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

const (
	// firstAnswer is how long the start of a node that has never had a configuration waits for the API
	// server.
	firstAnswer = 2 * time.Second
	// settle is the time between two changes that are followed: of several within it, the last one
	// counts.
	settle = 2 * time.Second
	// rereadEvery is how often the names of the files are read again.
	rereadEvery = 10 * time.Second
)

// A nodeConfig is the choice of the configuration file by a label of the node.
type nodeConfig struct {
	options  config.NodeConfig
	stateDir string // empty for none
	chosen   *feed.Feed[config.Chosen]
	nodes    *feed.Feed[kubeapi.Node]
	get      func(context.Context) (kubeapi.Node, error)
	write    func(dir, name string) error // writeChoice
}

func newNodeConfig(c config.Config, client *kubeapi.Client) *nodeConfig {
	return &nodeConfig{
		options: c.NodeConfig, stateDir: c.StateDir, chosen: feed.New(config.Chosen{}), nodes: client.Nodes(), get: client.Get,
		write: writeChoice,
	}
}

// start makes the first choice: the last one, if the state directory has it; otherwise what the API
// server says, if it answers soon; otherwise that of a node without the label.
func (n *nodeConfig) start(ctx context.Context) {
	log := klog.FromContext(ctx)
	names, err := configurations(n.options.Dir)
	if err != nil {
		n.publish(ctx, config.Chosen{Err: err})
		return
	}
	last, err := withPatience(ctx, n.stateDir, readChoice)
	if err != nil {
		log.Info("Cannot use the last choice of the configuration", "reason", err.Error())
	}
	if last != nil && (last.File == "" || slices.Contains(names, last.File)) {
		n.publish(ctx, config.Chosen{File: path(n.options, last.File)})
		return
	}
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	node, unknown := n.get(ctx)
	if unknown == nil && node.UID == "" {
		unknown = errors.New("the API server has no such node")
	}
	if unknown != nil {
		unknown = fmt.Errorf("the label %s of the node is not known: %w", n.options.Label, unknown)
	}
	name, err := choose(n.options, node.Labels[n.options.Label], names)
	if err != nil { // the last good one is that of a node without the label
		name, _ = choose(n.options, "", names)
	}
	n.publish(ctx, config.Chosen{File: path(n.options, name), Err: errors.Join(unknown, err)})
}

// withPatience returns what do does with a state directory, or an error if its disk does not answer
// soon.
func withPatience[T any](ctx context.Context, stateDir string, do func(string) (T, error)) (value T, err error) {
	answer := make(chan T, 1)
	err = statefile.NewDisk().Do(ctx, firstAnswer, func() error {
		value, err := do(stateDir)
		answer <- value
		return err
	})
	if err == nil {
		value = <-answer
	}
	return value, err
}

// publish makes a choice the one in force, if it is another.
func (n *nodeConfig) publish(ctx context.Context, next config.Chosen) {
	before := n.chosen.Value()
	if next.File == before.File && fmt.Sprint(next.Err) == fmt.Sprint(before.Err) {
		return
	}
	log := klog.FromContext(ctx)
	if next.Err != nil {
		log.Info("Cannot follow the label that chooses the configuration", "path", next.File, "reason", next.Err.Error())
	} else {
		log.Info("Chose the configuration file", "path", next.File)
	}
	n.chosen.Publish(next)
}

// run follows the label and the names of the files until ctx ends, and returns nil then. configs
// are the configurations in force.
func (n *nodeConfig) run(ctx context.Context, configs *feed.Feed[config.Config]) error {
	ticker := time.NewTicker(rereadEvery)
	defer ticker.Stop()
	followed, known := "", false // the value of the label that was followed last
	var at time.Time             // when it was
	var due <-chan time.Time     // not nil while a change of the label waits
	save := n.saver(ctx)
	for {
		node, changed := n.nodes.Latest()
		inForce, configured := configs.Latest()
		var written <-chan struct{}
		if name, ours := n.settled(inForce); ours {
			written = save(name)
		}
		value := node.Labels[n.options.Label]
		if node.UID != "" && (!known || value != followed) && due == nil {
			due = time.After(settle - time.Since(at))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			continue
		case <-configured:
			continue
		case <-written:
			continue
		case <-due:
			due = nil
			if node.UID == "" { // deleted meanwhile: what it said last holds
				continue
			}
			followed, known, at = value, true, time.Now()
		case <-ticker.C:
			if !known {
				continue
			}
		}
		n.follow(ctx, followed, inForce)
	}
}

// saver returns a function that writes the name of the file in force, unless that name was written
// last. The write runs in a goroutine of its own, because a disk may hang; there is one at a time.
// The channel is closed when the write has ended; it is nil if there is none.
func (n *nodeConfig) saver(ctx context.Context) func(name string) <-chan struct{} {
	type result struct {
		name string
		err  error
	}
	var saved *string // the name that was written last
	var failed string // why writing failed last
	var running <-chan struct{}
	results := make(chan result, 1)
	return func(name string) <-chan struct{} {
		select {
		case r := <-results:
			running = nil
			if r.err == nil {
				saved = &r.name
			} else if r.err.Error() != failed {
				failed = r.err.Error()
				klog.FromContext(ctx).Info("Cannot save the choice of the configuration; a restart may forget it", "reason", failed)
			}
			if r.err != nil {
				return nil // tried again when something happens, such as the next tick
			}
		default:
		}
		if running == nil && (saved == nil || *saved != name) {
			ended := make(chan struct{})
			running = ended
			go func() {
				defer close(ended)
				results <- result{name, n.write(n.stateDir, name)}
			}()
		}
		return running
	}
}

// settled returns the name of the file in force; false if there is nothing to save: it is not the
// one that the label asks for, or there is no state directory.
func (n *nodeConfig) settled(inForce config.Config) (string, bool) {
	chosen := n.chosen.Value()
	if n.stateDir == "" || chosen.Err != nil || inForce.File != chosen.File {
		return "", false
	}
	if chosen.File == "" {
		return "", true
	}
	return filepath.Base(chosen.File), true
}

// follow chooses by a value of the label. What cannot be chosen leaves the file in force that is.
func (n *nodeConfig) follow(ctx context.Context, value string, inForce config.Config) {
	names, err := configurations(n.options.Dir)
	var name string
	if err == nil {
		name, err = choose(n.options, value, names)
	}
	next := config.Chosen{File: path(n.options, name), Err: err}
	if err != nil {
		next.File = inForce.File
	}
	n.publish(ctx, next)
}
