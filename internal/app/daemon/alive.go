package daemon

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
)

// aliveTimeout limits the answers of all tasks.
const aliveTimeout = 5 * time.Second

// Liveness is the answer to the liveness probe: the stuck tasks. It ignores GPUs, the driver and
// the kubelet, because a new process of the daemon would find them in the same state.
type Liveness struct {
	lead  *lead.Lead
	tasks []Task
}

// NewLiveness returns the liveness of these tasks. A task under the lead counts only while
// this process leads.
func NewLiveness(leads *lead.Lead, tasks ...[]Task) *Liveness {
	l := &Liveness{lead: leads}
	for _, group := range tasks {
		for _, task := range group {
			if task.Alive != nil {
				l.tasks = append(l.tasks, task)
			}
		}
	}
	return l
}

// Stuck asks all tasks, and returns a reason for each stuck task, in the order of the tasks.
func (l *Liveness) Stuck(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, aliveTimeout)
	defer cancel()
	errs := make([]error, len(l.tasks))
	var questions sync.WaitGroup
	for i, task := range l.tasks {
		working, changed := l.lead.Tenure()
		if task.Lead && !working {
			continue
		}
		questions.Go(func() {
			err := task.Alive(ctx)
			select {
			case <-changed: // the tenure began or ended meanwhile
				if task.Lead {
					return
				}
			default:
			}
			errs[i] = err
		})
	}
	questions.Wait()
	var reasons []string
	for i, err := range errs {
		if err != nil {
			reasons = append(reasons, fmt.Sprintf("%s: %v", l.tasks[i].Name, err))
		}
	}
	return reasons
}
