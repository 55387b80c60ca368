package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// A manager maintains a link to the configuration file that a node label chooses, for a daemon in
// another process, as NVIDIA's config-manager does.
type manager struct {
	options     config.NodeConfig
	kubeconfig  string
	node        string
	link        string
	oneshot     bool
	sendsSignal bool
	signal      syscall.Signal
	process     string // argv[0] of the process; if only one of the two is a path, its last part counts
	proc        string // /proc
}

const managerLong = `config-manager links the configuration file named by a node label to the path where a
device plugin reads it, and sends the device plugin a signal when the file or its content changes. It
accepts the flags and environment variables of NVIDIA's config-manager. gpu-node-agent does not need
it: with --node-config-dir it follows the label itself.

With --oneshot it waits for the API server, creates the link once and exits, as an init container.

If the directory does not have the file named by the label, the link stays unchanged, and the problem
is logged. If there is no link yet, the file for a node without the label is used. The last signal is
recorded next to the link, so that a restart neither loses nor repeats it.`

func newConfigManagerCommand(o Options) *cobra.Command {
	m := &manager{proc: "/proc"}
	var fallbacks []string
	cmd := &cobra.Command{
		Use:   "config-manager",
		Short: "Link the configuration file chosen by a node label, for another process",
		Long:  managerLong,
		Args:  cobra.NoArgs,
	}
	f := cmd.Flags()
	number := int(syscall.SIGHUP)
	f.BoolVar(&m.oneshot, "oneshot", false, "create the link once and exit [$ONESHOT]")
	f.StringVar(&m.kubeconfig, "kubeconfig", "",
		"file with the address and the credentials of the API server [$KUBECONFIG]")
	f.StringVar(&m.node, "node-name", "", "name of the node [$NODE_NAME]")
	f.StringVar(&m.options.Label, "node-label", "nvidia.com/device-plugin.config",
		"label of the node with the name of the file [$NODE_LABEL]")
	f.StringVar(&m.options.Dir, "config-file-srcdir", "", "directory of the configuration files [$CONFIG_FILE_SRCDIR]")
	f.StringVar(&m.link, "config-file-dst", "", "path of the link [$CONFIG_FILE_DST]")
	f.StringVar(&m.options.Default, "default-config", "",
		"name of the file for a node without the label [$DEFAULT_CONFIG]")
	f.StringSliceVar(&fallbacks, "fallback-strategies", nil,
		"what a node without the label uses if there is no default: named, single, empty [$FALLBACK_STRATEGIES]")
	f.BoolVar(&m.sendsSignal, "send-signal", true, "send the signal [$SEND_SIGNAL]")
	f.IntVar(&number, "signal", number, "number of the signal [$SIGNAL]")
	f.StringVar(&m.process, "process-to-signal", "nvidia-device-plugin",
		"argv[0] of the process that gets the signal; if only one of the two is a path, its last part counts "+
			"[$PROCESS_TO_SIGNAL]")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 { // under NVIDIA's name
			klog.FromContext(cmd.Context()).Info("Ignoring arguments", "arguments", args)
		}
		for _, name := range []string{
			"oneshot", "kubeconfig", "node-name", "node-label", "config-file-srcdir", "config-file-dst",
			"default-config", "fallback-strategies",
			"send-signal", "signal", "process-to-signal",
		} {
			variable := strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
			value, given := os.LookupEnv(variable)
			if !given || f.Changed(name) || value == "" && name == "signal" {
				continue
			}
			if value == "" && f.Lookup(name).Value.Type() == "bool" {
				value = "false" // as NVIDIA's program does
			}
			if err := f.Set(name, value); err != nil {
				return fmt.Errorf("%s: %w", variable, err)
			}
		}
		m.signal = syscall.Signal(number)
		if err := m.check(fallbacks); err != nil {
			return err
		}
		client := kubeapi.New(kubeapi.Options{Kubeconfig: m.kubeconfig, Node: m.node, Version: version.String(),
			Dial: o.Dial})
		return m.run(cmd.Context(), client)
	}
	return cmd
}

// check validates the flags.
func (m *manager) check(fallbacks []string) error {
	for _, flag := range []struct{ name, value string }{
		{"--node-name", m.node}, {"--config-file-srcdir", m.options.Dir}, {"--config-file-dst",
			m.link}, {"--node-label",
			m.options.Label},
	} {
		if flag.value == "" {
			return fmt.Errorf("%s is required", flag.name)
		}
	}
	if m.sendsSignal && m.process == "" {
		return errors.New("--process-to-signal is required; to send no signal, set --send-signal=false")
	}
	if m.sendsSignal && (m.signal < 1 || m.signal > 64) {
		return fmt.Errorf("--signal is %d; use a number from 1 to 64", m.signal)
	}
	for _, name := range fallbacks {
		m.options.Fallbacks = append(m.options.Fallbacks, config.Fallback(strings.TrimSpace(name)))
	}
	return nil
}

