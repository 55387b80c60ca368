// Package devicemanager runs two things against kubelet's own device manager on real sockets: the table of
// test/kubelet/scenario, which says whether the stand-in of test/kubelet is still true, and what the daemon serves GPUs
// with, through dropped streams, restarts and upgrades. With -v the latter logs its figures. It holds tests alone.
//
// It is a module of its own because it requires all of k8s.io/kubernetes, and it has two module files, one for each
// kubelet version that it knows:
//
//	go test ./...                                             # kubelet 1.37, go.mod
//	go test -modfile=kubelet136.mod -tags=kubelet136 ./...    # kubelet 1.36
//
// With -minutes -timeout=20m the scenarios run too that wait for kubelet's five minutes; they do so side by side, in
// under eleven.
package devicemanager
