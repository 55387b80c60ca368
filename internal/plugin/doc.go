// Package plugin serves resources to kubelet: for each resource of the plan one gRPC server on a socket of its own,
// registered, and kept registered, for as long as the plan has the resource.
//
// A Set makes the servers match the plan. For each resource it keeps a list (what the resource advertises, for as long
// as the process lives) and runs one life after the other: a life listens on a socket whose name was never used,
// registers once, answers kubelet from the list, and ends for good when anything breaks the one thing that is wanted: one
// live ListAndWatch stream from the kubelet that is there now, and kubelet's own account agreeing with the list. No
// answer waits for hardware or disk.
//
// Package daemon puts it together; it knows kubelet through the interfaces that it declares.
package plugin
