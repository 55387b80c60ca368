package inventory

import (
	"errors"
	"fmt"
)

// Errors of the driver, to be matched with errors.Is.
var (
	// ErrNoDriver: no driver is available now. The library is missing, or the kernel module is not
	// loaded.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrNoAnswer: a call into the driver did not return in time. It may never return.
	ErrNoAnswer = errors.New("the NVIDIA driver does not answer")
	// ErrNotSupported: the driver or the GPU lacks the feature, and says nothing about health.
	ErrNotSupported = errors.New("not supported by this driver or GPU")
	// ErrNoPermission: the driver refuses to answer this process, and says nothing about health.
	ErrNoPermission = errors.New("no permission: add the capability SYS_ADMIN to this container")
	// ErrInUse: the GPU or MIG device to be changed is in use. Nothing was changed, or a MIG mode
	// is pending.
	ErrInUse = errors.New("in use")
	// ErrOpenElsewhere is the ErrInUse of a change of the MIG mode: the driver does not reset the
	// GPU because a process has it open.
	ErrOpenElsewhere = fmt.Errorf("%w: a process has the GPU open, and the driver resets it for this change", ErrInUse)
	// ErrSessionInUse: the driver resets the GPU for a change of the MIG mode, and cannot do so
	// while a session has the GPU open. Nothing was changed.
	ErrSessionInUse = errors.New("the driver resets the GPU for this change, and cannot while this process has a " +
		"session")
	// ErrResetRequired: the new MIG mode takes effect after a reset of the GPU or a restart of the
	// node.
	ErrResetRequired = errors.New("takes effect after a reset of the GPU or a restart of the node: drain the node, " +
		"stop the processes that have the GPU open, and run nvidia-smi --gpu-reset -i INDEX, or restart the node; " +
		"a virtual machine needs a restart")
	// ErrUnusable: the GPU answers no call, because it needs a reset first or is lost.
	ErrUnusable = errors.New("the GPU is lost, or needs a reset first")
	// ErrNewSession: the driver's devices changed after the session was opened, and only a new
	// session sees the change. Close this session and open another one at once.
	ErrNewSession = errors.New("the driver's devices changed: a new session is needed")
	// ErrDriverReplaced: the versions of the library and the kernel module differ, or the library's
	// file was replaced. A process cannot change libraries: only a new process can talk to the
	// driver again.
	ErrDriverReplaced = errors.New("the NVIDIA driver was replaced under this process")
	// ErrDriverMismatch is the ErrDriverReplaced of different versions. A new process with the same
	// library gets the same error.
	ErrDriverMismatch = fmt.Errorf("%w", ErrDriverReplaced)
	// ErrOldLibrary is the ErrDriverMismatch of a library older than the kernel module. A new
	// container may have a newer library.
	ErrOldLibrary = fmt.Errorf("%w", ErrDriverMismatch)
)
