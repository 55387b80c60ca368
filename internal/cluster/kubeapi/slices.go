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

// A Slice is a ResourceSlice of the own node. Nobody changes one.
type Slice struct {
	Name, UID, ResourceVersion string
	// Owners are deleted before the slice is.
	Owners []OwnerReference
	// Driver and Pool are whose devices these are, Generation that of the pool, Count how many slices
	// the pool has.
	Driver, Pool string
	Generation   int64
	Count        int
	// Devices is the list of devices and Counters that of counter sets, as resource.k8s.io/v1 has
	// them, in JSON; nil for none. A slice has one of the two.
	Devices, Counters json.RawMessage
}

// Slices are those of a driver on the own node, as a watch has seen them.
type Slices struct {
	// ResourceVersion is the newest that was seen; it is empty as long as nothing is known.
	ResourceVersion string
	ByName          map[string]Slice
}

// sliceObject is a Slice in the API's own form.
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
	// Counters are the same in all versions.
	Counters json.RawMessage `json:"sharedCounters,omitempty"`
}

type slicePool struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Count      int    `json:"resourceSliceCount"`
}

// IsBefore reports whether slices were seen before a version.
func (s Slices) IsBefore(version string) bool { return isBefore(s.ResourceVersion, version) }

// Slices returns the slices of a driver on the own node as they are now.
func (c *Client) Slices(ctx context.Context, driver string) (Slices, error) {
	found, _, err := c.listSlices(ctx, driver, "")
	return found, err
}

// WatchSlices publishes the slices of a driver on the own node until ctx ends, and why they cannot
// be watched; then nothing is known of them. Only is the name of the slice that is to be the only
// one; empty if there may be several. If the list has no other, that one alone is watched: an API
// server gives each write of a slice more time the more watches of no name there are.
func (c *Client) WatchSlices(
	ctx context.Context, timer clock.Clock, driver, only string, slices *feed.Feed[Slices], problem *feed.Feed[error],
) {
	defer slices.Publish(Slices{})
	var path string
	c.follow(ctx, timer, collection{
		what: "the slices", problem: problem, path: func() string { return path },
		selector: func() string {
			selector := c.slicesOf(driver)
			there := maps.Clone(slices.Value().ByName)
			if delete(there, only); only != "" && len(there) == 0 {
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
		changed: func(kind, version string, object []byte) error {
			found := Slices{ResourceVersion: version, ByName: slices.Value().ByName}
			if kind == added || kind == modified || kind == deleted {
				s, err := readSlice(object)
				if err != nil {
					return err
				}
				found.ByName = maps.Clone(found.ByName)
				if found.ByName[s.Name] = s; kind == deleted {
					delete(found.ByName, s.Name)
				}
			}
			slices.Publish(found)
			return nil
		},
	})
}

func (c *Client) slicesOf(driver string) string {
	return "spec.nodeName=" + c.node + ",spec.driver=" + driver
}

// listSlices returns the slices of a driver on the own node, and the path at which they are served.
// They are as they are now if version is empty, and not older than a version otherwise.
func (c *Client) listSlices(ctx context.Context, driver, version string) (found Slices, path string, err error) {
	query := url.Values{"fieldSelector": {c.slicesOf(driver)}}
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

// CreateSlice makes a slice. It returns the slice as it is then: fields of which the API server
// knows nothing are not kept.
func (c *Client) CreateSlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPost, "", nil, s)
}

// TrySlice returns what CreateSlice would return, and makes nothing.
func (c *Client) TrySlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPost, "", url.Values{"dryRun": {"All"}}, s)
}

// UpdateSlice puts a slice in the place of the one with its name, UID and version. It returns the
// slice as it is then.
func (c *Client) UpdateSlice(ctx context.Context, s Slice) (Slice, error) {
	return c.writeSlice(ctx, http.MethodPut, "/"+s.Name, nil, s)
}

// DeleteSlice removes the slice with a name and a UID. One that is not there is no error.
func (c *Client) DeleteSlice(ctx context.Context, name, uid string) error {
	options := map[string]any{"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": map[string]string{"uid": uid}}
	body, err := json.Marshal(options)
	if err != nil {
		return fmt.Errorf("write the options of a deletion: %w", err)
	}
	err = c.resourceAPI(func(api string) error {
		_, err := c.send(ctx, request{
			verb: http.MethodDelete, path: api + "/resourceslices/" + name, contentType: "application/json", body: body,
		})
		return err
	})
	if err != nil && !IsCode(err, http.StatusNotFound) {
		return fmt.Errorf("remove ResourceSlice %s: %w", name, err)
	}
	return nil
}

// IsOvertaken reports whether err is of a write before which another program changed, made or
// removed the object.
func IsOvertaken(err error) bool {
	return IsCode(err, http.StatusConflict) || IsCode(err, http.StatusNotFound)
}

func (c *Client) writeSlice(ctx context.Context, verb, at string, query url.Values, s Slice) (Slice, error) {
	var written []byte
	err := c.resourceAPI(func(api string) error {
		var devices any // nil for none
		if s.Devices != nil {
			devices = s.Devices
		}
		if devices != nil && strings.HasSuffix(api, "v1beta1") {
			var err error
			if devices, err = nested(s.Devices); err != nil {
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

// readSlice returns the slice of an object of any version.
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
	devices, err := flat(o.Spec.Devices)
	if err != nil {
		return Slice{}, err
	}
	return Slice{
		Name: o.Metadata.Name, UID: o.Metadata.UID, ResourceVersion: o.Metadata.ResourceVersion, Owners: o.Metadata.OwnerReferences,
		Driver: o.Spec.Driver, Pool: o.Spec.Pool.Name, Generation: o.Spec.Pool.Generation, Count: o.Spec.Pool.Count, Devices: devices,
		Counters: o.Spec.Counters,
	}, nil
}

// basic is the field in which a device of v1beta1 has all but its name.
const basic = "basic"

// nested returns devices as v1beta1 has them.
func nested(devices json.RawMessage) (json.RawMessage, error) {
	return eachDevice(devices, func(device map[string]json.RawMessage) (map[string]json.RawMessage, error) {
		inner := maps.Clone(device)
		delete(inner, "name")
		text, err := json.Marshal(inner)
		return map[string]json.RawMessage{"name": device["name"], basic: text}, err
	})
}

// flat returns devices of any version as v1 has them.
func flat(devices json.RawMessage) (json.RawMessage, error) {
	if !bytes.Contains(devices, []byte(`"`+basic+`"`)) {
		return devices, nil
	}
	return eachDevice(devices, func(device map[string]json.RawMessage) (map[string]json.RawMessage, error) {
		outer := maps.Clone(device)
		delete(outer, basic)
		if device[basic] == nil {
			return outer, nil
		}
		err := json.Unmarshal(device[basic], &outer)
		return outer, err
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
