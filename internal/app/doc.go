// Package app puts the parts together into programs.
//
//   - daemon: builds the adapters and owners, joins them to tasks, and runs the tasks.
//   - cli: the commands, their flags and output, and the process around the daemon.
//   - drivercli: the commands of gpu-driver, which packs drivers.
package app
