// Package mig divides the GPUs of the node into the MIG layout chosen by the operator, while
// the rest of the node keeps working. It withholds only the devices removed by a change,
// waits until no pod and no process uses them, writes a journal before each change, and
// rolls back a failed change on its GPU alone.
//
// Package daemon builds the Controller; gpu-node-agent supplies an Evictor and a Pauser.
// Package choice selects the layout named by the configuration file, the node label or mig
// apply.
package mig
