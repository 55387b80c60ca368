// Package nvidia is the only package that talks to the NVIDIA driver: to NVML, and to the driver's
// files in /proc and /sys. It converts the answers to values of package inventory.
//
// A Driver opens one Session at a time. A Session scans the node (Scan), waits for events (Next)
// and reads the health signals of a GPU (Read) until it is closed (Close).
//
// # Failures and their handling
//
//   - Any call may hang. Each call is recorded before it is made, and made in a job of its GPU. If a
//     call of a job does not return in time, the caller abandons the job: the caller gets an
//     inventory.Stall with the name of the call, and continues with the other GPUs. At any time, at
//     most one job of each GPU, one job about no GPU, and one wait for events are abandoned. A
//     session is never shut down while a call hangs.
//   - Any function may be missing from the library, and calling a missing function would end the
//     process. All functions are looked up before NVML is initialised. Open fails without the
//     functions needed to serve any GPU. Every other missing function is a missing feature.
//   - A process with a loaded library cannot change to another library. Open and Scan return
//     inventory.ErrDriverReplaced when the loaded library is no longer the installed one.
//   - Features missing on a driver or GPU are absent; they do not make the GPU Unhealthy. A query
//     not supported by a GPU is made once in a session.
//   - Names and counts may be invalid. Such a device is in LeftOut (inventory.Identify).
//   - A GPU that stops answering does not affect the others. This package only reports how the GPU
//     answers; package health judges the GPU.
//
// # Replacing a session
//
// NVML counts the GPUs when a session is opened. The owner closes the session and opens another
// one in these cases:
//
//   - Scan returns inventory.ErrNewSession: GPUs were bound to the driver or unbound, or MIG
//     instances hidden by the driver changed.
//   - Next returns inventory.EventBinding (the same, at once, since R575) or an error.
//   - A GPU is Lost, from time to time: only a new session finds a returned GPU.
package nvidia
