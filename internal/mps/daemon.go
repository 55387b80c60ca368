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
)

// startedMark, in a resource's directory, is there while its daemon has its limits and serves
// clients.
const startedMark = ".started"

const (
	startTimeout  = 30 * time.Second // for a daemon to answer
	startPace     = 100 * time.Millisecond
	askEvery      = 10 * time.Second // while it serves
	maxUnanswered = 3                // probes in a row that it may leave unanswered
	// quitGrace is how long clients may go on after the quit command; the servers then end them.
	quitGrace = 5 * time.Second
	// quitTimeout is how long a daemon may take to quit before it is killed.
	quitTimeout = quitGrace + 5*time.Second
)

// A daemon is one life of the control daemon of a Group.
type daemon struct {
	control
	root  string // of all MPS state
	group Group
	gpus  *exclusive
}

// run starts the daemon, sets its limits, and watches it until ctx ends; the daemon ends then, too.
// ready is called when clients are served, and when they no longer are. An error says why it could
// not be started or why it ended.
func (d *daemon) run(ctx context.Context, ready func(bool)) error {
	for _, name := range []string{pipeFolder, logFolder} {
		if err := makeFolder(d.folder(name)); err != nil {
			return fmt.Errorf("make a folder for MPS: %w", err)
		}
	}
	if err := d.admit(); err != nil {
		return err
	}
	if err := d.endLeftover(ctx); err != nil {
		return err
	}
	if gpus := d.group.exclusive(); len(gpus) > 0 {
		if err := d.gpus.claim(ctx, d.group.Resource, gpus); err != nil {
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
	mark := d.folder(startedMark)
	if err := statefile.Replace(mark, nil, 0o600); err != nil {
		return fmt.Errorf("mark the MPS control daemon as started: %w", err)
	}
	defer os.Remove(mark)
	ready(true)
	defer ready(false)
	return d.watch(ctx, p, askEvery)
}

// admit lets other users reach the pipe folder, whatever the umask is: a server without
// -multiuser-server is its client's. What is above the root of MPS state is not mounted into
// containers.
func (d *daemon) admit() error {
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

// makeFolder makes a folder that containers of any user may use, also where SELinux enforces.
func makeFolder(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return nil // this kernel has no SELinux, or this container is not privileged
	}
	return unix.Setxattr(path, "security.selinux", []byte("system_u:object_r:container_file_t:s0\x00"), 0)
}

// quit is the command that ends a daemon.
func quit() string { return fmt.Sprintf("quit -t %d", int(quitGrace.Seconds())) }

// multiUser lets clients of different users compute at the same time. Otherwise those of one user
// wait until those of another have ended.
const multiUser = "-multiuser-server"

// begin starts the daemon and waits until it answers. An old driver's ends at once if it is told to
// serve several users.
func (d *daemon) begin(ctx context.Context) (*startedDaemon, error) {
	if d.group.Claim != nil && !d.group.Claim.MultiUser {
		return d.beginWith(ctx)
	}
	p, err := d.beginWith(ctx, multiUser)
	switch {
	case !errors.Is(err, errEndedAtOnce):
		return p, err
	case d.group.Claim != nil && !d.group.Claim.Shared:
		return nil, fmt.Errorf("%w; a driver that does not know %s needs a claim without sharing.mpsConfig.multiUser", err,
			multiUser)
	}
	klog.FromContext(ctx).Info("Trying again with an MPS control daemon whose clients wait for those of other users",
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

// errEndedAtOnce is wrapped by the error of a daemon that ended before it answered.
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
			return fmt.Errorf("%w: %w; the lines that it printed say why", errEndedAtOnce, p.exit)
		case <-deadline.C:
			return fmt.Errorf("the MPS control daemon of %s does not answer %s after its start: %w", d.group.Resource,
				startTimeout, err)
		case <-pace.C:
		}
	}
}

// limit gives each client its part of the GPUs.
func (d *daemon) limit(ctx context.Context) error {
	if threads := d.group.threads(); threads > 0 {
		if err := d.set(ctx, "default_active_thread_percentage", strconv.Itoa(threads), percentage); err != nil {
			return err
		}
	}
	for i, g := range d.group.GPUs {
		if g.memoryMiB() == 0 {
			if d.group.Claim == nil && !d.group.Unlimited {
				klog.FromContext(ctx).Info("The memory of a GPU is not known: its clients have no limit", "gpu", g.UUID)
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

// set sets something and reads it back: a command that the daemon refuses succeeds all the same.
// What read makes of an answer that it does not understand is empty; then all is well unless the
// daemon had something to say.
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
	return fmt.Errorf("the MPS control daemon of %s does not take the limit set_%s %s: it says %q, and has %q",
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

// sizes are how memory is written.
var sizes = regexp.MustCompile(`(\d+)\s*([MG])`)

// memory reads "512M", "20480M" and "20G", in GiB: a daemon says no more than that of a size of a
// GiB or more.
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

// watch returns nil when ctx ends, and an error when the daemon does or no longer answers.
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
			return fmt.Errorf("the MPS control daemon of %s ended: %w", d.group.Resource, p.exit)
		case <-pace.C:
		}
		if _, err := d.ask(ctx, probeCommand, askTimeout); err == nil {
			unanswered = 0
		} else if unanswered++; unanswered == maxUnanswered {
			return fmt.Errorf("the MPS control daemon of %s no longer answers: %w", d.group.Resource, err)
		}
	}
}

// drain has the servers end the work of their clients: a client that is killed in the middle of it
// may block the others, and the GPU. A daemon that does not know the commands answers something
// that is no number.
func (d *daemon) drain(ctx context.Context) {
	for _, server := range d.numbers(ctx, "get_server_list") {
		for _, client := range d.numbers(ctx, "get_client_list "+server) {
			_, _ = d.ask(ctx, "terminate_client "+server+" "+client, askTimeout) // it may have ended
		}
	}
}

// numbers returns the process IDs that a command answers.
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

// stop ends the daemon if it has not ended, and its servers: their clients are ended, it is asked
// to quit, and they are killed if they do not.
func (d *daemon) stop(ctx context.Context, p *startedDaemon) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitTimeout)
	defer cancel()
	select {
	case <-p.ended:
	default:
		d.drain(ctx)
		if _, err := d.ask(ctx, quit(), quitTimeout); err != nil {
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
