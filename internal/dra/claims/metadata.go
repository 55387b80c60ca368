package claims

import (
	"errors"
	"maps"
	"regexp"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// Containers of a claim get a file per request with the list of its devices, if the
// configuration enabled metadata at the first preparation of the claim. The content
// follows from the record. The file is written before the spec names the file, and removed
// after the spec.

// A recordMetadata says that containers of the claim get metadata files.
type recordMetadata struct {
	// PodClaim is the pod's name for a claim from a template.
	PodClaim string `json:"podClaim,omitempty"`
}

// labelForm is the form of a DNS label: names from the API become part of a path.
var labelForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// describe adds the published attributes of the devices to a record, for metadata files.
func (n node) describe(r *record, claim dra.Claim) {
	r.Metadata = &recordMetadata{}
	if labelForm.MatchString(claim.PodClaim) { // users can change the annotation
		r.Metadata.PodClaim = claim.PodClaim
	}
	for i, d := range r.Devices {
		published, _ := n.published(dra.Result{Pool: d.Pool, Device: d.Device})
		r.Devices[i].Attributes = maps.Clone(published.Attributes)
	}
}

// metadata returns the contents of a claim's metadata files, by request; none for a claim
// without metadata files.
func (r record) metadata() (map[string][]byte, error) {
	if r.Metadata == nil {
		return nil, nil
	}
	devices, full := map[string][]dra.DeviceMetadata{}, map[string]string{}
	for _, d := range r.Devices {
		request := d.request()
		if !labelForm.MatchString(request) {
			continue
		}
		described := dra.DeviceMetadata{
			Pool: d.Pool, Device: d.Device, Attributes: d.Attributes, UUID: d.uuid(), GPU: d.GPU,
			Memory: d.Share, Limited: d.Share > 0 && d.MPS != nil,
		}
		if d.MIG != nil {
			described.GI, described.CI = d.MIG.GI, d.MIG.CI
		}
		if d.MPS != nil {
			described.Threads = d.MPS.Percentage
			if d.MPS.Memory > 0 {
				described.Memory, described.Limited = d.MPS.Memory, true
			}
		}
		devices[request], full[request] = append(devices[request], described), d.Request
	}
	contents := map[string][]byte{}
	claim := dra.Claim{UID: r.UID, Namespace: r.Namespace, Name: r.Name, PodClaim: r.Metadata.PodClaim}
	for request, of := range devices {
		var err error
		if contents[request], err = dra.MetadataFile(r.Driver, claim, full[request], of); err != nil {
			return nil, err
		}
	}
	return contents, nil
}

// writeMetadata writes the outdated metadata files of a claim, and adds their paths to the
// devices of the claim's spec.
func (c *Claims) writeMetadata(r record, devices map[string]cdi.ClaimedDevice) error {
	contents, err := r.metadata()
	if err != nil {
		return err
	}
	for _, request := range slices.Sorted(maps.Keys(contents)) {
		if err := c.store.lead(); err != nil {
			return err
		}
		written, err := cdi.WriteMetadata(c.store.specsOf(r).MetadataFile(r.UID, request), contents[request])
		if err != nil {
			return err
		}
		if written {
			c.store.step()
		}
	}
	for _, d := range r.Devices {
		request := d.request()
		claimed, there := devices[r.cdiName(d)]
		if _, has := contents[request]; !has || !there {
			continue
		}
		if claimed.Metadata == nil { // several requests can share a device
			claimed.Metadata = map[string]string{}
		}
		claimed.Metadata[c.store.specsOf(r).MetadataFile(r.UID, request)] = dra.MetadataPath(r.Driver, r.Name,
			r.Metadata.PodClaim, request)
		devices[r.cdiName(d)] = claimed
	}
	return nil
}

// removeMetadata removes the metadata files of a claim without a spec.
func (c *Claims) removeMetadata(r record) error {
	all, err := cdi.ClaimFiles(c.options.CDIDir)
	for _, f := range all {
		if !f.Metadata || f.UID != r.UID || f.Driver != r.driver() {
			continue
		}
		if err := c.store.lead(); err != nil {
			return err
		}
		err = errors.Join(err, statefile.Remove(f.Path))
		c.store.step()
	}
	return err
}
