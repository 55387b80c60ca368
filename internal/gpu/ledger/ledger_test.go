package ledger_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

const (
	file    = "faults.json"
	damaged = "faults.json.damaged"
)

var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// fault is an XID that was found so many seconds after began.
func fault(xid uint64, after int) health.Fault {
	since := began.Add(time.Duration(after) * time.Second)
	return health.Fault{
		Source: health.SourceXID, XID: xid, State: inventory.Unhealthy, Reason: fmt.Sprintf("XID %d", xid),
		Remedy: inventory.RemedyReset, Since: since, LastSeen: since,
	}
}

// with returns a Book with the faults of one device, found in boot "1".
func with(device string, faults ...health.Fault) ledger.Book {
	b := ledger.NewBook()
	b.Add(device, "1", health.Device{Faults: faults})
	return b
}

// A process has a FaultWriter of its own.
type process struct {
	*ledger.FaultWriter
	found ledger.Book
	err   error // of Read
	end   func()

	mu   sync.Mutex
	has  ledger.Book // what it found or took in, as a monitor
	next error       // why it may not write
	log  []string
}

// open begins a process, as the daemon does. It leads.
func open(dir string) *process {
	p := wait(dir)
	p.lead()
	return p
}

// wait begins a process that does not lead.
func wait(dir string) *process {
	p := &process{end: func() {}}
	p.found, p.err = ledger.Read(dir)
	p.FaultWriter = ledger.NewFaultWriter(dir, p.found)
	p.has = p.found.Clone()
	return p
}

// lead has the process lead until it ends.
func (p *process) lead() {
	log := funcr.New(func(_, args string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.log = append(p.log, args)
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.Run(ctx, ledger.Term{MayWrite: p.may, Merge: func(found, known ledger.Book) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.has.Join(found.Unlike(known, p.has))
			p.FaultWriter.Offer(p.has.Clone())
		}})
	}()
	p.end = func() {
		cancel()
		<-ended
	}
}

func (p *process) may() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}

// Offer has the process find what is in a Book, and nothing else.
func (p *process) Offer(b ledger.Book) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.has = b.Clone()
	p.FaultWriter.Offer(b)
}

// logged returns how many lines say something.
func (p *process) logged(what string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(slices.DeleteFunc(slices.Clone(p.log), func(line string) bool { return !strings.Contains(line, what) }))
}

// pass lets time pass in the bubble, and what happens in it.
func pass(d time.Duration) {
	time.Sleep(d) // the bubble's clock
	synctest.Wait()
}

// faultsOf are the faults of a device, as a new process finds them.
func faultsOf(t *testing.T, dir, device string) []health.Fault {
	t.Helper()
	b, err := ledger.Read(dir)
	if err != nil {
		t.Error(err)
	}
	faults, _ := b.Device(device)
	return faults
}

func compare(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(health.Fault{})); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// TestRoundTrip: another process finds all that is durable of a device, and of no other.
func TestRoundTrip(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state") // which is made
	gone := fault(79, 1)
	gone.State, gone.Remedy = inventory.Lost, inventory.RemedyReboot
	want := []health.Fault{fault(48, 0), gone, fault(119, 2), fault(48, 3)}
	want[3].Source, want[3].XID = health.SourceRetirement, 0
	recoveries := []time.Time{began, began.Add(time.Hour)}
	b := ledger.NewBook()
	b.Add("GPU-a", "1", health.Device{Faults: []health.Fault{want[2], want[0], want[3], want[1]},
		Recoveries: recoveries})
	b.Add("GPU-b", "1", health.Device{Faults: []health.Fault{fault(64, 0)}})
	b.Add("GPU-c", "1", health.Device{})

	p := open(dir)
	if p.err != nil || !p.found.Empty() {
		t.Errorf("an empty folder: %v, empty %v", p.err, p.found.Empty())
	}
	p.Offer(b)
	p.end()

	found, err := ledger.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	got, times := found.Device("GPU-a")
	compare(t, "faults", want, got)
	compare(t, "recoveries", recoveries, times)
	if !found.Equal(b) {
		t.Error("the Book is not Equal to the one that was written")
	}
	if faults, times := found.Device("GPU-c"); len(faults)+len(times) > 0 {
		t.Errorf("of a good device: %v, %v", faults, times)
	}
	wantMode(t, filepath.Join(dir, file), 0o600)
	wantMode(t, dir, 0o700|os.ModeDir)
	for _, device := range []string{"GPU-a", "GPU-b"} {
		if !found.Drop(device) || found.Drop(device) {
			t.Errorf("Drop of %s says something else than that it was there once", device)
		}
		if found.Equal(b) {
			t.Errorf("Equal although %s was dropped", device)
		}
	}
	if !found.Empty() {
		t.Error("something is left")
	}
}

