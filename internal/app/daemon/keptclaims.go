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

// driverless reports whether no claim can be prepared on this node. Either this process
// has no client of the API server to read claims, or the kubelet's folder for DRA drivers
// does not exist. In the modes dra and split, the process waits for the folder instead.
func (w *claimsWing) driverless() bool {
	if w.watcher.Configs().Value().DRA.Mode != config.DRAOff {
		return false
	}
	if w.cluster == nil || w.startup.NodeName == "" || w.startup.KubeletRoot == "" {
		return true
	}
	_, err := os.Stat(filepath.Join(w.startup.KubeletRoot, "plugins_registry"))
	return errors.Is(err, fs.ErrNotExist)
}

// kubeletRoots are the possible paths of the kubelet's root directory: its own path, and
// the path below the node's root if the node's root is mounted as the driver root.
func kubeletRoots(c config.Startup) (roots []string) {
	if c.KubeletRoot == "" {
		return nil
	}
	roots = []string{c.KubeletRoot}
	if c.Driver.Root == "/" {
		roots = append(roots, filepath.Join(c.Driver.ContainerRoot, c.KubeletRoot))
	}
	return roots
}

// keptClaims knows the claims that the kubelet has prepared and not unprepared, on nodes where this
// process is not the driver. The kubelet's checkpoint names all of them, including claims of init
// containers and of pods that have ended. PodResources names claims of containers.
type keptClaims struct {
	driver string
	gpu    func(device string) (uuid string, known bool)
	roots  []string
	// pods is nil without a kubelet.
	pods func(context.Context) ([]kubelet.ContainerDevice, error)
	// records are the claims with a record, by the UUID of the GPU. Claims with
	// adminAccess leave the GPU to others.
	records *feed.Feed[map[string][]claims.Holder]
}

// checkpointTimeout limits the wait for the disk with the kubelet's checkpoint.
const checkpointTimeout = 5 * time.Second

// checkpoint returns the claims in the kubelet's checkpoint.
func (k *keptClaims) checkpoint(ctx context.Context) (claims []kubelet.PreparedClaim, err error) {
	err = errors.New("the kubelet's root directory is not known")
	for _, root := range k.roots {
		claims, err = statefile.Within(ctx, statefile.NewDisk(), checkpointTimeout,
			func() ([]kubelet.PreparedClaim, error) {
				return kubelet.PreparedClaims(root)
			})
		if err == nil {
			return claims, nil
		}
	}
	return nil, err
}

// ofGPUs returns the names of claims with devices of the GPUs, by the UUID of the GPU. A
// claim with unknown devices may have each of the GPUs. At least one of the two accounts
// must answer; a claim in either account counts.
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
	podDevices, podsErr := k.pods(ctx)
	for _, d := range podDevices {
		if d.Claim.Driver == k.driver {
			add(d.Claim.Namespace+"/"+d.Claim.Name, d.Claim.Device)
		}
	}
	claims, claimsErr := k.checkpoint(ctx)
	for _, claim := range claims {
		devices, ours := claim.Devices[k.driver]
		for _, device := range devices {
			add(claim.Namespace+"/"+claim.Name, device)
		}
		if ours && len(devices) == 0 {
			add(claim.Namespace+"/"+claim.Name, "")
		}
	}
	if podsErr != nil && claimsErr != nil {
		return nil, fmt.Errorf("the kubelet does not say which claims it has prepared: %w; %w", podsErr, claimsErr)
	}
	return has, nil
}

// onlyLooks reports whether a claim has a GPU only with adminAccess, according to its record.
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
	claims, err := k.checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, claim := range claims {
		all[claim.UID] = true
	}
	return all, nil
}
