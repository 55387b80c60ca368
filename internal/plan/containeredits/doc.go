// Package containeredits decides what a container is given with its devices: environment variables,
// mounts, device nodes, annotations and CDI names. It is the only home of the contracts with
// container runtimes and NVIDIA's container toolkit.
//
// It is policy: devices and Options go in, Edits come out, and nothing is read or written on the
// way. Package plugin turns Edits into kubelet's answer, and package cdi into spec files.
package containeredits