// TestABookOfRecoveries: a device that was well again for now has no faults, and its recoveries
// count.
func TestABookOfRecoveries(t *testing.T) {
	b := ledger.NewBook()
	b.Add("GPU-a", "1", health.Device{Recoveries: []time.Time{began}})
	later := ledger.NewBook()
	later.Add("GPU-a", "1", health.Device{Recoveries: []time.Time{began.Add(time.Second)}})
	if b.Empty() || with("GPU-a", fault(48, 0)).Empty() || b.Equal(ledger.NewBook()) || b.Equal(later) ||
		!b.Equal(b.Clone()) {
		t.Error("recoveries or faults do not count")
	}
	if !b.Drop("GPU-a") || !b.Empty() {
		t.Error("recoveries are not forgotten")
	}
}

// TestExpire: the restart of the node ends each fault that needs no operator, if both boot IDs are
// known.
func TestExpire(t *testing.T) {
	hardware := fault(64, 0)
	hardware.Remedy = inventory.RemedyHardware
	for _, tt := range []struct {
		found, now string
		want       int
	}{{"1", "1", 2}, {"1", "2", 1}, {"1", "", 2}, {"", "2", 2}} {
		b := ledger.NewBook()
		b.Add("GPU-a", tt.found, health.Device{Faults: []health.Fault{fault(48, 0), hardware}})
		b.Expire(tt.now)
		if faults, _ := b.Device("GPU-a"); len(faults) != tt.want || faults[len(faults)-1].XID != 64 {
			t.Errorf("found in boot %q, now in %q: %+v", tt.found, tt.now, faults)
		}
	}
}

// TestHandOver: what a process has found that waits is on the disk when it leads, beside what the
// one noted that led. What was gone from both stays gone.
func TestHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		repaired := open(dir)
		repaired.Offer(with("GPU-x", fault(48, 0)))
		repaired.end()
		one, two := open(dir), wait(dir)
		synctest.Wait()
		two.Offer(with("GPU-b", fault(64, 0))) // and GPU-x was reset
		recovered := with("GPU-a", fault(48, 0))
		recovered.Add("GPU-c", "1", health.Device{Recoveries: []time.Time{began}})
		one.Offer(recovered)
		synctest.Wait()
		compare(t, "GPU-a", []health.Fault{fault(48, 0)}, faultsOf(t, dir, "GPU-a"))
		compare(t, "faults of GPU-b, while the other process leads", 0, len(faultsOf(t, dir, "GPU-b")))
		one.end()
		two.lead()
		synctest.Wait()
		compare(t, "GPU-a after the hand-over", []health.Fault{fault(48, 0)}, faultsOf(t, dir, "GPU-a"))
		compare(t, "GPU-b then", []health.Fault{fault(64, 0)}, faultsOf(t, dir, "GPU-b"))
		compare(t, "faults of GPU-x then", 0, len(faultsOf(t, dir, "GPU-x")))
		_, times := two.has.Device("GPU-c")
		compare(t, "recoveries that the other process noted", []time.Time{began}, times)
		two.Offer(with("GPU-b", fault(64, 0)))
		two.end()
		one.lead()
		one.end()
		compare(t, "faults of GPU-b when the first process leads again", 1, len(faultsOf(t, dir, "GPU-b")))
		compare(t, "faults that it found itself", 1, len(faultsOf(t, dir, "GPU-a")))
	})
}

