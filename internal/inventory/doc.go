// Package inventory holds the values the whole daemon speaks in: what the node has, how it is connected, and how
// each device is. It knows nothing of NVML, kubelet or configuration, starts nothing and reads nothing.
//
// A Snapshot is immutable once published: its owner (package monitor) replaces it whole, and readers never write to
// it. Any package may import this one; it imports no other package of the project.
package inventory
