// Package containeredits decides what a container gets with its devices: environment variables,
// mounts, device nodes, annotations and CDI names. It is the only home of the contracts with
// container runtimes and NVIDIA's container toolkit.
//
// The package is policy: it turns devices and Options into Edits, and reads and writes nothing.
// Package serve turns Edits into responses to the kubelet, package cdi into spec files.
package containeredits
