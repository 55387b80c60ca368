package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// shmFolder, in the root, is the /dev/shm of servers and clients.
const shmFolder = "shm"

// ErrNotMounted says that the shared memory was left as it is.
var ErrNotMounted = errors.New("nothing was mounted")

// MountSHM mounts the memory that servers and clients share below root: a tmpfs of half the
// machine's memory. The error wraps ErrNotMounted where that is done already, or not for us to do.
func MountSHM(root string) error {
	dir := filepath.Join(root, shmFolder)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder of shared memory: %w", err)
	}
	mounted, err := isMounted(dir)
	switch {
	case err != nil:
		return fmt.Errorf("look at the folder of shared memory: %w", err)
	case mounted:
		return fmt.Errorf("%w: %s is mounted already", ErrNotMounted, dir)
	}
	var machine unix.Sysinfo_t
	if err := unix.Sysinfo(&machine); err != nil {
		return fmt.Errorf("read the size of memory: %w", err)
	}
	half := fmt.Sprintf("size=%d", uint64(machine.Totalram)*uint64(machine.Unit)/2)
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_RELATIME)
	err = unix.Mount("shm", dir, "tmpfs", flags, half)
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %s takes CAP_SYS_ADMIN, and a root that is mounted with Bidirectional propagation: "+
			"run this container privileged", ErrNotMounted, dir)
	case err != nil:
		return fmt.Errorf("mount shared memory on %s: %w", dir, err)
	}
	return nil
}

// UnmountSHM unmounts what MountSHM has mounted below root, if it is mounted.
func UnmountSHM(root string) error {
	dir := filepath.Join(root, shmFolder)
	switch mounted, err := isMounted(dir); {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at the folder of shared memory: %w", err)
	case !mounted:
		return nil
	}
	if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount the shared memory at %s: %w; it takes CAP_SYS_ADMIN, and a root that is mounted with Bidirectional "+
			"propagation, and no process may use it", dir, err)
	}
	return nil
}

// isMounted reports whether something is mounted on a folder: then it is of another device than the
// folder it is in.
func isMounted(dir string) (bool, error) {
	var own, parent syscall.Stat_t
	if err := syscall.Stat(dir, &own); err != nil {
		return false, err
	}
	if err := syscall.Stat(filepath.Dir(dir), &parent); err != nil {
		return false, err
	}
	return own.Dev != parent.Dev, nil
}
