// Package choice decides which MIG layout the node is to have. The configuration file, a node label
// and the command mig apply can each name a layout. Package mig applies the chosen layout.
//
// Package cluster supplies the label, and writes the state of the layout to the API server.
package choice

// An Origin is the source of a layout, for messages.
type Origin string

// The origins, in ascending priority.
const (
	FromKey   Origin = "configuration file"
	FromLabel Origin = "label"
	FromOrder Origin = "mig apply"
)

// An Order is one run of mig apply.
type Order struct {
	// Layout is the name of the layout.
	Layout string `json:"layout"`
	// GPUs are the indexes or UUIDs of the GPUs to divide; empty for all.
	GPUs []string `json:"gpus,omitempty"`
	// Key and Label are the layouts of the configuration file and of the label at the time
	// of the order.
	Key   string `json:"key"`
	Label string `json:"label"`
}

// sources has the possible layouts.
type sources struct {
	// key and label are the layouts of the configuration file and the label; empty for none.
	key, label string
	// order is the last order; nil if there is none.
	order *Order
}

// choose returns the layout, its GPUs and its origin; no layout if no source names one. The
// most recent request wins: an order is valid until the configuration file or the label
// changes. The label has priority over the configuration file, which serves many nodes.
func choose(s sources) (layout string, gpus []string, from Origin) {
	switch c := s.order; {
	case c != nil && c.Key == s.key && c.Label == s.label:
		return c.Layout, c.GPUs, FromOrder
	case s.label != "":
		return s.label, nil, FromLabel
	case s.key != "":
		return s.key, nil, FromKey
	}
	return "", nil, ""
}
