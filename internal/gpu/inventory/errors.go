package inventory

import (
	"errors"
	"fmt"
)

// What an adapter reports of the driver, for owners to match with errors.Is.
var (
	// ErrNoDriver: there is no driver to talk to now: the library is missing, or the kernel module is
	// not loaded.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrNoAnswer: a call into the driver did not return in time. It may never return.
	ErrNoAnswer = errors.New("the NVIDIA driver does not answer")
	// ErrNotSupported: the driver or the GPU does not have the feature. It says nothing about health.
	ErrNotSupported = errors.New("not supported by this driver or GPU")
	// ErrNoPermission: the driver refuses to answer this process. It says nothing about health.
	ErrNoPermission = errors.New("no permission: add the capability SYS_ADMIN to this container")
	// ErrInUse: something uses the GPU or MIG device that was to be changed. Nothing was changed, or a
	// MIG mode is pending.
	ErrInUse = errors.New("in use")
	// ErrOpenElsewhere is the ErrInUse of a GPU that is not reset for a change of its MIG mode,
	// because a process has it open.
	ErrOpenElsewhere = fmt.Errorf("%w: the GPU is reset for it, and is open", ErrInUse)
	// ErrSessionInUse: the driver resets the GPU for a change of its MIG mode, and does not while a
	// session has it open. Nothing was changed.
	ErrSessionInUse = errors.New("the GPU is reset for it, which this process's session is in the way of")
	// ErrResetRequired: the GPU has to be reset, or the node restarted, before the MIG mode that was
	// set is in force.
	ErrResetRequired = errors.New("takes effect when the GPU is reset or the node is restarted: drain the node, end what has the GPU open, " +
		"and run nvidia-smi --gpu-reset -i INDEX, or restart the node; a virtual machine has to be restarted")
	// ErrUnusable: the GPU answers nothing: it wants a reset first, or is lost.
	ErrUnusable = errors.New("the GPU is lost, or wants a reset first")
	// ErrNewSession: what the driver holds changed since it was opened, and only a new session sees
	// it: close this one and open another at once.
	ErrNewSession = errors.New("the driver's devices changed: a new session is needed")
	// ErrDriverReplaced: the library and the kernel module are of different versions, or the library's
	// file was replaced. A process cannot change libraries: only a new one can talk to the driver
	// again.
	ErrDriverReplaced = errors.New("the NVIDIA driver was replaced under this process")
	// ErrDriverMismatch is the ErrDriverReplaced of different versions. A new process that finds the
	// same library is no better off.
	ErrDriverMismatch = fmt.Errorf("%w", ErrDriverReplaced)
	// ErrOldLibrary is the ErrDriverMismatch of a library that is older than the kernel module. A
	// new container may have a newer library.
	ErrOldLibrary = fmt.Errorf("%w", ErrDriverMismatch)
)
