// Package cdi writes CDI spec files for container runtimes, which give the devices of a plan to
// containers: device nodes, the driver's libraries and programs, and the hooks of NVIDIA's
// container toolkit if installed.
//
// The content of a file depends only on the Snapshot, the plan and the driver's files, never on
// calls to NVML. Files are replaced whole and never removed. Names stay in a file, because a
// container with an old name may be started again. The package is an adapter without goroutines,
// and the only home of the CDI library.
package cdi
