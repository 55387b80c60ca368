// Package mps shares GPUs by CUDA's Multi-Process Service. A Supervisor runs one
// nvidia-cuda-mps-control for each resource that is shared by MPS, and one for each claim that
// requests MPS (ClaimDaemons). A Prober checks that the daemons of the resources respond. Only the
// process of the Supervisor is privileged, because it sets compute modes; the device plugin, with
// the Prober, is not. Package exclusive sets the compute modes and restores them.
//
// The Supervisor and the Prober share the host's directory of MPS state, the root. It has
//
//	<resource>/pipe   the pipes to the daemon of a resource, for clients and commands
//	<resource>/log    the logs of the servers
//	<resource>/.started   exists while the daemon has its limits and serves clients
//	.exclusive        UUIDs of GPUs in a compute mode set for MPS; exists while there are such GPUs
//	shm               shared memory: the /dev/shm of servers and clients
//	.ready            exists while all daemons serve clients; the text is "mps"
//	.lock             locked by the Supervisor of the root
//	claims            requests and state of the daemons of claims; see claims.go
package mps
