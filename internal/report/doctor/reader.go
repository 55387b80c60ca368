package doctor

import (
	"regexp"
	"strings"
)

// A Reader is the place where the remedies are read, and the facts known there. The zero
// Reader has a root shell on the node, with the daemon's program.
type Reader struct {
	// Node is the name of the node; empty if it is not known.
	Node string
	// Namespace and Pod are the daemon's pod in which doctor runs: the reader uses kubectl. They are
	// empty outside of a pod.
	Namespace, Pod string
	// MayReset says that the daemon's container can reset GPUs.
	MayReset bool
}

var (
	// forwarded are the daemon's commands that kubectl gpu runs in the daemon's pod.
	forwarded = regexp.MustCompile(`^gpu-device-plugin (status|quiesce|resume|validate|reset|health clear)\b`)
	// inTheContainer are the other commands of a running daemon.
	inTheContainer = regexp.MustCompile(`^gpu-device-plugin [a-z]`)
	// nodeName is the placeholder for the name of the node.
	nodeName = regexp.MustCompile(`\bNODE\b`)
)

// resetNeeds is what the command reset needs where the daemon's container cannot reset GPUs.
const resetNeeds = "   # needs hostDev: true in the chart, or deployments/host-dev; without it see docs/health.md"

// command returns a remedy as the reader can type it.
func (r Reader) command(remedy string) string {
	if strings.HasPrefix(remedy, "gpu-device-plugin reset ") && !r.MayReset {
		remedy += resetNeeds
	}
	switch {
	case r.Pod == "":
	case forwarded.MatchString(remedy):
		remedy = forwarded.ReplaceAllString(remedy, "kubectl gpu $1 NODE")
	case inTheContainer.MatchString(remedy):
		remedy = "kubectl -n " + r.Namespace + " exec " + r.Pod + " -- " + remedy
	}
	if r.Node != "" {
		remedy = nodeName.ReplaceAllLiteralString(remedy, r.Node)
	}
	return remedy
}
