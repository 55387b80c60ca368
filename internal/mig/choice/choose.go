// Package choice decides which MIG layout the node is to have: the configuration file, a label of
// the node and the command mig apply may each name one. What it decides, the owner of the layouts
// in package mig makes.
//
// Package cluster tells it the label, and writes the state of the layout at the API server.
package choice

// An Origin is where a layout was named, for people.
type Origin string

// The origins, each of which counts before those above it.
const (
	FromKey     Origin = "configuration file"
	FromLabel   Origin = "label"
	FromCommand Origin = "mig apply"
)

// A Command is what mig apply has asked for.
type Command struct {
	// Layout is the name of the layout.
	Layout string `json:"layout"`
	// GPUs are the indexes or UUIDs of the GPUs that it is about; none for all.
	GPUs []string `json:"gpus,omitempty"`
	// Key and Label are the layouts that the configuration file and the label named then.
	Key   string `json:"key"`
	Label string `json:"label"`
}

// said has the layouts from which one is chosen.
type said struct {
	// key and label are the layouts that the configuration file and the label name; empty for none.
	key, label string
	// command is the last one; nil if there is none.
	command *Command
}

// choose returns the layout that counts, the GPUs that it is about and who named it; no layout if
// nobody does. A command counts as long as the configuration file and the label say what they said
// when it was given: whoever speaks last is heard. The label counts before the configuration file,
// which is for many nodes.
func choose(s said) (layout string, gpus []string, from Origin) {
	switch c := s.command; {
	case c != nil && c.Key == s.key && c.Label == s.label:
		return c.Layout, c.GPUs, FromCommand
	case s.label != "":
		return s.label, nil, FromLabel
	case s.key != "":
		return s.key, nil, FromKey
	}
	return "", nil, ""
}
