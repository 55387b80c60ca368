package kubeapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// A Slice is a ResourceSlice of the node. It is immutable.
type Slice struct {
	Name, UID, ResourceVersion string
	// Owners are the owners of the slice.
	Owners []OwnerReference
	// Driver and Pool identify the pool of the devices, Generation is the generation of the pool, and
	// Count the number of its slices.
	Driver, Pool string
	Generation   int64
	Count        int
	// Devices is the list of devices, and Counters the list of counter sets, as JSON of
	// resource.k8s.io/v1. A slice has one of the two; the other is nil.
	Devices, Counters json.RawMessage
}

// Slices are the slices of a driver on the node, as observed by a watch.
type Slices struct {
	// ResourceVersion is the newest version observed; empty if nothing is known.
	ResourceVersion string
	ByName          map[string]Slice
}

// sliceObject is a Slice in the format of the API.
type sliceObject struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Metadata   metadata  `json:"metadata"`
	Spec       sliceSpec `json:"spec"`
}

type sliceSpec struct {
	Driver   string    `json:"driver"`
	NodeName string    `json:"nodeName"`
	Pool     slicePool `json:"pool"`
	Devices  any       `json:"devices,omitempty"`
	// Counters have the same format in all versions.
	Counters json.RawMessage `json:"sharedCounters,omitempty"`
}

type slicePool struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Count      int    `json:"resourceSliceCount"`
}

// IsBefore reports whether the slices are older than a version.
func (s Slices) IsBefore(version string) bool { return isBefore(s.ResourceVersion, version) }

// Slices returns the latest slices of a driver on the node.
func (c *Client) Slices(ctx context.Context, driver string) (Slices, error) {
	found, _, err := c.listSlices(ctx, driver, "")
	return found, err
}

// WatchSlices publishes the slices of a driver on the node until ctx ends, and in problem why they
// cannot be watched. At the end of ctx it publishes empty Slices. only is the name of the single
// slice; empty if there may be several. If the list has no other slice, the watch selects this
// name, because each watch without a name makes every write of a slice more expensive for the API
// server.
func (c *Client) WatchSlices(
	ctx context.Context, timer clock.Clock, driver, only string, slices *feed.Feed[Slices], problem *feed.Feed[error],
) {
	defer slices.Publish(Slices{})
	var path string
	c.watchCollection(ctx, timer, collection{
		what: "the slices", problem: problem, path: func() string { return path },
		selector: func() string {
			selector := c.sliceSelector(driver)
			others := maps.Clone(slices.Value().ByName)
			if delete(others, only); only != "" && len(others) == 0 {
				selector += ",metadata.name=" + only
			}
			return selector
		},
		list: func(ctx context.Context, from string) (version string, err error) {
			var found Slices
			if found, path, err = c.listSlices(ctx, driver, from); err == nil {
				slices.Publish(found)
			}
			return found.ResourceVersion, err
		},
		onEvent: func(kind, version string, object []byte) error {
			found := Slices{ResourceVersion: version, ByName: slices.Value().ByName}
			if kind == eventAdded || kind == eventModified || kind == eventDeleted {
				s, err := readSlice(object)
				if err != nil {
					return err
				}
				found.ByName = maps.Clone(found.ByName)
				if found.ByName[s.Name] = s; kind == eventDeleted {
					delete(found.ByName, s.Name)
				}
			}
			slices.Publish(found)
			return nil
		},
	})
}

func (c *Client) sliceSelector(driver string) string {
	return "spec.nodeName=" + c.node + ",spec.driver=" + driver
}

