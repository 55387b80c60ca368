package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
)

// startedMark, in the directory of a resource, exists while the daemon has its limits and serves
// clients.
const startedMark = ".started"

const (
	startTimeout  = 30 * time.Second // for a daemon to answer
	startPace     = 100 * time.Millisecond
	askEvery      = 10 * time.Second // while the daemon serves
	maxUnanswered = 3                // consecutive probes without an answer that are tolerated
	// quitGrace is the time for clients after the quit command; the servers then end them.
	quitGrace = 5 * time.Second
	// quitTimeout is the time for a daemon to quit before it is killed.
	quitTimeout = quitGrace + 5*time.Second
)

// A daemon is one run of the control daemon of a Group.
type daemon struct {
	control
	root  string // of all MPS state
	group Group
	gpus  *exclusive.GPUs
}

// run starts the daemon, sets the limits, and watches the daemon until ctx ends; then run stops the
// daemon. run calls ready when the daemon starts and stops serving clients. The error says why the
// daemon did not start or why the daemon exited.
func (d *daemon) run(ctx context.Context, ready func(bool)) error {
	for _, name := range []string{pipeFolder, logFolder} {
		if err := makeFolder(d.folder(name)); err != nil {
			return fmt.Errorf("create a folder for MPS: %w", err)
		}
	}
	if err := d.allowOtherUsers(); err != nil {
		return err
	}
	if err := d.endLeftover(ctx); err != nil {
		return err
	}
	if gpus := d.group.exclusive(); len(gpus) > 0 {
		if err := d.gpus.Claim(ctx, d.group.Resource, gpus); err != nil {
			return err
		}
	}
	p, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer d.stop(ctx, p)
	if err := d.limit(ctx); err != nil {
		return err
	}
	// The reason of an earlier failure is removed first: no reader finds it beside the mark.
	if err := statefile.Remove(d.folder(failedMark)); err != nil {
		return fmt.Errorf("remove the reason of an earlier failure of MPS: %w", err)
	}
	mark := d.folder(startedMark)
	if err := statefile.Replace(mark, nil, 0o600); err != nil {
		return fmt.Errorf("mark the MPS control daemon as started: %w", err)
	}
	defer os.Remove(mark)
	ready(true)
	defer ready(false)
	return d.watch(ctx, p, askEvery)
}

// allowOtherUsers opens the pipe folder to other users, whatever the umask, because a server
// without -multiuser-server runs as the user of its client. Folders above the root of MPS state are
// not mounted into containers.
func (d *daemon) allowOtherUsers() error {
	const enter = fs.FileMode(0o055)
	for folder := d.folder(pipeFolder); ; folder = filepath.Dir(folder) {
		info, err := os.Stat(folder)
		if err == nil && info.Mode()&enter != enter {
			err = os.Chmod(folder, info.Mode().Perm()|enter)
		}
		switch {
		case err != nil:
			return fmt.Errorf("let clients of other users reach the folder of MPS: %w", err)
		case folder == d.root || folder == filepath.Dir(folder):
			return nil
		}
	}
}

// makeFolder creates a folder for containers of any user, with the SELinux label that such
// containers need.
func makeFolder(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return nil // the kernel has no SELinux, or the container is not privileged
	}
	return unix.Setxattr(path, "security.selinux", []byte("system_u:object_r:container_file_t:s0\x00"), 0)
}

// quitCommand is the command that stops a daemon.
func quitCommand() string { return fmt.Sprintf("quit -t %d", int(quitGrace.Seconds())) }

// multiUser lets clients of different users compute at the same time. Without the option, users
// wait for each other.
const multiUser = "-multiuser-server"

// begin starts the daemon and waits for the first answer. With the option for several users, the
// daemon of an old driver exits immediately.
func (d *daemon) begin(ctx context.Context) (*startedDaemon, error) {
	if d.group.Claim != nil && !d.group.Claim.MultiUser {
		return d.beginWith(ctx)
	}
	p, err := d.beginWith(ctx, multiUser)
	switch {
	case !errors.Is(err, errEndedAtOnce):
		return p, err
	case d.group.Claim != nil && !d.group.Claim.Shared:
		return nil, fmt.Errorf("%w; a driver that does not know %s needs a claim without sharing.mpsConfig.multiUser",
			err, multiUser)
	}
	klog.FromContext(ctx).Info("The MPS control daemon serves one user at a time: the driver does not support several",
		"resource", d.group.Resource, "reason", err.Error())
	return d.beginWith(ctx)
}

func (d *daemon) beginWith(ctx context.Context, options ...string) (*startedDaemon, error) {
	p, err := start(ctx, d.control, d.group, options...)
	if err != nil {
		return nil, err
	}
	if err := d.await(ctx, p); err != nil {
		d.stop(ctx, p)
		return nil, err
	}
	return p, nil
}

// errEndedAtOnce is wrapped by the error of a daemon that exited before the first answer.
var errEndedAtOnce = errors.New("the MPS control daemon ended at once")

