package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
)

// A Removal is a file of this program on a node, or a part of its Node object.
type Removal struct {
	// What is a path, or the part of the Node.
	What string
	// Kept is why the file stays, a sentence without a full stop; empty after a removal.
	Kept string
}

// PrintRemovals prints a line for each Removal.
func PrintRemovals(output io.Writer, done []Removal, dry bool) error {
	verb := "removed "
	if dry {
		verb = "would remove "
	}
	text := ""
	for _, r := range done {
		if r.Kept != "" {
			text += "kept " + r.What + ": " + r.Kept + "\n"
		} else {
			text += verb + r.What + "\n"
		}
	}
	_, err := io.WriteString(output, text)
	return err
}

// A cleanup removes the files of this program from a node.
type cleanup struct {
	config.Config
	dry  bool
	done []Removal
	// cgroups is the path of the node's /sys/fs/cgroup, where running pods are visible.
	cgroups string
	// claims are the UIDs of the kubelet's claims.
	claims map[string]bool
	// unread is why the kubelet's claims are unknown; nil if they are known.
	unread error
	// devices and mps are why containers may need the CDI specs of devices, and the MPS
	// root; empty if no container does.
	devices, mps string
}

// Cleanup removes this program's files from the node: CDI specs, the MPS root, sockets,
// the file with labels, and the state directory. It keeps files in use by containers
// according to the kubelet. With dry, it removes nothing. It returns an error, and removes
// nothing, if a daemon of this program is running, or if neither the kubelet nor its checkpoint says
// what containers use.
// Parameter cgroups is the path of the node's /sys/fs/cgroup.
func Cleanup(ctx context.Context, c config.Config, cgroups string, dry bool) ([]Removal, error) {
	l := &cleanup{Config: c, cgroups: cgroups, dry: dry, claims: map[string]bool{}}
	folder := filepath.Dir(c.KubeletSocket)
	if err := l.refuseDaemon(ctx, folder); err != nil {
		return nil, err
	}
	if err := l.findUse(ctx); err != nil {
		return nil, err
	}
	problems := []error{
		l.removeClaims(), l.removeSpecs(), l.removeMPS(), l.removeSockets(ctx, folder),
		l.removeSockets(ctx, filepath.Join(c.KubeletRoot, "plugins_registry")),
		l.remove(filepath.Join(folder, leadFolder), ""), l.remove(c.Features.LabelsFile, ""),
	}
	kept := ""
	for _, r := range l.done {
		if r.Kept != "" {
			kept = "it contains the record of the kept files"
		}
	}
	if kept == "" {
		problems = append(problems, l.removeState())
	} else {
		problems = append(problems, l.remove(c.StateDir, kept))
	}
	return l.done, errors.Join(problems...)
}

// removeState removes the state directory. The folder with the driver that the node loads stays,
// with all that gpu-driver has there.
func (l *cleanup) removeState() error {
	drivers := filepath.Join(l.StateDir, filepath.Base(driverapi.DefaultDirectory))
	if _, err := os.Lstat(filepath.Join(drivers, driverapi.Current)); err != nil || l.StateDir == "" {
		return l.remove(l.StateDir, "")
	}
	problems := []error{l.remove(drivers, "the driver of the node is in it")}
	entries, err := os.ReadDir(l.StateDir)
	problems = append(problems, err)
	for _, e := range entries {
		if e.Name() != filepath.Base(drivers) {
			problems = append(problems, l.remove(filepath.Join(l.StateDir, e.Name()), ""))
		}
	}
	return errors.Join(problems...)
}

// refuseDaemon returns an error if a daemon of this program is running on the node.
func (l *cleanup) refuseDaemon(ctx context.Context, folder string) error {
	for _, dir := range []string{filepath.Join(folder, leadFolder), filepath.Join(l.StateDir, leadFolder)} {
		if lead.IsTaken(ctx, dir) {
			return fmt.Errorf("a daemon of this program runs on the node: it listens in %s; uninstall it before "+
				"cleanup", dir)
		}
	}
	if mps.IsSupervised(l.Edits.MPSRoot) {
		return fmt.Errorf("mps-control-daemon runs on the node: it has locked %s; uninstall it before cleanup",
			l.Edits.MPSRoot)
	}
	return nil
}

