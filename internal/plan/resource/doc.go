// Package resource decides what the node offers kubelet: which resources, with which device IDs,
// and which of them a container is best given. It is the only home of resource names and replica
// IDs.
//
// It is policy: a Snapshot and Options go in, a Plan comes out, and nothing is read, written,
// started or logged on the way. Package config makes its Options.
package resource
