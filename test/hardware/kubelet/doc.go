// Package kubelet holds the program to a real NVIDIA GPU in containers, which a real kubelet and
// containerd start. Its tests change no setting of a GPU, and are left out where the machine has no
// GPU.
package kubelet
