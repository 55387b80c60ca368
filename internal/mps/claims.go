package mps

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// The control daemons of claims are requested by files in the folder claims of the root, by ID:
//
//	claims/<ID>.json     the requested daemon: a ClaimDaemon
//	claims/<ID>.ending   the same after the release, until all traces are removed
//	claims/<ID>          the directory of the daemon, as for a resource. It exists from before the
//	                     start of the daemon and the change of compute modes until both are undone.
//	                     .failed inside says why the daemon does not serve
//
// The Supervisor runs the daemons that the files request. To release a daemon, the owner of the
// claim renames the file, and the Supervisor removes everything.
const (
	claimsFolder = "claims"
	wantedSuffix = ".json"
	endingSuffix = ".ending"
	failedMark   = ".failed"
	// claimPace is the interval between checks of the files, on either side.
	claimPace = 100 * time.Millisecond
	// claimDisk bounds each access to the files.
	claimDisk = 2 * time.Second
	// maxClaim is the size limit of a file, in bytes.
	maxClaim = 1 << 20
)

// A ClaimDaemon is the control daemon requested by a ResourceClaim.
type ClaimDaemon struct {
	// Devices are the devices in the order of the clients' device numbers.
	Devices []ClaimDevice `json:"devices"`
	// Percentage is the share of the threads for each client, from 1 to 100; 0 for no limit.
	Percentage int `json:"activeThreadPercentage,omitempty"`
	// MultiUser lets clients of several users compute at the same time.
	MultiUser bool `json:"multiUser,omitempty"`
	// Exclusive reserves the GPUs for clients: no other process may compute there. MIG devices cannot
	// be reserved.
	Exclusive bool `json:"exclusive,omitempty"`
	// Shared is true if the clients belong to several claims. They may then also belong to several
	// users, if the driver supports multiple users.
	Shared bool `json:"shared,omitempty"`
}

// A ClaimDevice is a GPU or a MIG device of a ClaimDaemon.
type ClaimDevice struct {
	UUID string `json:"uuid"`
	// Memory is the memory limit of each client, in bytes; 0 for no limit.
	Memory int64 `json:"memoryLimit,omitempty"`
}

// uuids returns the UUIDs of the devices.
func (c ClaimDaemon) uuids() []string {
	var all []string
	for _, d := range c.Devices {
		all = append(all, d.UUID)
	}
	return all
}

// group returns the Group with the daemon of the claim.
func (c ClaimDaemon) group(id string) Group {
	g := Group{Resource: ClaimDir(id), Claim: &c}
	for _, d := range c.Devices {
		g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, MemoryBytes: uint64(max(d.Memory, 0)), Replicas: 1})
	}
	return g
}

// ClaimDir is the directory of the daemon with an ID, below the root.
func ClaimDir(id string) string { return claimsFolder + "/" + id }

// ClaimDaemons requests and releases the control daemons of claims, for the process that prepares
// claims. Several goroutines and processes may call the methods, but only one at a time for an ID.
type ClaimDaemons struct {
	root string
	disk *statefile.Disk
}

// NewClaimDaemons returns ClaimDaemons. The Supervisor of the same root runs the daemons.
func NewClaimDaemons(root string) *ClaimDaemons { return &ClaimDaemons{root, statefile.NewDisk()} }

// errNoSupervisor is the error while no Supervisor runs.
var errNoSupervisor = errors.New("mps-control-daemon does not run on this node, with the same directory of MPS state " +
	"(--mps-root)")

// within accesses the files, even after the end of ctx. It returns an error if the disk hangs.
func within[T any](ctx context.Context, c *ClaimDaemons, work func() (T, error)) (T, error) {
	value, err := statefile.Within(context.WithoutCancel(ctx), c.disk, claimDisk, work)
	if errors.Is(err, statefile.ErrHangs) {
		err = fmt.Errorf("the directory of MPS state: %w; check the disk of %s (--mps-root)", err, c.root)
	}
	return value, err
}

