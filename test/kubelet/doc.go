// Package kubelet is a stand-in for kubelet's device manager on real sockets, for tests, benchmarks
// and `make run`.
//
// It follows what pkg/kubelet/cm/devicemanager of kubelet 1.36 and 1.37 really does, traps
// included: it dials the plugin inside Register, keeps a list as a map, marks devices unhealthy
// when a stream ends and forgets the resource five minutes later, wipes sockets when it starts and
// lives on from its checkpoint. Nothing here is kinder than the real thing: where kubelet would
// have crashed, the stand-in records a Crash event and goes on. The table in test/kubelet/scenario
// runs against this package and against kubelet's own device manager, and that holds the stand-in
// true.
//
// What it leaves out: merging what several resources give one container, and the plugin watcher.
//
// Only tests and the programs below test/ may import it; it knows nothing of the daemon.
package kubelet
