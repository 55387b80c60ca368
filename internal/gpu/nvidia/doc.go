// Package nvidia is the only package that talks to the NVIDIA driver: to NVML, and to what the
// driver and the kernel show in /proc and /sys. It turns what they say into values of package
// inventory.
//
// A Driver opens one Session at a time. A Session scans the node (Scan), waits for events (Next)
// and reads the health signals of one GPU (Read) until it is closed (Close).
//
// # What may go wrong, and what happens then
//
//   - Any call may hang. Each call is recorded before it is made, and made in a job of its GPU. A job is given up when one of its calls
//     does not return in time: the caller gets an inventory.Stall that names the call, and the other GPUs are asked without it.
//     One job a GPU, one about no GPU and one wait for events may be given up at a time. A session is never shut down while a call hangs.
//   - Any function may be missing from the library, and calling it would end the process. All functions are looked up
//     before NVML is initialised. Open names those without which no GPU can be served; any other is a feature that the
//     driver does not have.
//   - A process cannot change to another library once one is loaded. Open and Scan return inventory.ErrDriverReplaced when the
//     loaded one is not the installed one any more.
//   - What a driver or GPU does not support is absent; it does not make the GPU Unhealthy. A question that a GPU does not support
//     is asked once in a session.
//   - Names and counts may be impossible. Such a device is in LeftOut (inventory.Identify).
//   - A GPU that stops answering does not affect the others. Package health judges it: this package only says how it answers.
//
// # When a session has to be replaced
//
// NVML counts the GPUs when a session is opened. Its owner closes it and opens another when Scan
// says inventory.ErrNewSession (GPUs were bound to the driver or unbound, or MIG instances changed
// of which the driver tells this process nothing), when Next returns inventory.EventBinding (the
// same, at once, from R575 on) or an error, and from time to time while a GPU is Lost: only a new
// session sees one that came back.
package nvidia