func (c *ClaimDaemons) path(id, suffix string) string {
	return filepath.Join(c.root, claimsFolder, id+suffix)
}

// Start requests a daemon, and waits until the daemon serves clients with the requested limits, or
// until ctx ends. The error says why the daemon does not serve; the request stays.
func (c *ClaimDaemons) Start(ctx context.Context, id string, wanted ClaimDaemon) error {
	text, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	requested, err := within(ctx, c, func() (bool, error) { return c.isRequested(id, text) })
	if err == nil && !requested {
		if err = c.End(ctx, id); err == nil {
			_, err = within(ctx, c, func() (struct{}, error) { return struct{}{}, c.request(id, text) })
		}
	}
	if err != nil {
		return err
	}
	pace := time.NewTicker(claimPace)
	for {
		problem, final := c.problem(ctx, id)
		if problem == "" {
			return nil
		}
		if final {
			return errors.New(problem)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s; stopped waiting for the daemon: %w", problem, ctx.Err())
		case <-pace.C:
		}
	}
}

// isRequested reports whether the file of an ID already has this text. It returns an error if no
// Supervisor would start the daemon.
func (c *ClaimDaemons) isRequested(id string, text []byte) (bool, error) {
	if !isSupervised(c.root) {
		return false, errNoSupervisor
	}
	before, _ := statefile.Read(c.path(id, wantedSuffix), maxClaim) // an unreadable file is replaced
	_, ending := os.Lstat(c.path(id, endingSuffix))
	return ending != nil && bytes.Equal(before, text), nil
}

// request asks for the daemon with an ID.
func (c *ClaimDaemons) request(id string, text []byte) error {
	err := os.MkdirAll(filepath.Join(c.root, claimsFolder), 0o755)
	if err == nil {
		err = statefile.Replace(c.path(id, wantedSuffix), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("request an MPS control daemon: %w", err)
	}
	return nil
}

// Problems returns, by ID, why daemons do not serve clients. The result omits daemons that serve
// clients.
func (c *ClaimDaemons) Problems(ids ...string) map[string]string {
	found, err := within(context.Background(), c, func() (map[string]string, error) {
		found := map[string]string{}
		for _, id := range ids {
			if problem, _ := c.readProblem(id); problem != "" {
				found[id] = problem
			}
		}
		return found, nil
	})
	if err != nil {
		found = map[string]string{}
		for _, id := range ids {
			found[id] = err.Error()
		}
	}
	return found
}

// problem returns why the daemon of an ID does not serve clients; empty if the daemon does. A final
// problem does not go away by itself within a moment.
func (c *ClaimDaemons) problem(ctx context.Context, id string) (problem string, final bool) {
	type answer struct {
		problem string
		final   bool
	}
	a, err := within(ctx, c, func() (a answer, _ error) {
		a.problem, a.final = c.readProblem(id)
		return a, nil
	})
	if err != nil {
		return err.Error(), false
	}
	return a.problem, a.final
}

// readProblem implements problem, and may wait for the disk.
func (c *ClaimDaemons) readProblem(id string) (problem string, final bool) {
	if !isSupervised(c.root) {
		return errNoSupervisor.Error(), true
	}
	dir := c.path(id, "")
	if _, err := os.Lstat(filepath.Join(dir, startedMark)); err == nil {
		return "", false
	}
	if reason, err := statefile.Read(filepath.Join(dir, failedMark), maxAnswer); err == nil {
		return string(reason), true
	}
	if _, err := os.Lstat(c.path(id, wantedSuffix)); errors.Is(err, fs.ErrNotExist) {
		return "the MPS control daemon was released; delete the pods of the claim, so that the claim is prepared again",
			true
	}
	return "the MPS control daemon is being started", false
}

// Stop releases a daemon, and does not wait for the end of the daemon. On a slow disk the release
// may happen later, in the background.
func (c *ClaimDaemons) Stop(id string) error {
	_, err := within(context.Background(), c, func() (struct{}, error) { return struct{}{}, c.stop(id) })
	return err
}

func (c *ClaimDaemons) stop(id string) error {
	err := os.Rename(c.path(id, wantedSuffix), c.path(id, endingSuffix))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("end an MPS control daemon: %w", err)
	}
	unlock, err := lockRoot(c.root)
	if err != nil {
		return nil // the Supervisor removes the file
	}
	defer unlock()
	if _, err := os.Lstat(c.path(id, "")); errors.Is(err, fs.ErrNotExist) { // never started, or already stopped
		return statefile.Remove(c.path(id, endingSuffix))
	}
	return nil
}

