// Package plan decides what the node offers and what a container gets. It is pure, but for the
// writers of CDI specs and device nodes.
//
//   - resource: Snapshot and options to the Plan: names, MIG strategy, selection, sharing.
//   - containeredits: devices to what a container gets.
//   - cdi: writes and removes CDI specs.
//   - devnodes: creates device nodes on the host.
//   - labels: Snapshot and options to the labels of the Node.
//   - layout: a file of MIG layouts and the GPUs' present division to the steps between them.
//   - dra: Snapshot to the devices in ResourceSlices; who owns a GPU.
package plan
