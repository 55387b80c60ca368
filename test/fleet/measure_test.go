package fleet

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// tick is the unit of CPU time in /proc.
const tick = 10 * time.Millisecond

// cpuTime returns how much CPU time a process has used.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ") // the name may have blanks
	fields := strings.Fields(after)
	total := time.Duration(0)
	for _, field := range fields[11:13] { // in user and in system mode
		n, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		total += time.Duration(n) * tick
	}
	return total
}

// load returns how many tasks were ready to run on average, for 1, 5 and 15 minutes.
func load(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// askEvery is how often a bystander asks.
const askEvery = 100 * time.Millisecond

// A bystander is a client that has nothing to do with the nodes, and notes how long its answers
// take.
type bystander struct {
	mu     sync.Mutex // guards all following fields
	took   []time.Duration
	failed int
}

// ask asks until ctx ends.
func (b *bystander) ask(ctx context.Context, api kubernetes.Interface) {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		began := time.Now()
		_, err := api.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{})
		b.mu.Lock()
		if err != nil {
			b.failed++
		} else {
			b.took = append(b.took, time.Since(began))
		}
		b.mu.Unlock()
	}
}

// bystanderFor returns a bystander that has asked for some time.
func bystanderFor(ctx context.Context, api kubernetes.Interface, d time.Duration) *bystander {
	asking, enough := context.WithTimeout(ctx, d)
	defer enough()
	b := &bystander{}
	b.ask(asking, api)
	return b
}

// quantile returns how long the answer took that this part of all took no longer than.
func (b *bystander) quantile(q float64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.took) == 0 {
		return 0
	}
	slices.Sort(b.took)
	return b.took[int(q*float64(len(b.took)-1))].Round(time.Millisecond)
}

func (b *bystander) String() string {
	p50, p99 := b.quantile(0.5), b.quantile(0.99)
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprintf("answers to another client, as it sees them: %d, p50 %v, p99 %v; %d failed", len(b.took), p50, p99,
		b.failed)
}