// await waits until the daemon answers.
func (d *daemon) await(ctx context.Context, p *startedDaemon) error {
	deadline := time.NewTimer(startTimeout)
	pace := time.NewTicker(startPace)
	for {
		_, err := d.ask(ctx, probeCommand, askTimeout)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.ended:
			return fmt.Errorf("%w: %w; see the lines that the daemon printed", errEndedAtOnce, p.exitErr)
		case <-deadline.C:
			return fmt.Errorf("the MPS control daemon of %s does not answer %s after its start: %w", d.group.Resource,
				startTimeout, err)
		case <-pace.C:
		}
	}
}

// limit sets the share of the GPUs for each client.
func (d *daemon) limit(ctx context.Context) error {
	if threads := d.group.threads(); threads > 0 {
		if err := d.set(ctx, "default_active_thread_percentage", strconv.Itoa(threads), percentage); err != nil {
			return err
		}
	}
	for i, g := range d.group.GPUs {
		if g.memoryMiB() == 0 {
			if d.group.Claim == nil && !d.group.Unlimited {
				klog.FromContext(ctx).Info("The memory of a GPU is not known: the clients have no memory limit",
					"gpu", g.UUID)
			}
			continue
		}
		what := fmt.Sprintf("default_device_pinned_mem_limit %d", i)
		if err := d.set(ctx, what, fmt.Sprintf("%dM", g.memoryMiB()), memory); err != nil {
			return err
		}
	}
	return nil
}

// set sets a value and reads it back, because the daemon reports success even for a refused
// command. read returns an empty string for an answer in an unknown format; the value then counts
// as set unless the daemon printed a message.
func (d *daemon) set(ctx context.Context, what, value string, read func(string) string) error {
	said, err := d.ask(ctx, "set_"+what+" "+value, askTimeout)
	if err != nil {
		return err
	}
	answer, err := d.ask(ctx, "get_"+what, askTimeout)
	if err != nil {
		return err
	}
	if now := read(answer); now == read(value) || now == "" && said == "" {
		return nil
	}
	return fmt.Errorf("the MPS control daemon of %s does not accept the limit set_%s %s: it answers %q, and has %q",
		d.group.Resource, what, value, said, answer)
}

// percentage reads "25" and "25.0".
func percentage(text string) string {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return ""
	}
	return strconv.Itoa(int(value + 0.5))
}

// sizes matches an amount of memory in an answer.
var sizes = regexp.MustCompile(`(\d+)\s*([MG])`)

// memory reads "512M", "20480M" and "20G". It rounds down to GiB, because a daemon prints sizes
// from 1 GiB in GiB only.
func memory(text string) string {
	found := sizes.FindStringSubmatch(text)
	if found == nil {
		return ""
	}
	size, err := strconv.Atoi(found[1])
	switch {
	case err != nil:
		return ""
	case found[2] == "M" && size >= 1024:
		return strconv.Itoa(size/1024) + "G"
	}
	return found[1] + found[2]
}

// watch returns nil when ctx ends, and an error when the daemon exits or stops answering.
func (d *daemon) watch(ctx context.Context, p *startedDaemon, every time.Duration) error {
	klog.FromContext(ctx).Info("MPS is ready", "resource", d.group.Resource, "gpus", len(d.group.GPUs), "threads",
		d.group.threads())
	pace := time.NewTicker(every)
	unanswered := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.ended:
			return fmt.Errorf("the MPS control daemon of %s ended: %w", d.group.Resource, p.exitErr)
		case <-pace.C:
		}
		if _, err := d.ask(ctx, probeCommand, askTimeout); err == nil {
			unanswered = 0
		} else if unanswered++; unanswered == maxUnanswered {
			return fmt.Errorf("the MPS control daemon of %s no longer answers: %w", d.group.Resource, err)
		}
	}
}

// drain stops the clients through the servers: a client killed at work may block the other clients,
// and the GPU. Daemons without these commands answer with a message instead of numbers.
func (d *daemon) drain(ctx context.Context) {
	for _, server := range d.numbers(ctx, "get_server_list") {
		for _, client := range d.numbers(ctx, "get_client_list "+server) {
			_, _ = d.ask(ctx, "terminate_client "+server+" "+client, askTimeout) // the client may have exited
		}
	}
}

// numbers returns the process IDs in the answer to a command.
func (d *daemon) numbers(ctx context.Context, command string) []string {
	answer, err := d.ask(ctx, command, askTimeout)
	if err != nil {
		return nil
	}
	all := strings.Fields(answer)
	if slices.ContainsFunc(all, func(word string) bool { return strings.Trim(word, "0123456789") != "" }) {
		return nil
	}
	return all
}

// stop stops the clients, then the daemon and its servers. A daemon that does not quit is killed.
func (d *daemon) stop(ctx context.Context, p *startedDaemon) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitTimeout)
	defer cancel()
	select {
	case <-p.ended:
	default:
		d.drain(ctx)
		if _, err := d.ask(ctx, quitCommand(), quitTimeout); err != nil {
			klog.FromContext(ctx).Info("The MPS control daemon does not quit and is killed",
				"resource", d.group.Resource, "reason", err.Error())
			break
		}
		select {
		case <-p.ended:
		case <-ctx.Done():
		}
	}
	p.kill()
}
