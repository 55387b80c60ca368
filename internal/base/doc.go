// Package base contains the packages that every program needs. None of them depends on GPUs.
//
//   - feed: the latest value of something for many readers.
//   - supervise: runs tasks, and starts them again with a backoff.
//   - statefile: reads and writes files whole, with deadlines for a disk that hangs.
//   - lead: which of the processes on a node decides, and what they tell each other.
//   - control: the control socket, by which commands reach the daemon.
//   - driverroot: folders, links and libraries below the driver root.
//   - logwriter: log lines that never block the daemon, as text or JSON.
//   - terminal: the printable form of texts that others have written.
//   - version: the version of the build.
package base
