//go:build kubelet134 || kubelet135 || kubelet136

package claims

// options are those of the default gates for the declarative validation.
var options []string
