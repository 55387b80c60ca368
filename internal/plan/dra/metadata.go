package dra

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"path"
	"strconv"
)

// The metadata of devices tell the containers of a claim what they were given: a file for each
// request of the claim, in the form and at the place that Kubernetes says (KEP-5304).

// metadataFolder is where containers find the files.
const metadataFolder = "/var/run/kubernetes.io/dra-device-attributes"

// metadataVersions are those of the API metadata.resource.k8s.io, the newest first, with the same
// fields. Readers of Kubernetes 1.36 know the last one alone.
var metadataVersions = []string{"v1beta1", "v1alpha1"}

// DeviceMetadata is what the containers of a claim are told of a device.
type DeviceMetadata struct {
	// Pool and Device are those of the Result.
	Pool, Device string
	// Attributes are those with which the device was published when the claim got it.
	Attributes map[string]Attribute
	// UUID is that of the GPU or MIG device, and GPU that of the GPU.
	UUID, GPU string
	// GI and CI are the IDs of the GPU instance and the compute instance of a MIG device.
	GI, CI int
	// Memory is the part of the memory of the device that the claim has, in bytes; 0 for all of it.
	// Limited says that each process is kept to it.
	Memory  int64
	Limited bool
	// Threads is the percentage of the threads of the device that a process can use; 0 for all.
	Threads int
}

// MetadataPath returns where a container finds the file for a request of a claim. PodClaim is the
// name that the pod has for a claim that was made from a template; empty for any other claim.
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

// MetadataFile returns the content of the file for a request of a claim, which is
// "<request>/<subrequest>" for an alternative of firstAvailable.
func MetadataFile(driver string, claim Claim, request string, devices []DeviceMetadata) ([]byte, error) {
	var stream bytes.Buffer
	object := metadataObject{
		Kind: "DeviceMetadata", Metadata: claimMetadata{claim.Name, claim.Namespace, claim.UID, 1}, PodClaim: claim.PodClaim,
		Requests: []metadataRequest{{Name: request}},
	}
	for _, d := range devices {
		described := metadataDevice{Driver: cmp.Or(driver, Driver), Pool: d.Pool, Name: d.Device, Attributes: d.attributes()}
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

// attributes returns those of the published device, and what is known of it since a claim has it.
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
