package monitor

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// How long the keeper waits to write again after another instance was writing, and after the disk refused.
const (
	lockedPause  = 50 * time.Millisecond
	refusedPause = 30 * time.Second
)

// A keeper keeps the ledger for the loop, which never waits for the disk.
type keeper struct {
	ledger  ledger
	clock   clock.Clock
	books   chan book // the latest that is to be written
	written book
}

// openLedger reads what earlier processes noted, for the loop to begin with. A ledger that cannot be read is nothing to end
// for: the next write tells why, or sets it aside.
func (m *Monitor) openLedger(ctx context.Context, l *loop) *keeper {
	k := &keeper{
		ledger: ledger{dir: m.options.StateDir},
		clock:  m.options.Clock,
		books:  make(chan book, 1),
	}
	noted, err := k.ledger.read()
	if err != nil {
		klog.FromContext(ctx).Info("Beginning without the faults of earlier processes", "dir", m.options.StateDir, "reason", err.Error())
	}
	k.written, l.kept = noted.clone(), noted.clone()
	noted.expire(m.options.BootID)
	l.truth.noted = noted
	return k
}

// offer has the keeper write a book in place of all that were offered before. It never blocks; only the loop calls it.
func (k *keeper) offer(b book) {
	select {
	case <-k.books:
	default:
	}
	k.books <- b
}

// run writes what is offered until ctx ends, and what is left then.
func (k *keeper) run(ctx context.Context) {
	log := klog.FromContext(ctx)
	var wanted *book
	var complaint string
	again := k.clock.NewTimer(refusedPause)
	again.Stop()
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			select {
			case b := <-k.books:
				wanted = &b
			default:
			}
			if wanted != nil {
				if _, err := k.ledger.write(k.written, *wanted); err != nil {
					log.Info("Faults are not in the ledger and will be forgotten", "dir", k.ledger.dir, "reason", err.Error())
				}
			}
			return
		case b := <-k.books:
			wanted = &b
		case <-again.C():
		}
		if wanted == nil {
			continue
		}
		setAside, err := k.ledger.write(k.written, *wanted)
		if setAside != nil {
			log.Info("Set the fault ledger aside and began another", "dir", k.ledger.dir, "kept", damagedFile, "reason", setAside.Error())
		}
		switch {
		case err == nil:
			k.written, wanted, complaint = *wanted, nil, ""
			continue
		case errors.Is(err, errLocked):
			again.Reset(lockedPause)
			continue
		case err.Error() != complaint:
			complaint = err.Error()
			log.Info("Cannot write the fault ledger: a restart would forget faults", "dir", k.ledger.dir, "reason", complaint)
		}
		again.Reset(refusedPause)
	}
}
