package monitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// execPatience is how long the process waits for driver calls to return before it exits
// instead of being replaced.
const execPatience = 10 * time.Second

// Replaceable returns err, unless err requests a new process and a driver call does not
// return: the kernel does not replace a process with a thread in the driver, and would
// wait forever. The returned error then says so, and requests no new process.
func Replaceable(ctx context.Context, err error, calls func() []inventory.Call) error {
	if !errors.Is(err, inventory.ErrDriverReplaced) {
		return err
	}
	late := time.NewTimer(execPatience)
	defer late.Stop()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		hanging := calls()
		if len(hanging) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-again.C:
		case <-late.C:
			return fmt.Errorf("%s; this process cannot be replaced while %v does not return: it exits, and has to be "+
				"started again",
				err.Error(), hanging[0])
		}
	}
}
