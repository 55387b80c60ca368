package nodefiles

import "io/fs"

// nodePIDs is the kernel's name of the outermost PID namespace (PROC_PID_INIT_INO).
const nodePIDs = "pid:[4026531836]"

// HasOwnPIDNamespace reports whether this process has its own PID namespace, as in a pod without
// hostPID: true, given the root folder of the process. Then the driver shows no processes of other
// containers. If unknown, the answer is true.
func HasOwnPIDNamespace(root fs.FS) bool {
	namespace, err := fs.ReadLink(root, "proc/self/ns/pid")
	return err != nil || namespace != nodePIDs
}
