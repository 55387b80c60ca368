// Package serve offers resources to the kubelet. Each resource of the plan has a gRPC server with
// its own socket. The server stays registered as long as the plan has the resource.
//
// Servers makes the servers match the plan. Package plan/listing decides what each list has and
// which devices a call gets, and package yield what a server does beside the servers of other
// processes. Servers brings it the plans, the calls and the readings of the kubelet's accounts, and
// publishes each decision. For each resource, Servers runs one registration after another. A
// registration listens on a socket with a new name, registers once, and answers the kubelet from
// the list. It needs an open ListAndWatch stream from the current kubelet, and the kubelet's own
// account must agree with the list. When one of these conditions fails, the registration ends and
// the next one begins; while the account keeps differing, this happens less and less often. Only
// PreStartContainer waits for hardware or disk.
//
// A call of Allocate goes from service.go to listing.State.Allocate, which records it, and then to
// containeredits.For, which has what the container gets. CDI specs and device nodes exist by then:
// package offer sends a plan when they are written.
//
// Package daemon builds Servers. Servers uses the kubelet through the interfaces declared in this
// package.
package serve
