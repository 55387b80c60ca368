package kubelet

import (
	"errors"
	"io/fs"
	"os"
	"path"
)

// movedRoots are the values of the kubelet's --root-dir in distributions with another
// default.
var movedRoots = []string{
	"/var/lib/k0s/kubelet",                      // k0s
	"/var/snap/microk8s/common/var/lib/kubelet", // MicroK8s
	"/var/data/kubelet",                         // IBM Cloud
	"/var/vcap/data/kubelet",                    // TKGI
	"/opt/rke/var/lib/kubelet",                  // RKE on RancherOS
}

// Missing returns why the PodResources service of a running kubelet cannot be queried, and
// what to set. It returns an empty text if the socket is there, or if the service is not to
// be queried. Node has the node's files, or is nil if they are not visible. Missing names a
// known --root-dir with the socket.
func (p *PodResources) Missing(node fs.FS) string {
	if p.socket == "" {
		return ""
	}
	if _, err := os.Stat(p.socket); !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return p.socket + " does not exist, so the end of a pod is noticed late. Set the kubelet's --root-dir, " +
		rootOf(node) +
		", as kubeletRoot in the chart, or edit the hostPath of pod-resources in the manifest."
}

// rootOf returns the kubelet's --root-dir, as far as visible, in words that follow "the
// kubelet's --root-dir".
func rootOf(node fs.FS) string {
	if node != nil {
		for _, root := range movedRoots {
			if _, err := fs.Stat(node, path.Join(root[1:], "pod-resources/kubelet.sock")); err == nil {
				return "which is " + root
			}
		}
	}
	return "such as /var/lib/k0s/kubelet"
}
