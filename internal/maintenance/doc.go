// Package maintenance contains operations on one GPU or on the node that do not interrupt the other
// GPUs.
//
//   - cudacheck: the owner of the verdicts of CUDA on each device.
//   - reset: the owner of GPU resets that an operator requests.
//   - repair: resets GPUs whose remedy is a reset, by the rules of plan/repair.
//   - driver: reads and judges whether the NVIDIA driver of the node can be changed, packs drivers
//     into folders and images, and changes the loaded driver.
//   - reboot: requests a restart of the node by a file.
package maintenance