// End is Stop with a wait until the daemon has ended and the compute modes are restored, or until
// ctx ends.
func (c *ClaimDaemons) End(ctx context.Context, id string) error {
	pace := time.NewTicker(claimPace)
	for {
		ended, err := within(ctx, c, func() (bool, error) { return c.tryEnd(id) })
		if err != nil || ended {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the MPS control daemon of an earlier claim has not ended yet: %w", ctx.Err())
		case <-pace.C:
		}
	}
}

// tryEnd calls stop, and reports whether the daemon has stopped. It returns an error if no
// Supervisor would stop the daemon.
func (c *ClaimDaemons) tryEnd(id string) (bool, error) {
	if err := c.stop(id); err != nil {
		return false, err
	}
	if _, err := os.Lstat(c.path(id, endingSuffix)); errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if !isSupervised(c.root) {
		return false, fmt.Errorf("an MPS control daemon of an earlier claim may still run: %w", errNoSupervisor)
	}
	return false, nil
}

// All returns the UUIDs of the devices of all daemons, by ID: of requested daemons and of daemons
// that have not stopped yet.
func (c *ClaimDaemons) All() (map[string][]string, error) {
	return within(context.Background(), c, func() (map[string][]string, error) { return devices(c.root) })
}

// devices implements All, and may wait for the disk.
func devices(root string) (map[string][]string, error) {
	wanted, ending, err := list(root)
	if err != nil {
		return nil, err
	}
	all := map[string][]string{}
	for _, of := range []map[string]ClaimDaemon{wanted, ending} {
		for id, claim := range of {
			all[id] = claim.uuids()
		}
	}
	return all, nil
}

// list returns the contents of the files of claims, by ID. An unreadable file has no devices.
func list(root string) (wanted, ending map[string]ClaimDaemon, err error) {
	dir := filepath.Join(root, claimsFolder)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list the MPS control daemons of claims: %w", err)
	}
	wanted, ending = map[string]ClaimDaemon{}, map[string]ClaimDaemon{}
	for _, e := range entries {
		for suffix, of := range map[string]map[string]ClaimDaemon{wantedSuffix: wanted, endingSuffix: ending} {
			id, is := strings.CutSuffix(e.Name(), suffix)
			if !is {
				continue
			}
			text, err := statefile.Read(filepath.Join(dir, e.Name()), maxClaim)
			if errors.Is(err, fs.ErrNotExist) {
				continue // renamed meanwhile
			}
			var claim ClaimDaemon
			if err == nil {
				err = json.Unmarshal(text, &claim)
			}
			if err != nil {
				claim = ClaimDaemon{}
			}
			of[id] = claim
		}
	}
	return wanted, ending, nil
}

// lockRoot locks a root, which has only one Supervisor.
func lockRoot(root string) (unlock func(), err error) {
	lock, err := statefile.TakeLock(filepath.Join(root, lockFile))
	switch {
	case errors.Is(err, statefile.ErrLocked):
		return nil, fmt.Errorf("the directory of MPS state: %w; another mps-control-daemon runs in %s", err, root)
	case err != nil:
		return nil, fmt.Errorf("the directory of MPS state: %w; mount the host's directory (--mps-root) there", err)
	}
	return lock.Close, nil
}

// IsSupervised reports whether mps-control-daemon works in a root.
func IsSupervised(root string) bool { return root != "" && isSupervised(root) }

// isSupervised reports whether a Supervisor works in a root.
func isSupervised(root string) bool { return statefile.IsLocked(filepath.Join(root, lockFile)) }
