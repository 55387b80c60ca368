package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// driverless reports whether no claim can be prepared on this node: this process has no client of
// the API server, from which it would read claims, or not the kubelet's folder in which it would
// offer the driver. In the modes dra and split it waits for that folder.
func (d *daemon) driverless() bool {
	if d.watcher.Configs().Value().DRA.Mode != config.DRAOff {
		return false
	}
	if d.cluster == nil || d.config.NodeName == "" || d.config.KubeletRoot == "" {
		return true
	}
	_, err := os.Stat(filepath.Join(d.config.KubeletRoot, "plugins_registry"))
	return errors.Is(err, fs.ErrNotExist)
}

// kubeletRoots are where the kubelet's root directory may be seen: at its own path, and below the
// node's root where that is mounted as the driver root.
func kubeletRoots(c config.Config) (roots []string) {
	if c.KubeletRoot == "" {
		return nil
	}
	roots = []string{c.KubeletRoot}
	if c.Driver.Root == "/" {
		roots = append(roots, filepath.Join(c.Driver.ContainerRoot, c.KubeletRoot))
	}
	return roots
}

// keptClaims tell which claims the kubelet has had prepared and not unprepared, where this process
// is not the driver. The kubelet's checkpoint names all of them, also those of init containers and
// of pods that have ended; PodResources names those of containers.
type keptClaims struct {
	driver string
	gpu    func(device string) (uuid string, known bool)
	roots  []string
	// pods is nil where there is no kubelet.
	pods func(context.Context) ([]kubelet.ContainerDevice, error)
	// records are the claims with a record, by the UUID of the GPU. Those with adminAccess leave
	// the GPU to others.
	records *feed.Feed[map[string][]claims.Holder]
}

// checkpointTimeout is how long the disk with the kubelet's checkpoint is waited for.
const checkpointTimeout = 5 * time.Second

// checkpoint returns what the kubelet's checkpoint names.
func (k *keptClaims) checkpoint(ctx context.Context) (kept []kubelet.PreparedClaim, err error) {
	err = errors.New("the kubelet's root directory is not known")
	for _, root := range k.roots {
		kept, err = statefile.Within(ctx, statefile.NewDisk(), checkpointTimeout, func() ([]kubelet.PreparedClaim, error) {
			return kubelet.PreparedClaims(root)
		})
		if err == nil {
			return kept, nil
		}
	}
	return nil, err
}

// ofGPUs returns the names of claims that have devices of some GPUs, by the UUID of the GPU. A
// claim of which the devices are not known may have each of the GPUs. One of the two accounts has
// to answer; a claim that one of them names counts.
func (k *keptClaims) ofGPUs(ctx context.Context, gpus []string) (map[string][]string, error) {
	if k.pods == nil {
		return nil, nil
	}
	has := map[string][]string{}
	add := func(claim, device string) {
		if uuid, known := k.gpu(device); known {
			if !k.onlyLooks(claim, uuid) {
				has[uuid] = append(has[uuid], claim)
			}
			return
		}
		for _, uuid := range gpus {
			has[uuid] = append(has[uuid], claim)
		}
	}
	listed, unlisted := k.pods(ctx)
	for _, d := range listed {
		if d.Claim.Driver == k.driver {
			add(d.Claim.Namespace+"/"+d.Claim.Name, d.Claim.Device)
		}
	}
	kept, unread := k.checkpoint(ctx)
	for _, claim := range kept {
		devices, ours := claim.Devices[k.driver]
		for _, device := range devices {
			add(claim.Namespace+"/"+claim.Name, device)
		}
		if ours && len(devices) == 0 {
			add(claim.Namespace+"/"+claim.Name, "")
		}
	}
	if unlisted != nil && unread != nil {
		return nil, fmt.Errorf("the kubelet does not say which claims it has prepared: %w; %w", unlisted, unread)
	}
	return has, nil
}

// onlyLooks reports whether a claim has a GPU with adminAccess alone, by its record.
func (k *keptClaims) onlyLooks(claim, uuid string) bool {
	admin := false
	for _, h := range k.records.Value()[uuid] {
		if h.Namespace+"/"+h.Name == claim {
			if !h.Admin {
				return false
			}
			admin = true
		}
	}
	return admin
}

// uids returns the UIDs of the claims in the kubelet's checkpoint.
func (k *keptClaims) uids(ctx context.Context) (map[string]bool, error) {
	kept, err := k.checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, claim := range kept {
		all[claim.UID] = true
	}
	return all, nil
}
