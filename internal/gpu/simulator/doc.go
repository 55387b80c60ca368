// Package simulator is a scripted node: GPUs that exist only in a profile, behind the same
// interface that go-nvml gives to the real ones, so that everything above that interface is the
// code that ships.
//
// A Profile says what the node has: its own YAML file, or one of the profiles in this package. New
// makes a Node of it. NVML and Root are what the nvidia adapter takes in place of the driver's
// library and of the machine's /proc, /sys and /dev. Inject makes something happen to the node
// while it runs, and List says how it is.
//
// # How faithful it is
//
// Calls that the simulator implements behave as NVML does, including where NVML is hard to use:
//
//   - NVML counts its Inits. A session, from the first Init to the Shutdown that balances it, sees the GPUs that were
//     there when it began: one that falls off the bus or is unplugged answers GPU_IS_LOST for the rest of the session,
//     and one that comes back or is plugged in is seen by the next session only. MIG devices come and go within a
//     session. Handles of a session that ended are stale; Stats counts calls on them.
//   - An event is delivered to every event set that was registered for it when it happened, and lost otherwise. A set
//     with a lost GPU in it answers GPU_IS_LOST to every wait, without waiting, once its queue is empty.
//   - A GPU that is plugged in or unplugged gives a system event from R575 on. A session has one set of these at most.
//   - GPU instances and compute instances are created and destroyed with the placements of the model. One that is in use stays. On
//     Ampere a mode that cannot be changed now is pending until a reset, and outlives resets; later generations lose it with one.
//     Instances are lost with every reset and restart. Whether a MIG device keeps its index, its UUID and its minors, and which
//     IDs the driver chooses, NVIDIA does not say: here others keep theirs, and IDs are given again, the lowest first.
//   - A driver that has no user any more makes a GPU without persistence mode forget its compute mode and its volatile counts.
//   - A function newer than the driver of the profile does not exist: LookupSymbol says so, and calling it panics, as
//     it ends a process that uses the real library. Newer event types and field values are not supported.
//   - A library stays what it was when it was first loaded. When another driver version is installed, only a library
//     that NVML returns afterwards, as for a new process, can be initialised.
//   - go-nvml's versioned handlers (GetGpuFabricInfoV, GetGpuInstanceProfileInfoV and their like) hold a C handle and
//     cannot be simulated: LookupSymbol always says that they are missing.
//
// A call that the simulator does not implement panics. A test holds that it implements every call
// of package nvidia.
//
// # Adding a machine
//
// A machine is one file in profiles; the type Profile says what its keys mean. A GPU model is one
// file in models; the type Model says what its keys mean. A file of one's own may have models of
// its own. A machine that is broken from the start lists its faults as Inject takes them.
package simulator
