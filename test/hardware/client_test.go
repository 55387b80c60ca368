package hardware_test

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/hardware"
)

// A program is a client that runs.
type program struct {
	answers chan hardware.Answer // closed when it prints no more
	ended   chan struct{}        // closed when it has ended
	err     error                // why, then
}

// compute starts the client on a GPU. It ends with the test.
func compute(t *testing.T, gpu string, arguments ...string) *program {
	t.Helper()
	path, err := client()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), path, arguments...)
	c.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+gpu)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p := &program{answers: make(chan hardware.Answer, 10), ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var a hardware.Answer
			if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
				a.Error = err.Error() + ": " + lines.Text()
			}
			p.answers <- a
		}
		close(p.answers)
		p.err = c.Wait()
	}()
	t.Cleanup(func() { <-p.ended })
	return p
}

// limit is how long a line of the client may take. Where the driver starts for it, that takes
// seconds.
const limit = time.Minute

// next returns the next line.
func (p *program) next(t *testing.T) hardware.Answer {
	t.Helper()
	select {
	case a, ok := <-p.answers:
		if !ok {
			t.Fatal("the client prints no more")
		}
		return a
	case <-time.After(limit):
		t.Fatalf("the client prints nothing for %v", limit)
	}
	return hardware.Answer{}
}

// end waits until the client has ended by itself.
func (p *program) end(t *testing.T) {
	t.Helper()
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("the client: %v", p.err)
		}
	case <-time.After(limit):
		t.Fatalf("the client does not end within %v", limit)
	}
}

// started returns a client that computes for a while, once its first kernel has run.
func started(t *testing.T, gpu, duration string) *program {
	t.Helper()
	p := compute(t, gpu, "spin", "-for", duration)
	if a := p.next(t); !a.Started {
		t.Fatalf("the client: %s", a.Error)
	}
	return p
}
