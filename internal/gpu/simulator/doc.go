// Package simulator is a scripted node. Its GPUs exist only in a profile, behind the same interface
// that go-nvml has for real GPUs, so that all code above that interface is the shipped code.
//
// A Profile describes the node: a YAML file of the user, or one of the profiles in this package.
// New creates a Node from a Profile. NVML and Root replace the driver's library and the machine's
// /proc, /sys and /dev for package nvidia. Inject changes the running node, and List returns its
// state.
//
// # Fidelity
//
// The implemented calls behave like NVML, including its difficult parts:
//
//   - NVML counts its Inits. A session, from the first Init to the matching Shutdown, sees the GPUs
//     that existed at its start. A GPU that falls off the bus or is unplugged returns GPU_IS_LOST
//     for the rest of the session. A GPU that comes back or is plugged in is seen by the next
//     session only. MIG devices come and go within a session. Handles of an ended session are
//     stale; Stats counts calls on them.
//   - An event is delivered to every event set registered for it at the time, and lost otherwise. A
//     set with a lost GPU returns GPU_IS_LOST at once from every wait, once its queue is empty.
//   - Plugging a GPU in or out sends a system event since R575. A session has at most one set of
//     these events.
//   - GPU instances and compute instances are created and destroyed with the placements of the
//     model. An instance in use stays. On Ampere, a mode that cannot be changed now is pending
//     until a reset, and survives resets; later generations lose it with a reset. Every reset and
//     restart destroys the instances. NVIDIA does not document whether a MIG device keeps its
//     index, UUID and minors, or which IDs the driver chooses. Here the other MIG devices keep
//     theirs, and IDs are reused, lowest first.
//   - When the last user of the driver ends, a GPU without persistence mode loses its compute mode
//     and its volatile counts.
//   - A function newer than the profile's driver does not exist: LookupSymbol says so, and calling
//     it panics, as it ends a process with the real library. Newer event types and field values
//     are not supported.
//   - A loaded library never changes. After the installation of another driver version, only a
//     library returned by NVML afterwards, as for a new process, can be initialised.
//   - go-nvml's versioned handlers (GetGpuFabricInfoV, GetGpuInstanceProfileInfoV and so on) hold a
//     C handle and cannot be simulated: LookupSymbol always says that they are missing.
//
// A call that the simulator does not implement panics. A test checks that all calls of package
// nvidia are implemented.
//
// # Adding a machine
//
// A machine is a file in profiles; the type Profile explains its keys. A GPU model is a file in
// models; the type Model explains its keys. A file of the user may contain its own models. A
// machine that is broken from the start lists its faults in the format of Inject.
package simulator
