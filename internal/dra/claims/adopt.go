package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// maxCheckpoint is the largest checkpoint of NVIDIA's driver to read, in bytes. A
	// claim takes a few thousand bytes.
	maxCheckpoint = 16 << 20
	// adoptedFile holds the checksum of the last adopted checkpoint: claims that were
	// unprepared since then must not come back.
	adoptedFile = "nvidia.adopted"
	// prepareCompleted is the state of a claim that NVIDIA's driver has prepared.
	prepareCompleted = "PrepareCompleted"
)

// A checkpoint is the part of the checkpoint of NVIDIA's driver used by this package. The
// checksums cannot be verified, because they depend on how each driver version writes the
// fields.
type checkpoint struct {
	V2 *struct {
		NodeBootID     string                   `json:"nodeBootID"`
		PreparedClaims map[string]preparedClaim `json:"preparedClaims"`
	} `json:"v2"`
}

type preparedClaim struct {
	State     string `json:"checkpointState"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Status    struct {
		Allocation struct {
			Devices struct {
				Results []struct {
					Driver           string            `json:"driver"`
					Request          string            `json:"request"`
					Pool             string            `json:"pool"`
					Device           string            `json:"device"`
					ShareID          string            `json:"shareID"`
					AdminAccess      bool              `json:"adminAccess"`
					ConsumedCapacity map[string]string `json:"consumedCapacity"`
					Tolerations      []toleration      `json:"tolerations"`
				} `json:"results"`
			} `json:"devices"`
		} `json:"allocation"`
	} `json:"status"`
	PreparedDevices []struct {
		Devices []struct {
			GPU *struct {
				Info struct {
					UUID string `json:"uuid"`
				} `json:"info"`
				Device deviceName `json:"device"`
			} `json:"gpu"`
			MIG *struct {
				Concrete struct {
					GPU string `json:"parentUUID"`
					MIG string `json:"migUUID"`
					GI  int    `json:"giId"`
					CI  int    `json:"ciId"`
				} `json:"concrete"`
				Device deviceName `json:"device"`
			} `json:"mig"`
		} `json:"devices"`
		ConfigState struct {
			MPS string `json:"mpsControlDaemonID"`
		} `json:"configState"`
	} `json:"preparedDevices"`
}

type deviceName struct {
	Name string `json:"DeviceName"`
}

func parseCheckpoint(text []byte) (c checkpoint, err error) {
	if err = json.Unmarshal(text, &c); err == nil && c.V2 == nil {
		err = errors.New("it has no v2 section")
	}
	return c, err
}

// record returns the record of a claim that NVIDIA's driver has prepared. The error says
// why the claim cannot be adopted.
func (p preparedClaim) record(uid string) (record, error) {
	type identity struct {
		gpu string
		mig *recordMIG
	}
	identities := map[string]identity{}
	for _, group := range p.PreparedDevices {
		if group.ConfigState.MPS != "" {
			return record{}, errors.New("its MPS control daemon belongs to NVIDIA's driver")
		}
		for _, d := range group.Devices {
			if d.GPU != nil {
				identities[d.GPU.Device.Name] = identity{gpu: d.GPU.Info.UUID}
			}
			if d.MIG != nil {
				m := d.MIG.Concrete
				identities[d.MIG.Device.Name] = identity{m.GPU, &recordMIG{UUID: m.MIG, GI: m.GI, CI: m.CI}}
			}
		}
	}
	r := record{Version: recordVersion, UID: uid, Namespace: p.Namespace, Name: p.Name, Adopted: true}
	for _, result := range p.Status.Allocation.Devices.Results {
		if result.Driver != dra.Driver {
			continue
		}
		found := identities[result.Device]
		if found.gpu == "" || found.mig != nil && found.mig.UUID == "" {
			return record{}, fmt.Errorf("its device %q has no GPU", result.Device)
		}
		r.Devices = append(r.Devices, recordDevice{
			Request: result.Request, Pool: result.Pool, Device: result.Device, ShareID: result.ShareID,
			AdminAccess:      result.AdminAccess,
			ConsumedCapacity: result.ConsumedCapacity, Tolerations: result.Tolerations, GPU: found.gpu, MIG: found.mig,
		})
	}
	switch {
	case p.State != prepareCompleted:
		return record{}, errors.New("not prepared: " + p.State)
	case !validUID(uid) || p.Namespace == "" || p.Name == "":
		return record{}, errors.New("it has no name")
	case len(r.Devices) == 0:
		return record{}, errors.New("it has no device")
	}
	return r, nil
}

// adopt takes over the claims prepared by NVIDIA's driver since the node started. Their
// containers keep running, and the kubelet unprepares the claims here. adopt reports
// whether adoption is complete. While NVIDIA's driver runs, or this daemon offers no GPU
// to claims, the claims stay with NVIDIA's driver.
func (c *Claims) adopt(ctx context.Context) bool {
	switch {
	// the kubelet calls the driver that prepared a claim
	case c.options.Checkpoint == "" || c.options.DriverName != dra.Driver:
		return true
	case !c.offersGPUs():
		return false
	}
	text, err := statefile.Read(c.options.Checkpoint, maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	log := klog.FromContext(ctx)
	marker := filepath.Join(c.store.folder(), adoptedFile)
	if err == nil && c.isAdopted(text) {
		return true
	}
	if c.nvidiaSocket(ctx) != "" {
		return false
	}
	var noted checkpoint
	if err == nil {
		noted, err = parseCheckpoint(text)
	}
	if err != nil {
		log.Error(err, "Cannot adopt the claims of NVIDIA's driver", "path", c.options.Checkpoint)
		return true
	}
	for uid, claim := range noted.V2.PreparedClaims {
		r, err := claim.record(uid)
		if r.Boot = noted.V2.NodeBootID; err == nil && !r.beforeRestart(c.options.BootID) {
			r.Boot = c.options.BootID
			err = c.adoptClaim(ctx, r)
		}
		if err != nil {
			log.Info("Cannot adopt a claim of NVIDIA's driver",
				"claim", klog.KRef(claim.Namespace, claim.Name), "uid", uid,
				"reason", err.Error())
		}
	}
	if err := statefile.Write(marker, []byte(checksum(text)), 0o600, nil); err != nil {
		log.Error(err, "Cannot note that the claims of NVIDIA's driver are taken over", "path", marker)
	}
	return true
}

// isAdopted reports whether the claims of a checkpoint were adopted.
func (c *Claims) isAdopted(checkpoint []byte) bool {
	before, _ := statefile.Read(filepath.Join(c.store.folder(), adoptedFile), maxRecord)
	return string(before) == checksum(checkpoint)
}

// nvidiaSocket returns the socket of a running driver of NVIDIA; empty if none answers. It
// tries dra.sock in the folder of the checkpoint, dra-<UID of the pod>.sock as used during
// a rolling update, and the sockets for registration with the kubelet.
func (c *Claims) nvidiaSocket(ctx context.Context) string {
	folder := filepath.Dir(c.options.Checkpoint)
	registry := filepath.Join(folder, "..", "..", "plugins_registry")
	for in, prefix := range map[string]string{folder: "dra", registry: dra.Driver} {
		for _, name := range names(in) {
			if !strings.HasPrefix(name, prefix) || !strings.HasSuffix(name, ".sock") {
				continue
			}
			if path := filepath.Join(in, name); kubelet.DialOnce(ctx, path) == nil {
				return path
			}
		}
	}
	return ""
}

// adoptClaim records a claim unless it has a record.
func (c *Claims) adoptClaim(ctx context.Context, r record) error {
	locks := c.locks.begin()
	defer locks.end()
	if err := locks.claim(ctx, r.UID); err != nil {
		return err
	}
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return err
	}
	if _, found := c.all()[r.UID]; found || c.unprepareNumber(r.UID) > 0 {
		return nil
	}
	r.Prepared = time.Now().UTC()
	if err := c.store.write(r); err != nil {
		return err
	}
	c.setRecord(r)
	klog.FromContext(ctx).Info("Adopted a claim of NVIDIA's driver", "claim", klog.KRef(r.Namespace, r.Name), "uid",
		r.UID)
	return nil
}
