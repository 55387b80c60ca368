package healthevents

import (
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Names with which the receiver recognizes the events of this program. The receiver may use the name
// of the check as the type of a Node condition in which True is bad, so it differs from GPUHealthy.
const (
	agent          = "gpu-device-plugin"
	componentClass = "GPU"
	checkName      = "GpuDevicePluginHealth"
)

// An Action is the recommended action of an event. The values are those of the contract.
type Action uint64

// The actions that this program recommends.
const (
	NoAction       Action = 0
	ComponentReset Action = 2
	ContactSupport Action = 5
	RestartVM      Action = 15
	RestartBM      Action = 24
	ReplaceVM      Action = 25
)

// The processing strategies of the contract.
const (
	executeRemediation = 1
	storeOnly          = 2
)

// An Event is the health of one GPU, as the receiver gets it. A repeated Event is equal in every
// field, the time included, so that the receiver can recognize it.
type Event struct {
	// PCI is the PCI address of the GPU in the format of sysfs, such as "0000:1b:00.0".
	PCI string `json:"pci"`
	// Healthy is false for a GPU that must not get new work.
	Healthy bool `json:"healthy"`
	// Action repairs the GPU; NoAction for a healthy one.
	Action Action `json:"action,omitempty"`
	// XID is the error number of the driver; 0 if there is none.
	XID uint64 `json:"xid,omitempty"`
	// Message has the reason and the remedy.
	Message string `json:"message,omitempty"`
	// Execute lets the receiver act; otherwise it only stores the event.
	Execute bool `json:"execute,omitempty"`
	// At is when the state began. No two Events of a node have the same time.
	At time.Time `json:"at"`
}

// isSame reports whether e says what other says. The message alone makes no difference.
func (e Event) isSame(other Event) bool {
	return e.Healthy == other.Healthy && (e.Healthy ||
		e.Action == other.Action && e.XID == other.XID && e.Execute == other.Execute)
}

// judge returns the event that the health of a GPU asks for, without its time. It returns false
// while there is no verdict: the driver does not answer, a fault was only just found, or CUDA is not
// proven yet on a device of unproven.
func judge(g inventory.GPU, stale bool, unproven map[string]string, f config.Features) (Event, bool) {
	health, proven := g.Health, unproven[g.UUID] == ""
	for _, m := range g.MIGDevices {
		health = inventory.Worst(health, m.Health)
		proven = proven && unproven[m.UUID] == ""
	}
	e := Event{PCI: g.BDF, Execute: f.HealthEventsStrategy == config.ExecuteRemediation}
	switch health.State {
	case inventory.Healthy:
		e.Healthy, e.Message = true, "the GPU is healthy"
		return e, !stale && proven
	case inventory.Unhealthy, inventory.Lost:
		e.Action, e.XID, e.Message = action(health.Remedy, f.HealthEventsMachine), health.XID, health.Why()
		return e, true
	case inventory.Unknown, inventory.Suspect:
	}
	return Event{}, false
}

// action returns the action of the contract for a remedy. Remedies without an action of their own
// need a person.
func action(r inventory.Remedy, m config.Machine) Action {
	switch r {
	case inventory.RemedyReset, inventory.RemedyDrain:
		return ComponentReset
	case inventory.RemedyReboot:
		if m == config.VM {
			return RestartVM
		}
		return RestartBM
	case inventory.RemedyHardware:
		if m == config.VM {
			return ReplaceVM
		}
	case inventory.NoRemedy, inventory.RemedyDrainP2P, inventory.RemedyFabric, inventory.RemedyIMEX,
		inventory.RemedyReconnect, inventory.RemedyHuman:
	}
	return ContactSupport
}

// The following numbers are those of the fields in the messages HealthEvents, HealthEvent, Entity
// and google.protobuf.Timestamp of the contract.
const (
	fieldBatchVersion protowire.Number = 1
	fieldBatchEvents  protowire.Number = 2

	fieldVersion   protowire.Number = 1
	fieldAgent     protowire.Number = 2
	fieldClass     protowire.Number = 3
	fieldCheck     protowire.Number = 4
	fieldIsFatal   protowire.Number = 5
	fieldIsHealthy protowire.Number = 6
	fieldMessage   protowire.Number = 7
	fieldAction    protowire.Number = 8
	fieldErrorCode protowire.Number = 9
	fieldEntities  protowire.Number = 10
	fieldTime      protowire.Number = 12
	fieldNode      protowire.Number = 13
	fieldStrategy  protowire.Number = 16

	fieldKey   protowire.Number = 1 // also the seconds of a Timestamp
	fieldValue protowire.Number = 2 // also the nanoseconds

	contractVersion = 1
)

// encode returns the message HealthEvents for events of GPUs, in this order.
func encode(node string, batch []gpuEvent) []byte {
	text := appendNumber(nil, fieldBatchVersion, contractVersion)
	for _, e := range batch {
		text = appendBytes(text, fieldBatchEvents, encodeEvent(node, e))
	}
	return text
}

// encodeEvent returns the message HealthEvent for an event.
func encodeEvent(node string, e gpuEvent) []byte {
	text := appendNumber(nil, fieldVersion, contractVersion)
	for _, f := range []struct {
		field protowire.Number
		value string
	}{{fieldAgent, agent}, {fieldClass, componentClass}, {fieldCheck, checkName}} {
		text = appendBytes(text, f.field, []byte(f.value))
	}
	text = appendNumber(text, fieldIsFatal, protowire.EncodeBool(!e.Healthy))
	text = appendNumber(text, fieldIsHealthy, protowire.EncodeBool(e.Healthy))
	text = appendBytes(text, fieldMessage, []byte(e.Message))
	text = appendNumber(text, fieldAction, uint64(e.Action))
	if e.XID != 0 {
		text = appendBytes(text, fieldErrorCode, strconv.AppendUint(nil, e.XID, 10))
	}
	text = appendBytes(text, fieldEntities, pair("GPU_UUID", e.uuid))
	if e.PCI != "" {
		text = appendBytes(text, fieldEntities, pair("PCI", e.PCI))
	}
	at := appendNumber(nil, fieldKey, uint64(e.At.Unix()))
	at = appendNumber(at, fieldValue, uint64(e.At.Nanosecond()))
	text = appendBytes(text, fieldTime, at)
	text = appendBytes(text, fieldNode, []byte(node))
	strategy := uint64(storeOnly)
	if e.Execute {
		strategy = executeRemediation
	}
	return appendNumber(text, fieldStrategy, strategy)
}

// pair returns the message Entity.
func pair(kind, value string) []byte {
	return appendBytes(appendBytes(nil, fieldKey, []byte(kind)), fieldValue, []byte(value))
}

func appendNumber(text []byte, field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(text, field, protowire.VarintType), value)
}

func appendBytes(text []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(text, field, protowire.BytesType), value)
}
