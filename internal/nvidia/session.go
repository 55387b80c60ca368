package nvidia

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A Session is one NVML session. Its methods may be called from several goroutines, but Next only from one at a time.
type Session struct {
	driver *Driver
	api    *api

	closing   sync.Once
	closed    chan struct{}
	unwatched []inventory.LeftOut

	stopped bool     // belongs to the worker for calls: NVML was shut down
	scanner *scanner // belongs to the worker for calls
	watch   *watch   // belongs to the worker for events, once the session is open

	// The rest belongs to the caller of Next.

	useless time.Duration // how long to rest because the last wait was of no use
	due     time.Time     // before it no wait begins
}

func newSession(d *Driver, a *api) *Session {
	return &Session{driver: d, api: a, closed: make(chan struct{}), watch: &watch{api: a, bindings: bindings{api: a}}}
}

// start reads what holds for the whole session, on the worker. The GPUs in bound are bound to the driver.
func (s *Session) start(bound []binding) error {
	version, ret := s.api.SystemGetDriverVersion()
	if err := failure("nvmlSystemGetDriverVersion", ret); err != nil {
		return err
	}
	driver := inventory.Driver{Version: version}
	if cuda, ret := s.api.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		driver.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	s.scanner = newScanner(s.api, s.driver.options, driver, bound)
	// Before anything is scanned: what happens from here on gives an event.
	s.watch.bindings.start()
	s.unwatched, ret = s.watch.start()
	return failure("nvmlDeviceGetCount", ret)
}

// Unwatched lists the GPUs, as they were when the session was opened, that give no events, and why: on these only Scan
// and Read tell what happened.
func (s *Session) Unwatched() []inventory.LeftOut { return s.unwatched }

// Scan looks at the whole node. The Snapshot has Generation 0. A GPU that answers is Healthy; one that was seen in this
// session and no longer answers is there as it was last seen, Lost, Unhealthy or Suspect as its return codes say; one
// that cannot be identified is in LeftOut, as is a MIG device that cannot be read. The session does not know the time:
// Health.Since is zero in all.
//
// An error means that the node could not be looked at. It wraps inventory.ErrNoAnswer when the driver did not answer by
// the deadline of ctx, inventory.ErrNewSession when GPUs were bound to the driver, or unbound, after Open, and
// inventory.ErrDriverReplaced when another driver was installed since.
func (s *Session) Scan(ctx context.Context) (inventory.Snapshot, error) {
	return ask(ctx, s, "scan the node", func() (inventory.Snapshot, error) {
		if err := s.driver.replaced(); err != nil {
			return inventory.Snapshot{}, err
		}
		return s.scanner.scan()
	})
}

// Read reads the health signals of a GPU that an earlier Scan of this session found. How the GPU answers is part of
// the Reading; an error means that it could not be asked: there is no such GPU, or the driver did not answer by the
// deadline of ctx (inventory.ErrNoAnswer).
func (s *Session) Read(ctx context.Context, uuid string) (inventory.Reading, error) {
	return ask(ctx, s, "read GPU "+uuid, func() (inventory.Reading, error) { return s.scanner.read(uuid) })
}

// ask has the worker for calls put a question to the driver, and waits for the answer until ctx ends.
func ask[T any](ctx context.Context, s *Session, what string, question func() (T, error)) (T, error) {
	var answer, none T
	var err error
	call := func() {
		if err = errClosed; !s.stopped {
			answer, err = question()
		}
	}
	if noAnswer := s.driver.calls.do(ctx, call, nil); noAnswer != nil {
		return none, fmt.Errorf("%s: %w", what, noAnswer)
	}
	if err != nil {
		return none, fmt.Errorf("%s: %w", what, err)
	}
	return answer, nil
}

// Close ends the session: calls of Next return, and NVML is shut down once no call is being made. While a call hangs
// NVML must not be shut down: then Close returns inventory.ErrNoAnswer at the deadline of ctx, the Driver opens no
// other session, and Close may be called again. Closing a closed session does nothing.
func (s *Session) Close(ctx context.Context) error {
	s.closing.Do(func() { close(s.closed) })
	// Nobody may wait on the event set while it is freed.
	if err := s.driver.events.take(ctx); err != nil {
		return fmt.Errorf("close the NVML session: event wait: %w", err)
	}
	defer s.driver.events.release()
	if err := s.driver.calls.take(ctx); err != nil {
		return fmt.Errorf("close the NVML session: %w", err)
	}
	var err error
	if noAnswer := s.driver.calls.run(ctx, func() { err = s.stop() }, nil); noAnswer != nil {
		return fmt.Errorf("close the NVML session: %w", noAnswer)
	}
	if err != nil {
		return fmt.Errorf("close the NVML session: %w", err)
	}
	return nil
}

// stop ends what is waited on and shuts NVML down, on the worker for calls and while nobody waits for events.
func (s *Session) stop() error {
	if s.stopped {
		return nil
	}
	s.stopped = true
	err := s.watch.end()
	ret := s.api.lib.Shutdown()
	s.driver.open = false
	return errors.Join(err, failure("nvmlShutdown", ret))
}
