// Package resource decides what the node offers to the kubelet: the resources, their device IDs,
// and the devices that a container is preferably given. It is the only home of resource names and
// replica IDs.
//
// The package is policy: New makes a Plan from a Snapshot and Options. It reads, writes, starts and
// logs nothing. Package config provides the Options.
package resource
