// Package cdi writes the CDI spec files by which container runtimes give containers the devices of
// a plan: device nodes, the driver's libraries and programs, and the hooks of NVIDIA's container
// toolkit where it is installed.
//
// What is in a file follows from the Snapshot, the plan and the driver's files alone; NVML is not
// asked. Files are replaced whole, never removed, and names that were in one stay in it: a
// container that was given a name may be started again. It is an adapter without goroutines of its
// own, and the only home of the CDI library.
package cdi
