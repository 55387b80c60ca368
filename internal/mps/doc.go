// Package mps has CUDA's Multi-Process Service share GPUs. A Supervisor runs an nvidia-cuda-mps-control for each resource
// that is shared so; a Prober asks those daemons whether they are there. The two work in different processes: the one that
// runs MPS has to be privileged, since it sets compute modes, and the device plugin need not be.
//
// Both see the host's directory of MPS state, the root. It holds
//
//	<resource>/pipe   where clients and commands find the daemon of a resource
//	<resource>/log    what its servers log
//	<resource>/.started   while the daemon has its limits and serves clients
//	<resource>/.exclusive while the resource's GPUs are in a compute mode that is not their own
//	shm               memory that servers and clients share, their /dev/shm
//	.ready            while all daemons serve clients; it says "mps"
//	.lock             locked by the one Supervisor of the root
//
// Package cli imports this one; agent knows the Prober by an interface.
package mps
