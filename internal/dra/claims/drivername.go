package claims

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// Drivers returns the driver names of prepared claims of this program, with the names of
// the claims. It reads the records in a state directory, and the copies in CDI specs of
// wanted and of every driver name with specs. It writes nothing.
func Drivers(stateDir, cdiDir, wanted string) (map[string][]string, error) {
	specs, err := cdi.ClaimFiles(cdiDir)
	if err != nil {
		return nil, err
	}
	drivers := map[string]bool{wanted: true}
	for _, f := range specs {
		drivers[f.Driver] = true
	}
	found := map[string][]string{}
	for driver := range drivers {
		records, err := store{dir: stateDir, specs: cdi.ClaimSpecs{Dir: cdiDir, Driver: driver}}.all()
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if of := found[r.driver()]; !slices.Contains(of, r.String()) {
				found[r.driver()] = append(of, r.String())
			}
		}
	}
	for _, of := range found {
		slices.Sort(of)
	}
	return found, nil
}

// checkDriverName returns an error if there are records, but none belongs to this driver
// name.
func checkDriverName(records map[string]record, driver string) error {
	var other string
	var claims []string
	for _, r := range records {
		if r.driver() == driver {
			return nil
		}
		other, claims = r.driver(), append(claims, r.String())
	}
	if len(claims) == 0 {
		return nil
	}
	slices.Sort(claims)
	return fmt.Errorf("%w: claims are prepared under %s: %s", dra.ErrOtherName, other, inventory.Few(claims))
}

// CompetingDriver returns why NVIDIA's driver may give GPUs of this node to claims, as a
// sentence with the remedy; empty if NVIDIA's driver gives none. Under NVIDIA's name, only
// one of the two drivers is known to the kubelet at a time, and NVIDIA's claims are
// adopted. Under another name both drivers can be registered: then this driver prepares no
// claims.
func (c *Claims) CompetingDriver(ctx context.Context) string {
	if c.options.DriverName == dra.Driver || c.options.Checkpoint == "" {
		return ""
	}
	if socket := c.nvidiaSocket(ctx); socket != "" {
		return "NVIDIA's driver " + dra.Driver + " runs on this node and may give GPUs to claims: it listens at " +
			socket +
			"; remove that driver from the node"
	}
	var noted checkpoint
	text, err := statefile.Read(c.options.Checkpoint, maxCheckpoint)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && c.isAdopted(text):
		return ""
	case err == nil:
		noted, err = parseCheckpoint(text)
	}
	if err != nil {
		return fmt.Sprintf("cannot read which claims NVIDIA's driver has prepared: %s: %v; remove the file when "+
			"no pod has such a claim",
			c.options.Checkpoint, err)
	}
	if former := (record{Boot: noted.V2.NodeBootID}).beforeRestart(c.options.BootID); former ||
		len(noted.V2.PreparedClaims) == 0 {
		return ""
	}
	var names []string
	for _, claim := range noted.V2.PreparedClaims {
		names = append(names, claim.Namespace+"/"+claim.Name)
	}
	slices.Sort(names)
	return "NVIDIA's driver has prepared claims on this node: " + strings.Join(names[:min(len(names), 3)], ", ") +
		"; delete their pods while it runs, or remove " + c.options.Checkpoint + " when no such pod is left"
}
