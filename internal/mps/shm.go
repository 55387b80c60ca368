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

// ErrNotMounted means that the shared memory was not changed.
var ErrNotMounted = errors.New("nothing was mounted")

// MountSHM mounts the shared memory of servers and clients below root: a tmpfs of half the
// machine's memory. The error wraps ErrNotMounted if the memory is already mounted, or if the
// process may not mount.
func MountSHM(root string) error {
	dir := filepath.Join(root, shmFolder)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create the folder of shared memory: %w", err)
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
		return fmt.Errorf("%w: %s needs CAP_SYS_ADMIN, and a root mounted with Bidirectional propagation: "+
			"run this container privileged", ErrNotMounted, dir)
	case err != nil:
		return fmt.Errorf("mount shared memory on %s: %w", dir, err)
	}
	return nil
}

// UnmountSHM unmounts the shared memory below root, if it is mounted.
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
		return fmt.Errorf("unmount the shared memory at %s: %w; this needs CAP_SYS_ADMIN and a root "+
			"mounted with Bidirectional propagation, and no process may use the memory", dir, err)
	}
	return nil
}

// isMounted reports whether a folder is a mount point: the folder and its parent are on different
// devices.
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
