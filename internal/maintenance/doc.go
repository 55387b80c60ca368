// Package maintenance holds what is done to a GPU or node on request, while the others work.
//
//   - cudacheck: the owner of the verdicts of CUDA on each device.
//   - reset: the owner of GPU resets that an operator requests.
//   - reboot: requests a restart of the node by a file.
package maintenance
