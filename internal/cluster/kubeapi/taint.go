package kubeapi

import (
	"encoding/json"
	"slices"
	"time"
)

// An OwnTaint is a taint of a Node that this program writes or removes. A TaintPatch accepts no
// other type, so OwnTaints is complete.
type OwnTaint struct{ key, effect string }

// The taints of this program.
var (
	// NoHealthyGPU is on a Node while none of its GPUs is healthy.
	NoHealthyGPU = OwnTaint{"gpu-device-plugin.github.io/no-healthy-gpu", "NoSchedule"}
	// FewerDevices is on a Node while a change of the configuration removes devices.
	FewerDevices = OwnTaint{"gpu-device-plugin.github.io/fewer-devices", "NoSchedule"}
	// Startup is on a Node from its creation, with any effect, until its GPUs are allocatable. The
	// creator of the Node adds the taint; this program only removes it. To the cluster autoscaler, a
	// key with this prefix means that the Node is still starting.
	Startup = OwnTaint{"startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin", ""}
)

// OwnTaints returns every taint that this program writes or removes. The pods of this program must
// tolerate all of them: a taint stays on the Node when its writer is uninstalled, and would keep
// the next installation off the Node.
func OwnTaints() []OwnTaint { return []OwnTaint{NoHealthyGPU, FewerDevices, Startup} }

// String returns the key of the taint.
func (o OwnTaint) String() string { return o.key }

// IsOn reports whether a Node has the taint.
func (o OwnTaint) IsOn(n Node) bool { return slices.ContainsFunc(n.Taints, o.matches) }

func (o OwnTaint) matches(t Taint) bool {
	return t.Key == o.key && (o.effect == "" || t.Effect == o.effect)
}

// A Taint is a taint of the Node in the format of the API. A Taint read from the API server keeps
// all fields, including fields unknown to this program.
type Taint struct {
	Key, Effect string
	TimeAdded   time.Time

	raw json.RawMessage // as read; nil for a new Taint
}

// taintFields has the fields of a Taint in JSON.
type taintFields struct {
	Key       string    `json:"key"`
	Effect    string    `json:"effect"`
	TimeAdded time.Time `json:"timeAdded,omitzero"`
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Taint) UnmarshalJSON(text []byte) error {
	var f taintFields
	if err := json.Unmarshal(text, &f); err != nil {
		return err
	}
	*t = Taint{f.Key, f.Effect, f.TimeAdded, slices.Clone(text)}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (t Taint) MarshalJSON() ([]byte, error) {
	if t.raw != nil {
		return t.raw, nil
	}
	return json.Marshal(taintFields{t.Key, t.Effect, t.TimeAdded})
}
