package claims

import (
	"context"
	"fmt"
	"slices"
)

// Reserve keeps claims from a GPU until release is called, for a CUDA check on the GPU or
// on one of its MIG devices. Both arguments are UUIDs. Meanwhile no claim is prepared on
// the GPU. The error says which claim has the device, or why the answer is unknown by the
// end of ctx. Claims with adminAccess do not count.
func (c *Claims) Reserve(ctx context.Context, gpu, device string) (release func(), err error) {
	done, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	locks := c.locks.begin()
	release = func() {
		locks.end()
		done()
	}
	err = locks.gpus(ctx, []string{gpu})
	for _, r := range c.all() {
		has := func(d recordDevice) bool {
			other := d.MIG != nil && d.uuid() != "" && d.uuid() != device && gpu != device
			return d.GPU == gpu && !d.AdminAccess && !other
		}
		if err == nil && !r.beforeRestart(c.options.BootID) && !r.Destroyed && slices.ContainsFunc(r.Devices, has) {
			err = fmt.Errorf("in use by the claim %s", r)
		}
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}
