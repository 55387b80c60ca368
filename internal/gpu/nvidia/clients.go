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

// podOf finds the UID of a pod in the name of its control group: cgroupfs writes it as it is,
// systemd with _ for -. That of a static pod has no dashes.
var podOf = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})\b`)
})

// maxComm is how long the name of a process is in the kernel, which takes any bytes of the process.
const maxComm = 16

// Clients returns the processes that have the GPU with a minor number open, by /proc below root,
// but for those of this pod. They may compute nothing, so that the driver does not tell of them.
// The error says that there may be others: without hostPID and CAP_SYS_PTRACE the kernel does not
// show them.
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
		case !opened: // or it has ended
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
		err = fmt.Errorf("it is not shown what some processes (%d) have open: that takes hostPID and CAP_SYS_PTRACE", hidden)
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

// podOfProcess returns the UID of a process's pod. It is empty for a process of the host, and for
// one of this pod where it has a control group namespace of its own.
func podOfProcess(root fs.FS, folder string) string {
	text, _ := fs.ReadFile(root, folder+"/cgroup") // it may have ended
	found := podOf().FindSubmatch(text)
	if found == nil {
		return ""
	}
	return strings.ReplaceAll(string(found[1]), "_", "-")
}