// listSlices returns the slices of a driver on the node, and the path at which the API server
// serves them. An empty version requests the latest slices; otherwise they are not older than the
// version.
func (c *Client) listSlices(ctx context.Context, driver, version string) (found Slices, path string, err error) {
	query := url.Values{"fieldSelector": {c.sliceSelector(driver)}}
	if version != "" {
		query.Set("resourceVersion", version)
	}
	var text []byte
	err = c.resourceAPI(func(api string) (err error) {
		path = api + "/resourceslices"
		text, err = c.send(ctx, request{verb: http.MethodGet, path: path, query: query})
		return err
	})
	if err != nil {
		return Slices{}, "", fmt.Errorf("list the slices of the node: %w", err)
	}
	var list struct {
		Metadata metadata          `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return Slices{}, "", fmt.Errorf("read the answer of the API server: %w", err)
	}
	found = Slices{ResourceVersion: list.Metadata.ResourceVersion, ByName: map[string]Slice{}}
	for _, item := range list.Items {
		s, err := readSlice(item)
		if err != nil {
			return Slices{}, "", err
		}
		found.ByName[s.Name] = s
	}
	return found, path, nil
}

// CreateSlice creates a slice, and returns the stored slice. The API server drops fields that it
// does not know.
func (c *Client) CreateSlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPost, "", nil, s)
}

// DryRunSlice returns the result of CreateSlice without creating the slice.
func (c *Client) DryRunSlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPost, "", url.Values{"dryRun": {"All"}}, s)
}

// UpdateSlice replaces the slice with this name, UID and version, and returns the stored slice.
func (c *Client) UpdateSlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPut, "/"+s.Name, nil, s)
}

// DeleteSlice deletes the slice with a name and a UID. It returns nil if there is no such slice.
func (c *Client) DeleteSlice(ctx context.Context, name, uid string) error {
	err := c.resourceAPI(func(api string) error { return c.remove(ctx, api+"/resourceslices/"+name, uid) })
	if err != nil && !IsCode(err, http.StatusNotFound) {
		return fmt.Errorf("remove ResourceSlice %s: %w", name, err)
	}
	return nil
}

// remove deletes the object at a path if it has the UID.
func (c *Client) remove(ctx context.Context, path, uid string) error {
	options := map[string]any{"apiVersion": "v1", "kind": "DeleteOptions",
		"preconditions": map[string]string{"uid": uid}}
	body, err := json.Marshal(options)
	if err != nil {
		return fmt.Errorf("write the options of a deletion: %w", err)
	}
	_, err = c.send(ctx, request{verb: http.MethodDelete, path: path, contentType: "application/json", body: body})
	return err
}

// IsStale reports whether a write failed because another program had changed, created or deleted
// the object.
func IsStale(err error) bool {
	return IsCode(err, http.StatusConflict) || IsCode(err, http.StatusNotFound)
}

// IsContentRejected reports whether a write failed because the API server does not accept the
// content of the object.
func IsContentRejected(err error) bool { return IsCode(err, http.StatusUnprocessableEntity) }

func (c *Client) writeSlice(ctx context.Context, verb, at string, query url.Values, s Slice) (Slice, error) {
	var written []byte
	err := c.resourceAPI(func(api string) error {
		var devices any // nil for none
		if s.Devices != nil {
			devices = s.Devices
		}
		if devices != nil && strings.HasSuffix(api, "v1beta1") {
			var err error
			if devices, err = toV1beta1(s.Devices); err != nil {
				return err
			}
		}
		body, err := json.Marshal(sliceObject{
			APIVersion: strings.TrimPrefix(api, "/apis/"), Kind: "ResourceSlice",
			Metadata: metadata{Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion, OwnerReferences: s.Owners},
			Spec: sliceSpec{
				Driver: s.Driver, NodeName: c.node, Pool: slicePool{s.Pool, s.Generation,
					s.Count}, Devices: devices, Counters: s.Counters,
			},
		})
		if err != nil {
			return fmt.Errorf("write the object: %w", err)
		}
		written, err = c.send(ctx, request{
			verb: verb, path: api + "/resourceslices" + at, query: query, contentType: "application/json", body: body,
		})
		return err
	})
	if err != nil {
		return Slice{}, fmt.Errorf("write ResourceSlice %s: %w", s.Name, err)
	}
	return readSlice(written)
}

// readSlice decodes a slice of any version.
func readSlice(text []byte) (Slice, error) {
	var o struct {
		sliceObject
		Spec struct {
			sliceSpec
			Devices json.RawMessage `json:"devices"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(text, &o); err != nil {
		return Slice{}, fmt.Errorf("read a ResourceSlice: %w", err)
	}
	devices, err := fromV1beta1(o.Spec.Devices)
	if err != nil {
		return Slice{}, err
	}
	return Slice{
		Name: o.Metadata.Name, UID: o.Metadata.UID, ResourceVersion: o.Metadata.ResourceVersion,
		Owners: o.Metadata.OwnerReferences,
		Driver: o.Spec.Driver, Pool: o.Spec.Pool.Name, Generation: o.Spec.Pool.Generation, Count: o.Spec.Pool.Count,
		Devices:  devices,
		Counters: o.Spec.Counters,
	}, nil
}

// basicField is the field of a v1beta1 device with everything except its name.
const basicField = "basic"

// toV1beta1 converts devices to v1beta1.
func toV1beta1(devices json.RawMessage) (json.RawMessage, error) {
	return eachDevice(devices, func(device map[string]json.RawMessage) (map[string]json.RawMessage, error) {
		fields := maps.Clone(device)
		delete(fields, "name")
		text, err := json.Marshal(fields)
		return map[string]json.RawMessage{"name": device["name"], basicField: text}, err
	})
}

// fromV1beta1 converts devices of any version to v1.
func fromV1beta1(devices json.RawMessage) (json.RawMessage, error) {
	if !bytes.Contains(devices, []byte(`"`+basicField+`"`)) {
		return devices, nil
	}
	return eachDevice(devices, func(device map[string]json.RawMessage) (map[string]json.RawMessage, error) {
		fields := maps.Clone(device)
		delete(fields, basicField)
		if device[basicField] == nil {
			return fields, nil
		}
		err := json.Unmarshal(device[basicField], &fields)
		return fields, err
	})
}

func eachDevice(
	devices json.RawMessage, change func(map[string]json.RawMessage) (map[string]json.RawMessage, error),
) (json.RawMessage, error) {
	var all []map[string]json.RawMessage
	if err := json.Unmarshal(devices, &all); err != nil {
		return nil, fmt.Errorf("read the devices of a ResourceSlice: %w", err)
	}
	for i, device := range all {
		var err error
		if all[i], err = change(device); err != nil {
			return nil, fmt.Errorf("read a device of a ResourceSlice: %w", err)
		}
	}
	return json.Marshal(all)
}