// findUse asks the kubelet which containers use files of this program.
func (l *cleanup) findUse(ctx context.Context) error {
	account := kubelet.NewPodResources(l.PodResourcesSocket, clock.RealClock{})
	defer account.Close()
	devices, devicesErr := account.ContainerDevices(ctx)
	live, held := map[string]bool{}, ""
	for _, d := range devices {
		if d.Claim.Name == "" && isGPU(d.Resource, d.ID) {
			live[d.ID], held = true, d.Namespace+"/"+d.Pod
		}
	}
	claims, claimsErr := kubelet.PreparedClaims(l.KubeletRoot)
	for _, c := range claims {
		l.claims[c.UID] = true
	}
	l.unread = claimsErr
	directory, err := kubelet.NewDirectory(l.KubeletSocket, clock.RealClock{})
	if err != nil {
		return err
	}
	answers, answersErr := directory.Answers()
	switch {
	case devicesErr != nil && answersErr != nil:
		return fmt.Errorf("the kubelet does not say what containers use, so nothing is removed: %w; %w",
			devicesErr, answersErr)
	case answersErr != nil && held != "":
		l.devices = "pod " + held + " has GPUs, and it is not known by which CDI specs: " + answersErr.Error()
		l.mps = l.devices
	}
	for _, a := range answers {
		held := slices.ContainsFunc(a.IDs, func(id string) bool { return live[id] })
		if !held && devicesErr == nil && l.hasEnded(a.PodUID) {
			continue // the checkpoint also names ended pods
		}
		user := "container " + a.Container + " of the pod with UID " + a.PodUID + " uses it"
		if byCDI(a) {
			l.devices, l.mps = user, user // the spec says whether the container uses MPS
		} else if a.Env["CUDA_MPS_PIPE_DIRECTORY"] != "" {
			l.mps = user
		}
	}
	if others := directory.Listening(ctx); len(others) > 0 {
		l.devices = "another device plugin, at " + strings.Join(others, ", ") + ", uses files of these names"
	}
	return nil
}

// hasEnded reports whether a pod has ended according to cgroups. PodResources alone is not enough:
// it omits init containers, and most pods until a restarted kubelet has reached the API server.
func (l *cleanup) hasEnded(podUID string) bool {
	_, err := os.Stat(l.cgroups)
	return err == nil && !kubelet.PodRuns(l.cgroups, podUID)
}

// byCDI reports whether a container got its devices by CDI names.
func byCDI(a kubelet.Answer) bool {
	for key := range a.Annotations {
		if strings.HasPrefix(key, "cdi.k8s.io/") {
			return true
		}
	}
	return len(a.CDIDevices) > 0
}

// removeClaims removes the CDI specs and metadata files of claims.
func (l *cleanup) removeClaims() error {
	specs, err := cdi.ClaimFiles(l.CDIDir)
	problems := []error{err}
	ours := map[string]bool{} // UIDs of claims with a note of this program
	for _, f := range specs {
		ours[f.UID] = ours[f.UID] || cdi.ClaimSpecs{Dir: l.CDIDir, Driver: f.Driver}.Note(f.UID) != nil
	}
	for _, f := range specs {
		kept := ""
		switch {
		case !ours[f.UID]:
			continue // another driver's claim
		case l.claims[f.UID]:
			kept = "the kubelet has the claim: " + owner.ReleaseRemedy
		case l.unread != nil:
			kept = l.unread.Error()
		}
		if kept != "" {
			l.mps = cmp.Or(l.mps, "a claim may use it: "+kept)
		}
		problems = append(problems, l.remove(f.Path, kept))
	}
	return errors.Join(problems...)
}

// removeSpecs removes the CDI specs of devices.
func (l *cleanup) removeSpecs() error {
	paths, err := cdi.DeviceFiles(l.CDIDir)
	problems := []error{err}
	for _, path := range paths {
		problems = append(problems, l.remove(path, l.devices))
	}
	return errors.Join(problems...)
}

// removeMPS removes the MPS root, including its shared memory mount.
func (l *cleanup) removeMPS() error {
	root := l.Edits.MPSRoot
	if _, err := os.Lstat(root); root == "" || err != nil {
		return nil //nolint:nilerr // there is nothing to remove
	}
	if l.mps != "" || l.dry {
		return l.remove(root, l.mps)
	}
	if err := mps.UnmountSHM(root); err != nil {
		return err
	}
	return l.remove(root, "")
}

// removeSockets removes the sockets of this program in a folder of the kubelet, unless a
// process listens there.
func (l *cleanup) removeSockets(ctx context.Context, folder string) error {
	entries, err := os.ReadDir(folder)
	if statefile.IsAbsent(err) {
		return nil
	}
	problems := []error{err}
	for _, e := range entries {
		if _, _, ours := kubelet.ParseSocketName(e.Name()); !ours {
			continue
		}
		kept := ""
		if kubelet.DialOnce(ctx, filepath.Join(folder, e.Name())) == nil {
			kept = "a process listens there"
		}
		problems = append(problems, l.remove(filepath.Join(folder, e.Name()), kept))
	}
	return errors.Join(problems...)
}

// remove removes a file or a folder, if it exists and there is no reason to keep it. A
// mounted folder, as in a container, is emptied.
func (l *cleanup) remove(path, kept string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Lstat(path); statefile.IsAbsent(err) {
		return nil
	}
	if kept == "" && !l.dry {
		if err := os.RemoveAll(path); err != nil {
			entries, unread := os.ReadDir(path)
			if unread != nil || len(entries) > 0 {
				return fmt.Errorf("remove %s: %w", path, err)
			}
		}
	}
	l.done = append(l.done, Removal{path, kept})
	return nil
}