// TestAnotherProcessLeads: one that lost the lead writes nothing more, and says nothing of that.
func TestAnotherProcessLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		p := open(dir)
		p.Offer(with("GPU-a", fault(48, 0)))
		synctest.Wait()
		p.mu.Lock()
		p.next = errors.New("another process leads")
		p.mu.Unlock()
		p.Offer(with("GPU-b", fault(48, 0)))
		pass(time.Hour)
		p.end()
		compare(t, "faults of GPU-a", 1, len(faultsOf(t, dir, "GPU-a")))
		compare(t, "lines", 0, p.logged(""))
	})
}

// TestUnknownFieldsAreKept: a newer version that shares the file may have written them.
func TestUnknownFieldsAreKept(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, `{"version": 1, "node": {"name": "x"}, "faults": [
		{"device": "GPU-a", "boot": "1", "source": "xid", "xid": 48, "state": "Unhealthy", "reason": "r",
		 "cure": "reset", "since": "2026-01-02T03:04:05Z", "ticket": 7},
		{"device": "GPU-b", "boot": "1", "source": "xid", "xid": 64, "state": "Unhealthy", "reason": "r",
		 "cure": "reset", "since": "2026-01-02T03:04:05Z", "ticket": 8}]}`)
	p := open(dir)
	b := with("GPU-a", fault(48, 9)) // found again
	b.Add("GPU-b", "1", health.Device{Faults: []health.Fault{fault(64, 0)}})
	b.Add("GPU-c", "1", health.Device{Faults: []health.Fault{fault(79, 0)}})
	p.Offer(b)
	p.end()
	var got struct {
		Version int
		Node    map[string]string
		Faults  []struct {
			Device string
			Since  time.Time
			Ticket int
		}
	}
	if err := json.Unmarshal([]byte(read(t, dir, file)), &got); err != nil {
		t.Fatal(err)
	}
	compare(t, "the field of the file", map[string]string{"name": "x"}, got.Node)
	var tickets []int
	for _, f := range got.Faults {
		tickets = append(tickets, f.Ticket)
	}
	compare(t, "the fields of faults", []int{7, 8, 0}, tickets)
	compare(t, "the version", 1, got.Version)
	compare(t, "what was found again", began.Add(9*time.Second), got.Faults[0].Since)
}

// TestDamagedFileIsSetAside with a sentence, and all that is known is written again.
func TestDamagedFileIsSetAside(t *testing.T) {
	for name, text := range map[string]string{
		"half a file": `{"version": 1, "faul`, "a newer form": `{"version": 2, "faults": []}`, "nothing": "",
		"a list":       "[]",
		"null":         "null",
		"a wrong type": `{"version": 1, "faults": [{"device": 3}]}`, "more than is read": strings.Repeat(" ", 5<<20),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, text)
			p := open(dir)
			if p.err == nil || !p.found.Empty() {
				t.Errorf("Read: %v, empty %v", p.err, p.found.Empty())
			}
			p.Offer(with("GPU-a", fault(48, 0)))
			p.end()
			compare(t, "what is set aside", text, read(t, dir, damaged))
			compare(t, "what is written again", []health.Fault{fault(48, 0)}, faultsOf(t, dir, "GPU-a"))
			if p.logged("Set the damaged fault ledger aside") != 1 || p.logged(damaged) != 1 {
				t.Errorf("logged: %q", p.log)
			}
		})
	}
}

