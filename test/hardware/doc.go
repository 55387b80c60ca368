// Package hardware holds the program to a real NVIDIA GPU of this machine. Its tests change no
// setting of a GPU and reset none, and are left out where the machine has no GPU. Their programs
// are the daemon and, in the folder client, one that computes with CUDA.
package hardware
