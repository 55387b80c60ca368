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

// The control daemons of claims are asked for by files in the folder claims of the root, by IDs:
//
//	claims/<ID>.json     the daemon that is wanted: a ClaimDaemon
//	claims/<ID>.ending   the same, when it is not wanted any more and may still be there
//	claims/<ID>          the directory of the daemon, as that of a resource; it is there from before the daemon is started, and before
//	                     the compute mode of a GPU is set, until that is undone. In it, .failed says why the daemon does not serve
//
// The Supervisor runs what the files ask for. Who removes a claim renames its file, and the
// Supervisor removes all of it.
const (
	claimsFolder = "claims"
	wantedSuffix = ".json"
	endingSuffix = ".ending"
	failedMark   = ".failed"
	// claimPace is how often either side looks at the files.
	claimPace = 100 * time.Millisecond
	// claimDisk bounds each access to the files.
	claimDisk = 2 * time.Second
	// maxClaim is the largest file that is read, in bytes.
	maxClaim = 1 << 20
)

// A ClaimDaemon is the control daemon that a ResourceClaim wants.
type ClaimDaemon struct {
	// Devices are in the order in which clients count them.
	Devices []ClaimDevice `json:"devices"`
	// Percentage is the part of the threads that one client may use, from 1 to 100; 0 for no limit.
	Percentage int `json:"activeThreadPercentage,omitempty"`
	// MultiUser has clients of several users compute at the same time.
	MultiUser bool `json:"multiUser,omitempty"`
	// Exclusive has no process but clients compute on the GPUs. MIG devices cannot be left to MPS in
	// this way.
	Exclusive bool `json:"exclusive,omitempty"`
	// Shared says that its clients are of several claims. They are of several users if the driver can
	// do that.
	Shared bool `json:"shared,omitempty"`
}

// A ClaimDevice is a GPU or a MIG device of a ClaimDaemon.
type ClaimDevice struct {
	UUID string `json:"uuid"`
	// Memory is the most memory that one client may have, in bytes; 0 for no limit.
	Memory int64 `json:"memoryLimit,omitempty"`
}

// uuids are those of the devices.
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

// ClaimDaemons are the control daemons of claims, as the process sees them that prepares claims.
// Their methods may be called by several goroutines and processes, but by one at a time for one ID.
type ClaimDaemons struct {
	root string
	disk *statefile.Disk
}

// NewClaimDaemons returns ClaimDaemons, which are run by the Supervisor of the same root.
func NewClaimDaemons(root string) *ClaimDaemons { return &ClaimDaemons{root, statefile.NewDisk()} }

// errNoSupervisor is why there is no daemon where nobody would start one.
var errNoSupervisor = errors.New("mps-control-daemon does not run on this node, with the same directory of MPS state (--mps-root)")

// within does work on the files, also when ctx has ended. A disk that hangs is an error.
func within[T any](ctx context.Context, c *ClaimDaemons, work func() (T, error)) (T, error) {
	value, err := statefile.Within(context.WithoutCancel(ctx), c.disk, claimDisk, work)
	if errors.Is(err, statefile.ErrHangs) {
		err = fmt.Errorf("the directory of MPS state: %w; see to the disk of %s (--mps-root)", err, c.root)
	}
	return value, err
}

func (c *ClaimDaemons) path(id, suffix string) string {
	return filepath.Join(c.root, claimsFolder, id+suffix)
}

// Start asks for a daemon, and waits until it serves clients with the limits that are wanted, or
// until ctx ends. The error says why it does not serve; the daemon stays wanted.
func (c *ClaimDaemons) Start(ctx context.Context, id string, wanted ClaimDaemon) error {
	text, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	asked, err := within(ctx, c, func() (bool, error) { return c.asked(id, text) })
	if err == nil && !asked {
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
			return fmt.Errorf("%s; it was not waited for any longer: %w", problem, ctx.Err())
		case <-pace.C:
		}
	}
}

