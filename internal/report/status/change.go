package status

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// A Change is one difference between two Statuses. Like a Status, its JSON is a public interface of
// the program.
type Change struct {
	// Time is when the Status with the change was received.
	Time time.Time `json:"time"`
	// Kind is connection, daemon, driver, device, event, call, resource, departing, lead,
	// configuration, MIG layout, hold, left out, without events, warning, MPS or summary.
	Kind string `json:"kind"`
	// Name is the device's index "i" or "i:j", or the resource's name. It is empty for sentences
	// and for kinds with a single fact.
	Name string `json:"name,omitempty"`
	// Device is the device's UUID.
	Device string `json:"device,omitempty"`
	// From and To are the old and the new state, counts, version or sentence. From is empty for a
	// new fact, To for a fact that ended.
	From string `json:"from,omitempty"`
	To   string `json:"to,omitempty"`
	// Reason and Remedy belong to To.
	Reason string `json:"reason,omitempty"`
	Remedy string `json:"cure,omitempty"`
}

// String returns the change as one line for people.
func (c Change) String() string {
	text := c.Kind
	switch {
	case c.Kind == kindDevice && strings.Contains(c.Name, ":"):
		text = "MIG device " + c.Name
	case c.Kind == kindDevice:
		text = "GPU " + c.Name
	case c.Kind == kindResource:
		text = c.Name
	case c.Kind == kindUnwatched:
		text = "" // the sentence names the GPU
	case c.Name != "":
		text += " of " + c.Name
	}
	switch {
	case c.From == "":
		text += ": " + c.To
	case c.To == "":
		text += ": no longer: " + c.From
	case c.From == c.To:
		text += ": still " + c.To
	default:
		text += ": " + c.From + " → " + c.To
	}
	if c.Remedy != "" {
		text += " (remedy: " + c.Remedy + ")"
	}
	if c.Reason != "" {
		text += ": " + c.Reason
	}
	return strings.Join(strings.Fields(strings.TrimPrefix(text, ": ")), " ")
}

// Joined returns the changes without changes of MIG devices that repeat the change of their GPU.
func Joined(changes []Change) []Change {
	type what struct{ gpu, from, to, reason string }
	gpus := map[what]bool{}
	for _, c := range changes {
		if c.Kind == kindDevice {
			gpus[what{c.Name, c.From, c.To, c.Reason}] = true
		}
	}
	var joined []Change
	for _, c := range changes {
		gpu, _, part := strings.Cut(c.Name, ":")
		if c.Kind != kindDevice || !part || !gpus[what{gpu, c.From, c.To, c.Reason}] {
			joined = append(joined, c)
		}
	}
	return joined
}

// The kinds of a Change with special rules.
const (
	kindDevice    = "device"
	kindResource  = "resource"
	kindEvent     = "event"
	kindUnwatched = "without events"
	kindSummary   = "summary"
)

// Changes returns the differences between two Statuses, in the order of a Status, with the summary
// last. A summary counts as changed only if its state differs, an event only if it is new. Times of
// the daemon's own actions do not count.
func Changes(before, after Status, at time.Time) []Change {
	was := map[[2]string]Change{}
	for _, f := range facts(before) {
		was[f.key()] = f
	}
	is := map[[2]string]bool{}
	var changes []Change
	for _, now := range facts(after) {
		is[now.key()] = true
		old := was[now.key()]
		now.From = old.To
		unchanged := old.To == now.To && old.Reason == now.Reason && old.Remedy == now.Remedy
		if unchanged || now.Kind == kindSummary && old.To == now.To {
			continue
		}
		now.Time = Moment(at)
		changes = append(changes, now)
	}
	for _, old := range facts(before) {
		if is[old.key()] || old.Kind == kindEvent {
			continue
		}
		old.Time, old.From, old.To, old.Reason, old.Remedy = Moment(at), old.To, "", "", ""
		changes = append(changes, old)
	}
	// The summary is the conclusion from all other changes.
	for i, c := range changes {
		if c.Kind == kindSummary {
			changes = append(append(changes[:i], changes[i+1:]...), c)
			break
		}
	}
	return changes
}

