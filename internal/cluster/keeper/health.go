package keeper

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The condition of a Node for the health of its GPUs.
const (
	ConditionType   = config.GPUHealthy
	conditionRepeat = time.Hour // an unchanged condition is written again after this time
)

// A ConditionPart maintains the condition of the Node, and the same condition under further types.
// A type that is no longer configured stays as it was last written.
type ConditionPart struct {
	Configs  *feed.Feed[config.Config]
	Statuses *feed.Feed[status.Status]

	features config.Features
	status   status.Status
	fraction float64
	paces    map[string]*nodeevents.Pace // by type
}

// NewConditionPart returns a ConditionPart.
func NewConditionPart(configs *feed.Feed[config.Config], statuses *feed.Feed[status.Status]) *ConditionPart {
	return &ConditionPart{Configs: configs, Statuses: statuses, fraction: rand.Float64()}
}

// Inputs implements Part.
func (p *ConditionPart) Inputs() []<-chan struct{} {
	c, configChanged := p.Configs.Latest()
	_, changed := p.Statuses.Latest()
	return inputsIf(c.Features.Condition, configChanged, changed)
}

// Look implements Part.
func (p *ConditionPart) Look(context.Context, kubeapi.Node) {
	p.features, p.status = p.Configs.Value().Features, p.Statuses.Value()
}

// Want implements Part. One Decision writes one type.
func (p *ConditionPart) Want(node kubeapi.Node, now time.Time) Decision {
	if !p.features.Condition || node.UID == "" {
		p.paces = nil
		return Decision{}
	}
	next := p.want(node, config.ConditionType{Name: ConditionType}, now)
	for _, t := range p.features.ConditionTypes {
		d := p.want(node, t, now)
		if next.Patch == nil && (d.Patch != nil || next.At.IsZero() || !d.At.IsZero() && d.At.Before(next.At)) {
			next = d
		}
	}
	return next
}

// want returns the Decision for one type.
func (p *ConditionPart) want(node kubeapi.Node, t config.ConditionType, now time.Time) Decision {
	condition, exists := findCondition(node.Conditions, t.Name)
	wanted, known := nodeevents.Judge(p.status, now, exists)
	if !known {
		return Decision{}
	}
	var before *nodeevents.Condition
	if exists {
		before = new(toCondition(condition))
		before.Status = meaning(before.Status, t)
	}
	pace := p.paces[t.Name]
	if pace == nil {
		pace = &nodeevents.Pace{Fraction: p.fraction, Heartbeat: conditionRepeat}
		if p.paces == nil {
			p.paces = map[string]*nodeevents.Pace{}
		}
		p.paces[t.Name] = pace
	}
	if due := pace.Due(before, condition.LastHeartbeatTime, wanted, now); due.IsZero() || due.After(now) {
		return Decision{At: due}
	}
	c := kubeapi.Condition{
		Type: t.Name, Status: meaning(wanted.Status, t), Reason: string(wanted.Reason), Message: wanted.Message,
		LastHeartbeatTime: now, LastTransitionTime: condition.LastTransitionTime,
	}
	if !exists || condition.Status != c.Status || condition.LastTransitionTime.IsZero() {
		c.LastTransitionTime = now
	}
	return Decision{
		Patch: kubeapi.ConditionPatch(c), Crowd: !exists && wanted.Status == nodeevents.True,
		Done: func(_ context.Context, _ kubeapi.Node, err error, now time.Time) bool {
			if err == nil {
				pace.RecordWrite(now)
			}
			return false
		},
	}
}

// meaning converts the status of a condition between the two meanings of True.
func meaning(status string, t config.ConditionType) string {
	if t.Problem && status == nodeevents.True {
		return nodeevents.False
	}
	if t.Problem && status == nodeevents.False {
		return nodeevents.True
	}
	return status
}

// A TaintPart maintains the taint of a Node without a healthy GPU. It removes the taint if the
// taint is switched off.
type TaintPart struct {
	Configs  *feed.Feed[config.Config]
	Statuses *feed.Feed[status.Status]

	enabled bool
	status  status.Status
	pace    nodeevents.Pace
}

// Inputs implements Part.
func (p *TaintPart) Inputs() []<-chan struct{} {
	c, configChanged := p.Configs.Latest()
	_, changed := p.Statuses.Latest()
	return inputsIf(c.Features.Taint, configChanged, changed)
}

// Look implements Part.
func (p *TaintPart) Look(context.Context, kubeapi.Node) {
	p.enabled, p.status = p.Configs.Value().Features.Taint, p.Statuses.Value()
}

// Want implements Part.
func (p *TaintPart) Want(node kubeapi.Node, now time.Time) Decision {
	none, known := nodeevents.NoHealthyGPU(p.status)
	if !p.enabled {
		none, known = false, true
	}
	if node.UID == "" || !known {
		return Decision{}
	}
	tainted := kubeapi.NoHealthyGPU.IsOn(node)
	if due := p.pace.Due(asCondition(tainted), time.Time{}, *asCondition(none), now); due.IsZero() || due.After(now) {
		return Decision{At: due}
	}
	return Decision{Patch: kubeapi.TaintPatch{Taint: kubeapi.NoHealthyGPU, Wanted: none, Now: now}}
}

// asCondition returns the condition that determines the pace of a taint.
func asCondition(tainted bool) *nodeevents.Condition {
	if tainted {
		return &nodeevents.Condition{Status: nodeevents.False}
	}
	return &nodeevents.Condition{Status: nodeevents.True}
}

// toCondition converts a condition to the type of package nodeevents.
func toCondition(c kubeapi.Condition) nodeevents.Condition {
	return nodeevents.Condition{Status: c.Status, Reason: nodeevents.Reason(c.Reason), Message: c.Message}
}

// FindCondition returns the condition of a Node, and whether there is one.
func FindCondition(node kubeapi.Node) (c nodeevents.Condition, exists bool) {
	found, exists := findCondition(node.Conditions, ConditionType)
	return toCondition(found), exists
}

func findCondition(conditions []kubeapi.Condition, name string) (kubeapi.Condition, bool) {
	i := slices.IndexFunc(conditions, func(c kubeapi.Condition) bool { return c.Type == name })
	if i < 0 {
		return kubeapi.Condition{}, false
	}
	return conditions[i], true
}
