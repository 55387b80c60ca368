// Package daemon holds the tests of the daemon as a whole: its process, on a simulated node with a
// stand-in kubelet. There is nothing in it to import.
package daemon
