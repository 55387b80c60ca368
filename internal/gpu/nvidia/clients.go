package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// podOf matches the pod UID in the name of a control group: cgroupfs keeps the UID unchanged,
// systemd replaces - by _. The UID of a static pod has no dashes.
var podOf = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})\b`)
})

// maxComm is the length of a process name in the kernel. The name may contain any bytes.
const maxComm = 16

// Clients returns the processes, except those of this pod, that have the GPU with the given minor
// number open, from /proc below root. The driver reports such processes only while they compute.
// The error says that the kernel may hide others, without hostPID and CAP_SYS_PTRACE.
func Clients(root fs.FS, minor int) ([]inventory.DriverClient, error) {
	entries, err := fs.ReadDir(root, "proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	own := podOfProcess(root, "proc/self")
	node := fmt.Sprintf("/dev/nvidia%d", minor)
	var clients []inventory.DriverClient
	hidden := 0
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		folder := "proc/" + e.Name()
		switch opened, err := opens(root, folder+"/fd", node); {
		case errors.Is(err, fs.ErrPermission):
			hidden++
			continue
		case !opened: // the process may also have ended
			continue
		}
		pod := podOfProcess(root, folder)
		if pod != "" && pod == own {
			continue
		}
		name, _ := fs.ReadFile(root, folder+"/comm")
		clients = append(clients, inventory.DriverClient{PID: pid, Name: printable(name, maxComm), Pod: pod})
	}
	if hidden > 0 {
		err = fmt.Errorf("the open files of %d processes are hidden: hostPID and CAP_SYS_PTRACE are needed", hidden)
	}
	return clients, err
}

// opens reports whether a process has a file open.
func opens(root fs.FS, folder, path string) (bool, error) {
	files, err := fs.ReadDir(root, folder)
	for _, f := range files {
		target, failed := fs.ReadLink(root, folder+"/"+f.Name())
		if target == path {
			return true, nil
		}
		if errors.Is(failed, fs.ErrPermission) {
			err = failed
		}
	}
	return false, err
}

// podOfProcess returns the UID of the pod of a process. It is empty for a host process, and for a
// process of this pod in a separate control group namespace.
func podOfProcess(root fs.FS, folder string) string {
	text, _ := fs.ReadFile(root, folder+"/cgroup") // the process may have ended
	found := podOf().FindSubmatch(text)
	if found == nil {
		return ""
	}
	return strings.ReplaceAll(string(found[1]), "_", "-")
}