// TestFileThatBecomesDamaged before a process leads: what the process found is written again.
func TestFileThatBecomesDamaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		p := wait(dir)
		p.Offer(with("GPU-a", fault(48, 0)))
		write(t, dir, "{")
		p.lead()
		p.end()
		compare(t, "faults of GPU-a", 1, len(faultsOf(t, dir, "GPU-a")))
		compare(t, "what is set aside", "{", read(t, dir, damaged))
	})
}

// TestEndBeforeTheLedgerIsTakenIn: what was offered to a process that ends is written beside what
// other processes noted.
func TestEndBeforeTheLedgerIsTakenIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		earlier := open(dir)
		earlier.Offer(with("GPU-a", fault(48, 0)))
		earlier.end()
		refused := errors.New("the disk refuses")
		disk := make(chan error, 1)
		w := ledger.NewFaultWriter(dir, ledger.NewBook())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.Run(ctx, ledger.Term{
				MayWrite: func() error { return <-disk },
				Merge:    func(ledger.Book, ledger.Book) {}, // the monitor has ended
			})
		}()
		w.Offer(with("GPU-b", fault(64, 1)))
		synctest.Wait()
		disk <- refused
		pass(time.Minute)
		cancel()
		synctest.Wait()
		close(disk)
		<-ended
		compare(t, "faults of GPU-a", []health.Fault{fault(48, 0)}, faultsOf(t, dir, "GPU-a"))
		compare(t, "faults of GPU-b", []health.Fault{fault(64, 1)}, faultsOf(t, dir, "GPU-b"))
	})
}

// TestFileThatIsInTheWay: a folder in the place of the ledger is said once, and neither set aside
// nor replaced.
func TestFileThatIsInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, file), 0o700); err != nil {
			t.Fatal(err)
		}
		p := open(dir)
		if p.err == nil {
			t.Error("Open: no error")
		}
		p.Offer(with("GPU-a", fault(48, 0)))
		pass(10 * time.Minute)
		compare(t, "complaints", 1, p.logged("Cannot write the fault ledger"))
		compare(t, "complaints that say why", 1, p.logged("not a regular file"))
		p.end()
		compare(t, "complaints at the end", 1, p.logged("will be lost"))
		wantMode(t, filepath.Join(dir, file), 0o700|os.ModeDir)
		if _, err := os.Stat(filepath.Join(dir, damaged)); err == nil {
			t.Error("it was set aside")
		}
	})
}

// TestFolderThatCannotBe: it is said once, and written within half a minute once it can be.
func TestFolderThatCannotBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blocked := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(blocked, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(blocked, "state")
		p := open(dir)
		if p.err == nil {
			t.Error("no error for a folder that cannot be read")
		}
		p.Offer(with("GPU-a", fault(48, 0)))
		pass(10 * time.Minute)
		compare(t, "complaints", 1, p.logged("Cannot write the fault ledger"))
		if err := os.Remove(blocked); err != nil {
			t.Fatal(err)
		}
		pass(30 * time.Second)
		compare(t, "faults", 1, len(faultsOf(t, dir, "GPU-a")))
		p.end()
		compare(t, "complaints at the end", 0, p.logged("will be lost"))
	})
}

func wantMode(t *testing.T, path string, want os.FileMode) {
	t.Helper()
	if info, err := os.Stat(path); err != nil || info.Mode() != want {
		t.Errorf("%s: %v, %v, want %v", path, info, err, want)
	}
}

func write(t *testing.T, dir, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Error(err)
	}
	return string(text)
}

// TestABookOfFaults: Books that differ in faults alone are not Equal.
func TestABookOfFaults(t *testing.T) {
	b := with("GPU-a", fault(48, 0))
	if b.Equal(ledger.NewBook()) || ledger.NewBook().Equal(b) || b.Equal(with("GPU-a", fault(48, 1))) ||
		!b.Equal(with("GPU-a", fault(48, 0))) {
		t.Error("faults do not count")
	}
}