// run maintains the link until ctx ends, or creates it once.
func (m *manager) run(ctx context.Context, client *kubeapi.Client) error {
	log := klog.FromContext(ctx)
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		client.Watch(watching, clock.RealClock{})
	}()
	defer func() { stop(); <-watched }()
	ticker := time.NewTicker(rereadEvery)
	defer ticker.Stop()
	var failed string
	for {
		node, changed := client.Nodes().Latest()
		if node.UID != "" {
			err := m.follow(ctx, node.Labels[m.options.Label])
			if _, missing := os.Stat(m.link); m.oneshot && missing != nil {
				return err
			}
			if now := fmt.Sprint(err); err != nil && now != failed {
				log.Info("Cannot follow the label that chooses the configuration", "path", m.link, "reason", now)
			}
			failed = fmt.Sprint(err)
			if m.oneshot {
				return nil // a failing init container would prevent its pod from starting
			}
		}
		select {
		case <-ctx.Done():
			if m.oneshot {
				return errors.New("the API server has not sent the Node")
			}
			return nil
		case <-changed:
		case <-ticker.C:
		}
	}
}

// follow links the file for a value of the label, and sends the signal if it is due.
func (m *manager) follow(ctx context.Context, value string) error {
	names, err := configurations(m.options.Dir)
	if err != nil {
		return err
	}
	name, unknown := chooseFile(m.options, value, names)
	if unknown != nil {
		if _, err := os.Stat(m.link); err == nil {
			return unknown // the existing link stays
		}
		if name, err = chooseFile(m.options, "", names); err != nil {
			return errors.Join(unknown, err)
		}
	}
	target := cmp.Or(filePath(m.options, name), os.DevNull)
	return errors.Join(unknown, m.deliver(ctx, target))
}

// A delivery is the file and its content at the last signal, or at the first link.
type delivery struct {
	Target string `json:"target"`
	SHA256 string `json:"sha256"`
}

// recordPath returns the path of the last delivery, next to the link.
func (m *manager) recordPath() string {
	return filepath.Join(filepath.Dir(m.link), "."+filepath.Base(m.link)+".delivered")
}

// maxConfiguration is the size limit of a configuration file: the limit of a ConfigMap.
const maxConfiguration = 1 << 20

// deliver links a file and sends the signal, unless the same file and content were delivered
// before. It writes the record of the delivery last, so that a failed step is repeated.
func (m *manager) deliver(ctx context.Context, target string) error {
	content, err := statefile.Read(target, maxConfiguration)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	sum := sha256.Sum256(content)
	wanted := delivery{Target: target, SHA256: hex.EncodeToString(sum[:])}
	var last delivery
	if text, err := statefile.Read(m.recordPath(), maxChoice); err == nil {
		_ = json.Unmarshal(text, &last) // without a readable record the signal is sent again
	}
	now, _ := os.Readlink(m.link) // anything other than a link is replaced
	if now == target && last == wanted {
		return nil
	}
	if now != target {
		if err := m.relink(target); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Linked the configuration file", "path", m.link, "target", target)
	}
	if m.sendsSignal && !m.oneshot {
		if err := m.send(ctx); err != nil {
			return err
		}
	}
	text, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	return statefile.Write(m.recordPath(), text, 0o600, nil)
}

// relink replaces the link atomically by a link to target.
func (m *manager) relink(target string) error {
	fresh := m.link + ".new"
	if err := statefile.Remove(fresh); err != nil {
		return fmt.Errorf("replace the link: %w", err)
	}
	if err := os.Symlink(target, fresh); err != nil {
		return fmt.Errorf("replace the link: %w", err)
	}
	if err := os.Rename(fresh, m.link); err != nil {
		return fmt.Errorf("replace the link: %w", err)
	}
	return nil
}

// send sends the signal to all processes with the name.
func (m *manager) send(ctx context.Context) error {
	processes, err := m.processes()
	if err != nil {
		return err
	}
	if len(processes) == 0 {
		return fmt.Errorf("no process %s is running; set shareProcessNamespace: true in the pod", m.process)
	}
	for _, id := range processes {
		if err := syscall.Kill(id, m.signal); err != nil {
			return fmt.Errorf("send signal %d to process %d: %w", int(m.signal), id, err)
		}
		klog.FromContext(ctx).Info("Sent a signal", "process", id, "name", m.process, "signal", m.signal.String())
	}
	return nil
}

// processes returns the IDs of the processes with the name, except this process.
func (m *manager) processes() ([]int, error) {
	entries, err := os.ReadDir(m.proc)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var ids []int
	for _, e := range entries {
		id, err := strconv.Atoi(e.Name())
		if err != nil || id == os.Getpid() {
			continue
		}
		line, err := os.ReadFile(filepath.Join(m.proc, e.Name(), "cmdline"))
		name, _, _ := strings.Cut(string(line), "\x00")
		if err == nil && name != "" && (name == m.process || isPart(name, m.process) || isPart(m.process, name)) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// isPart reports whether name is the last part of a path.
func isPart(path, name string) bool { return filepath.Base(path) == name }
