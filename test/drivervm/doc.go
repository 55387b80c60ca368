// Package drivervm holds gpu-driver to a real kernel: QEMU boots Debian's kernel without hardware
// acceleration, and the program changes drivers in the guest. The script parts fetches QEMU and the
// kernels. `make driver-vm` runs the tests; without the parts they are skipped.
//
// The modules of the guest's drivers are stand-ins in the folder stubs: modules of our own with the
// names, versions, dependencies and device numbers of NVIDIA's. They drive nothing. TestOpenModule
// loads NVIDIA's own open module, which finds no GPU.
//
// A power cut kills QEMU. The disk of the guest is in the process of the test, and keeps of the
// writes since the last flush only some at random, as a disk with a volatile cache does.
package drivervm
