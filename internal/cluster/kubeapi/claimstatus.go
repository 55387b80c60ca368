package kubeapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// claimManager is the field manager of the status of claims.
const claimManager = "gpu-node-agent-claims"

// A ClaimDeviceStatus is the status of one device of a claim.
type ClaimDeviceStatus struct {
	Driver     string           `json:"driver"`
	Pool       string           `json:"pool"`
	Device     string           `json:"device"`
	ShareID    string           `json:"shareID,omitempty"`
	Conditions []ClaimCondition `json:"conditions"`
	// Data is a JSON object of at most 10 KiB.
	Data any `json:"data,omitempty"`
}

// A ClaimCondition is a condition of a device.
type ClaimCondition struct {
	Type string `json:"type"`
	// Status is True, False or Unknown.
	Status             string    `json:"status"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// WriteClaimDevices writes the devices of these drivers and pools to the status of a claim. Devices
// of other drivers stay unchanged. If the claim is gone or has another UID, IsNotFound reports true
// for the error. The daemon needs the rights to get resourceclaims and to update
// resourceclaims/status, and associated-node:update for resourceclaims/driver.
//
// The claim is read and written as protobuf, because only protobuf preserves the text of the
// parameters in the allocation. JSON loses their spaces, and an apply or a merge changes the order
// of their names; Kubernetes 1.36 and newer reject this as a change of the allocation.
func (c *Client) WriteClaimDevices(ctx context.Context, namespace, name, uid string,
	devices []ClaimDeviceStatus) error {
	err := c.resourceAPI(func(path string) error {
		path += "/namespaces/" + namespace + "/resourceclaims/" + name
		claim, err := c.send(ctx, request{verb: http.MethodGet, path: path, accept: protobuf})
		if err != nil {
			return err
		}
		body, err := replaceDevices(claim, uid, devices)
		if err != nil {
			return err
		}
		_, err = c.send(ctx, request{
			verb: http.MethodPut, path: path + "/status", contentType: protobuf, body: body,
			query: url.Values{"fieldManager": {claimManager}},
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("write the status of ResourceClaim %s/%s: %w", namespace, name, err)
	}
	return nil
}

const (
	// protobuf is the media type of Kubernetes' protobuf encoding: the prefix, and a message Unknown
	// of apimachinery.
	protobuf       = "application/vnd.kubernetes.protobuf"
	protobufPrefix = "k8s\x00"
)

// The field numbers in the files generated.proto of k8s.io/api and k8s.io/apimachinery.
const (
	unknownRaw       = 2
	claimMetadata    = 1
	claimStatus      = 3
	metadataUID      = 5
	statusDevices    = 4
	deviceDriver     = 1
	devicePool       = 2
	deviceDevice     = 3
	deviceConditions = 4
	deviceData       = 5
	deviceShareID    = 7
	rawExtensionRaw  = 1
)

// replaceDevices returns a claim in protobuf whose status has the given devices.
func replaceDevices(claim []byte, uid string, devices []ClaimDeviceStatus) ([]byte, error) {
	encoded := make([][]byte, len(devices))
	for i, d := range devices {
		var err error
		if encoded[i], err = d.encode(); err != nil {
			return nil, err
		}
	}
	editStatus := func(status []byte) ([]byte, error) {
		edited, err := editFields(status, statusDevices, func(device []byte) ([]byte, error) {
			driver, pool := textOf(device, deviceDriver), textOf(device, devicePool)
			if slices.ContainsFunc(devices, func(d ClaimDeviceStatus) bool {
				return d.Driver == driver &&
					d.Pool == pool
			}) {
				return nil, nil
			}
			return device, nil
		})
		for _, d := range encoded {
			edited = appendField(edited, statusDevices, d)
		}
		return edited, err
	}
	message, isProtobuf := bytes.CutPrefix(claim, []byte(protobufPrefix))
	if !isProtobuf {
		return nil, errors.New("read the answer of the API server: it is not protobuf")
	}
	message, err := editFields(message, unknownRaw, func(claim []byte) ([]byte, error) {
		if actual := textOf(fieldOf(claim, claimMetadata), metadataUID); actual != uid {
			return nil, &apierrors.StatusError{ErrStatus: metav1.Status{Code: http.StatusNotFound,
				Reason: metav1.StatusReasonNotFound, Message: "it was created again with the UID " + actual}}
		}
		return editFields(claim, claimStatus, editStatus)
	})
	return append([]byte(protobufPrefix), message...), err
}

func (d ClaimDeviceStatus) encode() ([]byte, error) {
	data, err := json.Marshal(d.Data)
	if err != nil {
		return nil, fmt.Errorf("encode the status of a device: %w", err)
	}
	b := appendField(nil, deviceDriver, []byte(d.Driver))
	b = appendField(b, devicePool, []byte(d.Pool))
	b = appendField(b, deviceDevice, []byte(d.Device))
	for _, c := range d.Conditions {
		b = appendField(b, deviceConditions, c.encode())
	}
	b = appendField(b, deviceData, appendField(nil, rawExtensionRaw, data))
	if d.ShareID != "" {
		b = appendField(b, deviceShareID, []byte(d.ShareID))
	}
	return b, nil
}

func (c ClaimCondition) encode() []byte {
	b := appendField(nil, 1, []byte(c.Type))
	b = appendField(b, 2, []byte(c.Status))
	seconds := uint64(max(c.LastTransitionTime.Unix(), 0))
	b = appendField(b, 4, protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), seconds))
	b = appendField(b, 5, []byte(c.Reason))
	return appendField(b, 6, []byte(strings.ToValidUTF8(c.Message, "\uFFFD"))) // the API server rejects invalid UTF-8
}

func appendField(b []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
}

// editFields returns a message in which edit has replaced every field of a number; edit returns nil
// to remove the field.
func editFields(message []byte, number protowire.Number, edit func([]byte) ([]byte, error)) (edited []byte, err error) {
	for len(message) > 0 {
		field, value, length := nextField(message)
		if length < 0 {
			return nil, fmt.Errorf("read the answer of the API server: %w", protowire.ParseError(length))
		}
		if field != number || value == nil {
			edited = append(edited, message[:length]...)
		} else if value, err = edit(value); err != nil {
			return nil, err
		} else if value != nil {
			edited = appendField(edited, number, value)
		}
		message = message[length:]
	}
	return edited, nil
}

// nextField returns the number, the value and the length of the first field of a message. The value
// is nil for a numeric field. The length is negative if the message is damaged.
func nextField(message []byte) (protowire.Number, []byte, int) {
	number, kind, length := protowire.ConsumeField(message)
	if length < 0 || kind != protowire.BytesType {
		return number, nil, length
	}
	_, _, tag := protowire.ConsumeTag(message)
	value, _ := protowire.ConsumeBytes(message[tag:])
	return number, value, length
}

// fieldOf returns the value of a field of a message; nil if the message does not have it.
func fieldOf(message []byte, number protowire.Number) (value []byte) {
	_, _ = editFields(message, number, func(v []byte) ([]byte, error) {
		value = v
		return v, nil
	})
	return value
}

func textOf(message []byte, number protowire.Number) string { return string(fieldOf(message, number)) }
