package nvidia

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// errClosed is the error of a call on a closed Session.
var errClosed = errors.New("the NVML session is closed")

// failure returns the error for the return code of a call; nil for success.
func failure(call string, ret nvml.Return) error {
	var kind error
	switch ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		kind = inventory.ErrNotSupported
	case nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIBRARY_NOT_FOUND:
		kind = inventory.ErrNoDriver
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		kind = inventory.ErrDriverMismatch
	default:
		return fmt.Errorf("%s: %w", call, ret)
	}
	return fmt.Errorf("%s: %w: %w", call, kind, ret)
}

// wrap adds the attempted action to an error.
func wrap(err error, what string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// withCapability adds the missing capability to the error of a call without permission.
func withCapability(err error) error {
	if errors.Is(err, nvml.ERROR_NO_PERMISSION) {
		return fmt.Errorf("%w (%w)", inventory.ErrNoPermission, err)
	}
	return err
}

// callResults combines the results of several calls about one GPU: the worst result decides.
type callResults struct {
	contact inventory.Contact
	reason  string
	ret     nvml.Return // the worst result
	// incomplete is the first call for a signal that failed without information about the GPU.
	incomplete string
}

// must records the result of a call that identifies the GPU, and reports success.
func (a *callResults) must(call string, ret nvml.Return) bool {
	if ret != nvml.SUCCESS {
		a.note(call, ret, max(contact(ret), inventory.ContactFailing))
	}
	return ret == nvml.SUCCESS
}

// may records the result of a call that some GPUs and drivers lack, and reports success.
func (a *callResults) may(call string, ret nvml.Return) bool {
	a.note(call, ret, contact(ret))
	return ret == nvml.SUCCESS
}

// extra is may for a call whose failure concerns the GPU only if the GPU is lost or needs a reset.
func (a *callResults) extra(call string, ret nvml.Return) bool {
	if c := contact(ret); c >= inventory.ContactResetRequired {
		a.note(call, ret, c)
	}
	return ret == nvml.SUCCESS
}

// signal is extra for a call whose failure leaves an existing signal unknown.
func (a *callResults) signal(call string, ret nvml.Return) bool {
	if a.incomplete == "" && contact(ret) == inventory.ContactFailing {
		a.incomplete = failure(call, ret).Error()
	}
	return a.extra(call, ret)
}

func (a *callResults) note(call string, ret nvml.Return, c inventory.Contact) {
	if c > a.contact {
		a.contact, a.reason, a.ret = c, failure(call, ret).Error(), ret
	}
}

// isUseless reports whether further calls about the GPU are useless.
func (a *callResults) isUseless() bool { return a.contact >= inventory.ContactResetRequired }

// contact returns the meaning of a return code for the GPU.
func contact(ret nvml.Return) inventory.Contact {
	switch ret {
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_NOT_FOUND:
		return inventory.ContactLost
	case nvml.ERROR_RESET_REQUIRED:
		return inventory.ContactResetRequired
	case nvml.ERROR_UNKNOWN, nvml.ERROR_TIMEOUT, nvml.ERROR_IRQ_ISSUE, nvml.ERROR_OPERATING_SYSTEM,
		nvml.ERROR_UNINITIALIZED, nvml.ERROR_IN_USE, nvml.ERROR_NOT_READY, nvml.ERROR_INSUFFICIENT_POWER,
		nvml.ERROR_MEMORY, nvml.ERROR_INVALID_STATE:
		return inventory.ContactFailing
	}
	return inventory.ContactGood
}
