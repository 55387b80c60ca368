package cli

import (
	"io/fs"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// nodePIDs is the kernel's name of the outermost PID namespace (PROC_PID_INIT_INO).
const nodePIDs = "pid:[4026531836]"

// hasOwnPIDNamespace reports whether this process has its own PID namespace, as in a pod without
// hostPID: true. Then the driver shows no processes of other containers. If unknown, the
// answer is true.
func hasOwnPIDNamespace(root fs.FS) bool {
	namespace, err := fs.ReadLink(root, "proc/self/ns/pid")
	return err != nil || namespace != nodePIDs
}

// unseenProcesses returns warnings about facts missing in a plan of MIG layouts because of
// a separate PID namespace.
func unseenProcesses(c config.Config, root fs.FS) []string {
	if c.Simulate != "" || !hasOwnPIDNamespace(root) {
		return nil
	}
	return []string{"without hostPID the driver shows no processes of other containers: an instance that the plan " +
		"does not call in use may be in use; the driver refuses to destroy it then"}
}
