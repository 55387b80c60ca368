// Package mps shares GPUs by CUDA's Multi-Process Service. A Supervisor runs one
// nvidia-cuda-mps-control for each resource that is shared by MPS, and one for each claim that
// requests MPS (ClaimDaemons). A Prober checks that the daemons of the resources respond. Only the
// process of the Supervisor is privileged, because it sets compute modes; the device plugin, with
// the Prober, is not.
//
// The Supervisor and the Prober share the host's directory of MPS state, the root. It has
//
//	<resource>/pipe   where clients and commands find the daemon of a resource
//	<resource>/log    what its servers log
//	<resource>/.started   while the daemon has its limits and serves clients
//	.exclusive        while GPUs are in a compute mode that was set for MPS; it has their UUIDs
//	shm               memory that servers and clients share, their /dev/shm
//	.ready            while all daemons serve clients; it says "mps"
//	.lock             locked by the one Supervisor of the root
//	claims            the same for claims, which are asked for there; see claims.go
package mps
