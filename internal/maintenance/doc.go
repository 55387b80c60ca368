// Package maintenance contains operations on GPUs and on the driver of the node. Checks and resets leave
// the other GPUs in service; a change of the driver and a restart of the node do not.
//
//   - cudacheck: the owner of the verdicts of CUDA on each device.
//   - reset: the owner of GPU resets, which an operator or repairer requests.
//   - repairer: resets GPUs whose remedy is a reset, by the rules of plan/repair.
//   - driver: the folder of the packages that change the driver of the node, by the rules of
//     plan/driverchange. driverswap, in gpu-node-agent, takes each step. driverhost, in gpu-driver, carries
//     it out and has the journal; driverapi is the socket between the two programs. preflight judges from
//     driverfacts whether the driver can be changed. driverpack packs drivers.
//   - reboot: requests a restart of the node by a file.
package maintenance
