package dra

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"path"
	"strconv"
)

// The metadata describe a claim's devices to its containers: a file for each request of the claim,
// in the form and at the place of KEP-5304.

// metadataFolder is the folder of the files in containers.
const metadataFolder = "/var/run/kubernetes.io/dra-device-attributes"

// metadataVersions are the versions of the API metadata.resource.k8s.io, newest first, with the
// same fields. Kubernetes 1.36 reads only the last one.
var metadataVersions = []string{"v1beta1", "v1alpha1"}

// DeviceMetadata is the description of a device for the containers of a claim.
type DeviceMetadata struct {
	// Pool and Device are copied from the Result.
	Pool, Device string
	// Attributes are the published attributes at the time of the allocation.
	Attributes map[string]Attribute
	// UUID is the UUID of the GPU or MIG device, and GPU the UUID of the GPU.
	UUID, GPU string
	// GI and CI are the IDs of the GPU instance and the compute instance of a MIG device.
	GI, CI int
	// Memory is the claim's part of the memory of the device, in bytes; 0 for all of it. Limited
	// reports whether each process is limited to it.
	Memory  int64
	Limited bool
	// Threads is the percentage of the device's threads for a process; 0 for all.
	Threads int
}

// MetadataPath returns the path of the file for a request of a claim in a container. PodClaim is
// the pod's name of a claim from a template; empty for any other claim.
func MetadataPath(driver, claim, podClaim, request string) string {
	name := cmp.Or(driver, Driver) + "-metadata.json"
	if podClaim != "" {
		return path.Join(metadataFolder, "resourceclaimtemplates", podClaim, request, name)
	}
	return path.Join(metadataFolder, "resourceclaims", claim, request, name)
}

// A metadataObject is the content of the file in one version.
type metadataObject struct {
	Kind       string            `json:"kind"`
	APIVersion string            `json:"apiVersion"`
	Metadata   claimMetadata     `json:"metadata"`
	PodClaim   string            `json:"podClaimName,omitempty"`
	Requests   []metadataRequest `json:"requests"`
}

type claimMetadata struct {
	Name       string `json:"name"`
	Namespace  string `json:"namespace"`
	UID        string `json:"uid"`
	Generation int    `json:"generation"`
}

type metadataRequest struct {
	Name    string           `json:"name"`
	Devices []metadataDevice `json:"devices"`
}

type metadataDevice struct {
	Driver     string               `json:"driver"`
	Pool       string               `json:"pool"`
	Name       string               `json:"name"`
	Attributes map[string]Attribute `json:"attributes"`
}

// MetadataFile returns the content of the file for a request of a claim. The request is
// "<request>/<subrequest>" for an alternative of firstAvailable.
func MetadataFile(driver string, claim Claim, request string, devices []DeviceMetadata) ([]byte, error) {
	var stream bytes.Buffer
	object := metadataObject{
		Kind: "DeviceMetadata", Metadata: claimMetadata{claim.Name, claim.Namespace, claim.UID, 1},
		PodClaim: claim.PodClaim,
		Requests: []metadataRequest{{Name: request}},
	}
	for _, d := range devices {
		described := metadataDevice{Driver: cmp.Or(driver, Driver), Pool: d.Pool, Name: d.Device,
			Attributes: d.attributes()}
		object.Requests[0].Devices = append(object.Requests[0].Devices, described)
	}
	for _, version := range metadataVersions {
		object.APIVersion = "metadata.resource.k8s.io/" + version
		text, err := json.Marshal(object)
		if err != nil {
			return nil, err
		}
		stream.Write(append(text, '\n'))
	}
	return stream.Bytes(), nil
}

// attributes returns the published attributes, and attributes known since the allocation.
func (d DeviceMetadata) attributes() map[string]Attribute {
	all := maps.Clone(d.Attributes)
	if all == nil {
		all = map[string]Attribute{}
	}
	number := func(name string, value int64) { all[Domain+"/"+name] = Attribute{Int, strconv.FormatInt(value, 10)} }
	all["uuid"] = Attribute{String, d.UUID}
	if d.UUID != d.GPU {
		all["parentUUID"] = Attribute{String, d.GPU}
		number("gpuInstance", int64(d.GI))
		number("computeInstance", int64(d.CI))
	}
	if d.Memory > 0 {
		number("memory", d.Memory)
		all[Domain+"/memoryIsLimit"] = Attribute{Bool, strconv.FormatBool(d.Limited)}
	}
	if d.Threads > 0 {
		number("threadPercentage", int64(d.Threads))
	}
	return all
}
