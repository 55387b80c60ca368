package claims

import (
	"context"
	"fmt"
	"slices"
)

// Reserve keeps claims from a GPU, by UUID, until release is called: a claim that is to have it is not prepared meanwhile. The error says
// which claim has it, or why that is not known by the time ctx ends.
func (c *Claims) Reserve(ctx context.Context, gpu string) (release func(), err error) {
	done, err := c.enter(ctx)
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
		if err == nil && !r.former(c.options.BootID) && slices.Contains(r.gpus(), gpu) {
			err = fmt.Errorf("in use by the claim %s", r)
		}
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}