// key identifies a fact within a Status. A sentence identifies itself.
func (c Change) key() [2]string {
	switch {
	case c.Device != "":
		return [2]string{c.Kind, c.Device}
	case c.Name == "" && isSentence(c.Kind):
		return [2]string{c.Kind, c.To}
	case c.Kind == kindEvent:
		return [2]string{c.Kind, c.Name + c.To}
	}
	return [2]string{c.Kind, c.Name}
}

func isSentence(kind string) bool {
	switch kind {
	case "call", "left out", kindUnwatched, "warning", "MPS", "hold":
		return true
	}
	return false
}

// facts returns the contents of a Status, each fact as the Change that would introduce it.
func facts(s Status) []Change {
	if s.Version == "" {
		return nil // there is no Status yet
	}
	facts := []Change{{Kind: "daemon", To: s.Version}}
	if s.Driver != "" {
		facts = append(facts, Change{Kind: "driver", To: s.Driver})
	}
	for _, g := range s.GPUs {
		facts = append(facts, Change{Kind: kindDevice, Name: g.Index, Device: g.UUID, To: g.State, Reason: g.Reason,
			Remedy: g.Remedy})
		for _, e := range g.Events {
			facts = append(facts, Change{Kind: kindEvent, Name: deviceName(g.Index), To: e})
		}
	}
	for _, r := range s.Resources {
		facts = append(facts, Change{Kind: kindResource, Name: r.Name, Reason: r.Problem,
			To: fmt.Sprintf("%d of %d devices Healthy, %s", r.Healthy+r.Unoffered, r.Devices, r.Server)})
		if len(r.Departing) > 0 {
			facts = append(facts, Change{Kind: "departing", Name: r.Name, To: wording.Count(len(r.Departing), "device"),
				Reason: r.Departing[0].Reason})
		}
	}
	for _, h := range Held(s.Holds) {
		facts = append(facts, Change{Kind: "hold", To: h})
	}
	for _, c := range s.Calls {
		facts = append(facts, Change{Kind: "call", To: c.String() + " does not return"})
	}
	if l := s.Lead; l != (Lead{}) {
		facts = append(facts, Change{Kind: "lead", To: l.String()})
	}
	facts = append(facts, Change{Kind: "configuration", To: fmt.Sprint("generation ", s.ConfigGeneration),
		Reason: s.ConfigError})
	if m := s.MIG; m != nil && m.Layout != "" {
		facts = append(facts, Change{Kind: "MIG layout", To: m.Layout + ", " + m.State, Reason: m.Reason})
	}
	for _, kind := range []struct {
		name      string
		sentences []string
	}{{"left out", s.LeftOut}, {kindUnwatched, s.Unwatched}, {"warning", s.Warnings}, {"MPS", s.MPS}} {
		for _, sentence := range kind.sentences {
			facts = append(facts, Change{Kind: kind.name, To: sentence})
		}
	}
	return append(facts, Change{Kind: kindSummary, To: s.Summary.State, Reason: s.Summary.Text})
}

func deviceName(index string) string {
	if strings.Contains(index, ":") {
		return "MIG device " + index
	}
	return "GPU " + index
}

// Held returns a sentence for each resource and reason: how many devices are not offered yet, and
// why. The devices are counted because a resource may have a thousand replicas.
func Held(holds []Hold) []string {
	var sentences []string
	counted := map[Hold]int{}
	for _, h := range holds {
		h.Device, h.Node = "", false
		counted[h]++
	}
	for _, h := range holds {
		devices, key := h.Resource+" "+h.Device, h
		key.Device, key.Node = "", false
		n := counted[key]
		if n == 0 {
			continue
		}
		counted[key] = 0
		if n > 1 {
			devices = fmt.Sprintf("%d × %s", n, h.Resource)
		}
		sentence := devices + "; " + h.Reason
		if h.Waits {
			sentence += " (another reason counts first)"
		}
		sentences = append(sentences, sentence)
	}
	return sentences
}
