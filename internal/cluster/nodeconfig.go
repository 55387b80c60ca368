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
	// firstTimeout is how long a node without a saved configuration waits for the API server at the
	// start.
	firstTimeout = 2 * time.Second
	// changeDelay is the shortest time between two changes of the configuration. Of several changes of
	// the label within it, the last one counts.
	changeDelay = 2 * time.Second
	// rereadEvery is how often the directory of configuration files is read again.
	rereadEvery = 10 * time.Second
)

// A nodeConfig chooses the configuration file by a node label.
type nodeConfig struct {
	options  config.NodeConfig
	stateDir string // empty for none
	chosen   *feed.Feed[config.Chosen]
	nodes    *feed.Feed[kubeapi.Node]
	get      func(context.Context) (kubeapi.Node, error)
	write    func(dir, name string) error // writeChoice
}

func newNodeConfig(c config.Startup, client *kubeapi.Client) *nodeConfig {
	return &nodeConfig{
		options: c.NodeConfig, stateDir: c.StateDir, chosen: feed.New(config.Chosen{}), nodes: client.Nodes(),
		get:   client.Get,
		write: writeChoice,
	}
}

// start makes the first choice: the saved choice, or the file for the label if the API server
// responds in time, or the file for a node without the label.
func (n *nodeConfig) start(ctx context.Context) {
	log := klog.FromContext(ctx)
	names, err := configurations(n.options.Dir)
	if err != nil {
		n.publish(ctx, config.Chosen{Err: err})
		return
	}
	last, err := withTimeout(ctx, n.stateDir, readChoice)
	if err != nil {
		log.Info("Cannot read the saved choice of the configuration", "reason", err.Error())
	}
	if last != nil && (last.File == "" || slices.Contains(names, last.File)) {
		n.publish(ctx, config.Chosen{File: filePath(n.options, last.File)})
		return
	}
	ctx, cancel := context.WithTimeout(ctx, firstTimeout)
	defer cancel()
	node, unknown := n.get(ctx)
	if unknown == nil && node.UID == "" {
		unknown = errors.New("the API server has no such node")
	}
	if unknown != nil {
		unknown = fmt.Errorf("the label %s of the node is not known: %w", n.options.Label, unknown)
	}
	name, err := chooseFile(n.options, node.Labels[n.options.Label], names)
	if err != nil { // the default is the file for a node without the label
		name, _ = chooseFile(n.options, "", names)
	}
	n.publish(ctx, config.Chosen{File: filePath(n.options, name), Err: errors.Join(unknown, err)})
}

// withTimeout returns the result of do for a state directory, or an error if the disk does not
// respond in time.
func withTimeout[T any](ctx context.Context, stateDir string, do func(string) (T, error)) (value T, err error) {
	result := make(chan T, 1)
	err = statefile.NewDisk().Do(ctx, firstTimeout, func() error {
		value, err := do(stateDir)
		result <- value
		return err
	})
	if err == nil {
		value = <-result
	}
	return value, err
}

// publish publishes a choice if it has changed.
func (n *nodeConfig) publish(ctx context.Context, next config.Chosen) {
	before := n.chosen.Value()
	if next.File == before.File && fmt.Sprint(next.Err) == fmt.Sprint(before.Err) {
		return
	}
	log := klog.FromContext(ctx)
	if next.Err != nil {
		log.Info("Cannot follow the label that chooses the configuration", "path", next.File, "reason",
			next.Err.Error())
	} else {
		log.Info("Chose the configuration file", "path", next.File)
	}
	n.chosen.Publish(next)
}

// run follows the label and the directory until ctx ends, and then returns nil. configs is the feed
// of the configuration in force.
func (n *nodeConfig) run(ctx context.Context, configs *feed.Feed[config.Config]) error {
	ticker := time.NewTicker(rereadEvery)
	defer ticker.Stop()
	followed, known := "", false // the last value of the label that was followed
	var at time.Time             // time of the last change
	var due <-chan time.Time     // not nil while a change of the label waits
	save := n.saver(ctx)
	for {
		node, changed := n.nodes.Latest()
		inForce, configChanged := configs.Latest()
		var written <-chan struct{}
		if name, ours := n.nameToSave(inForce); ours {
			written = save(name)
		}
		value := node.Labels[n.options.Label]
		if node.UID != "" && (!known || value != followed) && due == nil {
			due = time.After(changeDelay - time.Since(at))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			continue
		case <-configChanged:
			continue
		case <-written:
			continue
		case <-due:
			due = nil
			if node.UID == "" { // the Node was deleted: its last value stays in force
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

// saver returns a function that saves the name of the file in force, unless the same name was saved
// last. Each write runs in its own goroutine, because a disk may hang; there is at most one at a
// time. The returned channel is closed at the end of the write; it is nil if there is none.
func (n *nodeConfig) saver(ctx context.Context) func(name string) <-chan struct{} {
	type result struct {
		name string
		err  error
	}
	var saved *string // the last saved name
	var failed string // the last error
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
				klog.FromContext(ctx).Info("Cannot save the choice of the configuration; a restart may lose it",
					"reason", failed)
			}
			if r.err != nil {
				return nil // repeated at the next event, for example the next tick
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

// nameToSave returns the name of the file in force. It returns false if there is no state
// directory, or if the file in force is not the chosen file.
func (n *nodeConfig) nameToSave(inForce config.Config) (string, bool) {
	chosen := n.chosen.Value()
	if n.stateDir == "" || chosen.Err != nil || inForce.File != chosen.File {
		return "", false
	}
	if chosen.File == "" {
		return "", true
	}
	return filepath.Base(chosen.File), true
}

// follow chooses the file for a value of the label. If there is none, the file in force stays.
func (n *nodeConfig) follow(ctx context.Context, value string, inForce config.Config) {
	names, err := configurations(n.options.Dir)
	var name string
	if err == nil {
		name, err = chooseFile(n.options, value, names)
	}
	next := config.Chosen{File: filePath(n.options, name), Err: err}
	if err != nil {
		next.File = inForce.File
	}
	n.publish(ctx, next)
}
