// Package serve serves resources to kubelet: for each resource of the plan one gRPC server on a
// socket of its own, registered, and kept registered, for as long as the plan has the resource.
//
// A Set makes the servers match the plan. For each resource it keeps a list (what the resource
// advertises, for as long as the process lives) and runs one life after the other. A life listens
// on a socket with a new name, registers once, and answers kubelet from the list. It needs one open
// ListAndWatch stream from the current kubelet, and kubelet's own account must agree with the list.
// When one of these fails, the life ends, and the next one begins. No answer waits for hardware or
// disk.
//
// Package daemon builds a Set. The Set uses kubelet through the interfaces that this package
// declares.
package serve
