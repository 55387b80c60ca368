// Package base contains packages that import nothing outside of base.
//
//   - feed: the latest value of something for many readers.
//   - supervise: runs tasks, and restarts them with a backoff.
//   - statefile: whole files, locks and Unix sockets, with deadlines for a hanging disk.
//   - lead: elects the leading process of a node, and sends its values to the standbys.
//   - eviction: repeats requests to evict pods.
//   - control: the control socket between commands and the daemon.
//   - driverroot: folders, links and libraries below the driver root.
//   - diagnosis: facts about a node that may be unknown, and findings of its checks.
//   - nodefiles: reads files below the root folder of a node, and facts with a time limit; knows whether
//     this process has its own PID namespace.
//   - question: asks another program once for all concurrent callers.
//   - logwriter: log lines that never block the daemon, as text or JSON.
//   - terminal: the printable form of texts from other programs.
//   - order: sorts slices of large structs, and finds the earliest of some times.
//   - wording: numbers with nouns, and short lists of names, for messages.
//   - version: the version of the build.
package base