// asked reports whether this text asks for the daemon with an ID already. The error says that
// nobody would start it.
func (c *ClaimDaemons) asked(id string, text []byte) (bool, error) {
	if !supervised(c.root) {
		return false, errNoSupervisor
	}
	before, _ := statefile.Read(c.path(id, wantedSuffix), maxClaim) // one that cannot be read is not this one
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
		return fmt.Errorf("ask for an MPS control daemon: %w", err)
	}
	return nil
}

// Problems returns why those of the daemons with some IDs that do not serve clients do not.
func (c *ClaimDaemons) Problems(ids ...string) map[string]string {
	found, err := within(context.Background(), c, func() (map[string]string, error) {
		found := map[string]string{}
		for _, id := range ids {
			if problem, _ := c.look(id); problem != "" {
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

// problem returns why the daemon with an ID does not serve clients; empty if it does. It is final
// if it does not end by itself within a moment.
func (c *ClaimDaemons) problem(ctx context.Context, id string) (problem string, final bool) {
	type answer struct {
		problem string
		final   bool
	}
	a, err := within(ctx, c, func() (a answer, _ error) {
		a.problem, a.final = c.look(id)
		return a, nil
	})
	if err != nil {
		return err.Error(), false
	}
	return a.problem, a.final
}

// look is problem, and waits for the disk.
func (c *ClaimDaemons) look(id string) (problem string, final bool) {
	if !supervised(c.root) {
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
		return "the MPS control daemon is not wanted any more; delete the pods of the claim, so that it is prepared anew", true
	}
	return "the MPS control daemon is being started", false
}

// Stop says that a daemon is not wanted any more. It does not wait until the daemon has ended.
// Where the disk does not answer in time, that may be said later, by itself.
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
		return nil // the Supervisor removes it
	}
	defer unlock()
	if _, err := os.Lstat(c.path(id, "")); errors.Is(err, fs.ErrNotExist) { // it was never started, or was ended
		return statefile.Remove(c.path(id, endingSuffix))
	}
	return nil
}

// End is Stop, and waits until the daemon has ended and the compute modes are set back, or until
// ctx ends.
func (c *ClaimDaemons) End(ctx context.Context, id string) error {
	pace := time.NewTicker(claimPace)
	for {
		ended, err := within(ctx, c, func() (bool, error) { return c.ended(id) })
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

// ended is Stop, and reports whether the daemon has ended. The error says that nobody would end it.
func (c *ClaimDaemons) ended(id string) (bool, error) {
	if err := c.stop(id); err != nil {
		return false, err
	}
	if _, err := os.Lstat(c.path(id, endingSuffix)); errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if !supervised(c.root) {
		return false, fmt.Errorf("an MPS control daemon of an earlier claim may still run: %w", errNoSupervisor)
	}
	return false, nil
}

// All returns the UUIDs of the devices of all daemons that are wanted, or have not ended yet, by
// ID.
func (c *ClaimDaemons) All() (map[string][]string, error) {
	return within(context.Background(), c, func() (map[string][]string, error) { return devices(c.root) })
}

// devices is All, and waits for the disk.
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

// list returns what the files of claims ask for, by ID. A file that cannot be read asks for no
// devices.
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
				continue // it was renamed meanwhile
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

// lockRoot locks a root for the one Supervisor of it.
func lockRoot(root string) (unlock func(), err error) {
	lock, err := statefile.TakeLock(filepath.Join(root, lockFile))
	switch {
	case errors.Is(err, statefile.ErrLocked):
		return nil, fmt.Errorf("the directory of MPS state: %w; another mps-control-daemon works in %s", err, root)
	case err != nil:
		return nil, fmt.Errorf("the directory of MPS state: %w; mount the host's (--mps-root) there", err)
	}
	return lock.Close, nil
}

// IsSupervised reports whether mps-control-daemon works in a root.
func IsSupervised(root string) bool { return root != "" && supervised(root) }

// supervised reports whether a Supervisor works in a root.
func supervised(root string) bool { return statefile.IsLocked(filepath.Join(root, lockFile)) }
