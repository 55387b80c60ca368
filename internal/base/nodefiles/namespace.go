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

// HidesProcesses reports whether /proc below a root folder is that of another PID namespace than the
// node's, and so lacks processes of the node. If unknown, the answer is false.
func HidesProcesses(root fs.FS) bool {
	namespace, err := fs.ReadLink(root, "proc/1/ns/pid")
	return err == nil && namespace != nodePIDs
}
