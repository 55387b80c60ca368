package cli

import "io/fs"

// nodePIDs is the kernel's name of the PID namespace that is above all others (PROC_PID_INIT_INO).
const nodePIDs = "pid:[4026531836]"

// confined reports whether this process is in a PID namespace of its own, as in a pod without hostPID: true. There the
// driver shows it no processes of other containers. A process that cannot tell is taken for one.
func confined(root fs.FS) bool {
	namespace, err := fs.ReadLink(root, "proc/self/ns/pid")
	return err != nil || namespace != nodePIDs
}
