package listing_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// A comparing is a Comparison that a script drives.
type comparing struct {
	*listing.Comparison[string]
	disputes listing.Disputes
	began    time.Time
	last     listing.Verdict
	asked    []string // the sockets of which was asked whether their programs have ended
}

func newComparing() *comparing {
	c := &comparing{began: time.Unix(1e9, 0)}
	c.Comparison = listing.NewComparison[string](&c.disputes)
	return c
}

// do runs one line of a script: the time, what happens then, and the verdict, if the kubelet is
// asked. It returns what is wrong with the verdict, or nothing.
func (c *comparing) do(t *testing.T, line string) string {
	t.Helper()
	event, want, _ := strings.Cut(line, " = ")
	words := strings.Fields(event)
	after, err := time.ParseDuration(words[0])
	if err != nil {
		t.Fatal(err)
	}
	now, list := c.began.Add(after), []string{"b", "a"}
	switch words[1] {
	case "registers":
		c.Comparison = listing.NewComparison[string](&c.disputes)
		return ""
	case "sends":
		c.Send()
		return ""
	case "beside":
		c.SetOthers(words[2:], now)
		return ""
	case "ended":
		c.SetEnds(func(socket string) bool { c.asked = append(c.asked, socket); return socket == words[2] }, now)
		return ""
	case "miss":
		c.last = c.Miss(now)
	case "same":
		c.last = c.Compare([]string{"a", "b", "a"}, list, now)
	case "other":
		c.last = c.Compare([]string{"a", "c"}, list, now)
	case "nothing":
		c.last = c.Compare(nil, list, now)
	default:
		t.Fatalf("no such event: %s", line)
	}
	got := c.last.Pause.String()
	switch {
	case c.last.AwaitOther:
		got = "await " + strings.Join(slices.Sorted(slices.Values(c.Suspects)), " ")
	case errors.Is(c.last.End, listing.ErrOtherEnded):
		got = "ended"
	case c.last.End != nil:
		got = "register"
	}
	if c.last.Began {
		got += " began"
	}
	if c.last.Resume {
		got += " resume"
	}
	if got != want {
		return line + ", not " + got
	}
	return ""
}

// TestComparisons: a line is the time, an event, and for a question the pause until the next one or
// what happens to the registration.
func TestComparisons(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"equal": `1s same = 2s resume; 3s same = 4s resume; 7s same = 8s resume; 15s same = 16s resume;
			31s same = 30s resume; 61s same = 30s resume; 62s sends; 63s same = 2s resume`,
		"no answer": `1s miss = 100ms; 1.1s miss = 200ms; 1.3s miss = 400ms; 1.7s miss = 800ms; 2.5s miss = 1.6s;
			4.1s miss = 3.2s; 7.3s miss = 6.4s; 13.7s miss = 12.8s; 26.5s miss = 25.6s; 52.1s miss = 30s; 82s miss = 30s`,
		"no answer now and then": `1s miss = 100ms; 1.1s same = 200ms resume; 1.3s miss = 100ms; 1.4s other = 100ms began;
			1.5s miss = 100ms; 1.6s miss = 200ms`,

		"a difference lasts": `1s other = 100ms began; 1.1s other = 100ms; 1.3s nothing = 300ms; 1.8s other = 200ms;
			1.999s other = 1ms; 2s other = register`,
		"a difference ends":              `1s other = 100ms began; 1.9s same = 200ms resume; 2.1s other = 100ms began`,
		"the list changes":               `1s other = 100ms began; 1.5s sends; 2.5s other = 100ms began; 3.4s other = 100ms`,
		"nothing of a list that counted": `1s same = 2s resume; 3s nothing = register began`,
		"nothing of the next list":       `1s same = 2s resume; 2s sends; 3s nothing = 100ms began`,
		"a difference without an answer": `1s other = 100ms began; 1.999s miss = 100ms; 2s miss = 200ms resume`,

		"two differences": `1s other = 100ms began; 2s other = register; 2s registers; 3s other = 100ms began;
			4s other = 8s resume; 11.999s other = 1ms resume; 12s other = register`,
		"a difference after each registration": `1s other = 100ms began; 2s other = register; 12s other = register;
			13s other = 19s resume; 32s other = register; 33s other = 30s resume; 72s other = register; 152s other = register;
			312s other = register; 611s other = 1s resume; 612s other = register; 911s other = 1s resume;
			912s other = register; 1513s other = register; 1522s other = 1s resume; 1523s other = register`,

		"another program comes":     `0s beside; 1s beside A B; 2s other = 100ms began; 3s other = await A B`,
		"another came a minute ago": `0s beside; 1s beside A; 1m1s other = 100ms began; 1m2s other = await A`,
		"another came before that":  `0s beside; 1s beside A; 1m1.001s other = 100ms began; 1m2.001s other = register`,
		"another was there before":  `0s beside A; 1s beside A; 2s other = 100ms began; 3s other = register`,
		"another comes, no answer":  `0s beside; 1s beside A; 2s other = 100ms began; 4s miss = 100ms; 5s miss = 200ms`,
		"another comes later": `0s beside; 2s other = 100ms began; 2.5s beside A; 3s other = register;
			3s registers; 3s beside A; 4s other = 100ms began; 5s other = 8s resume`,
		"another comes, and again nobody": `0s beside; 1s beside A; 2s other = 100ms began; 2.1s sends; 70s other = 100ms began;
			71s other = register`,

		"another ends, and no list is sent": `0s beside; 1s same = 2s resume; 2s beside A; 4s beside; 5s same = 4s resume`,
		"another ends, and a list is sent":  `0s beside; 1s same = 2s resume; 2s beside A; 4s beside; 4.5s sends; 14s same = ended`,
		"another was there, and ends":       `0s beside A; 1s beside; 2s same = 2s resume; 3s miss = 100ms`,
		"a list after more than ten seconds": `0s beside; 1s same = 2s resume; 2s beside A; 4s beside; 4.5s sends;
			14.001s same = 2s resume`,
		"another ends, and no answer": `0s beside; 1s same = 2s resume; 2s beside A; 4s beside; 5s miss = ended`,
		"another ends, is compared, and no answer": `0s beside; 1s same = 2s resume; 2s beside A; 4s beside; 5s same = 4s resume;
			6s miss = 100ms`,
		"another refuses connections":    `0s beside; 1s same = 2s resume; 2s beside A; 4s ended A; 4.5s sends; 5s same = ended`,
		"another refuses, and no answer": `0s beside; 1s same = 2s resume; 2s beside A; 4s ended A; 5s miss = ended`,
		"it is gone after it refused": `0s beside; 1s same = 2s resume; 2s beside A; 4s ended A; 5s same = 4s resume; 6s beside;
			7s miss = 100ms`,
		"another comes again": `0s beside A; 1s beside; 2s beside A; 3s other = 100ms began; 4s other = await A`,
	} {
		c := newComparing()
		for line := range strings.SplitSeq(script, ";") {
			if wrong := c.do(t, strings.TrimSpace(line)); wrong != "" {
				t.Errorf("%s: %s", name, wrong)
			}
		}
	}
}

// TestWhatAComparisonSays about the difference, of which programs it is asked whether they have
// ended, and whether the two were ever equal.
func TestWhatAComparisonSays(t *testing.T) {
	t.Parallel()
	c := newComparing()
	for _, step := range []struct {
		line, difference, asked string
		agreed                  bool
	}{
		{"0s beside A", "", "", false},
		{"1s nothing = 100ms began", "the kubelet counts 0 healthy devices, and the list has 2", "", false},
		{"1s beside A B", "", "", false},
		{"1s ended A", "", "B", false},
		{"1.1s same = 200ms resume", "", "", true},
		{"1.2s ended B", "", "B", true},
		{"1.3s ended B", "", "", true},
		{"2s other = 100ms began", "the kubelet counts 2 healthy devices, and the list has 2", "", true},
		{"3s other = register", "the kubelet counts 2 healthy devices, and the list has 2", "", true},
		{"4s other = 9s resume", "the kubelet counts 2 healthy devices, and the list has 2; a new registration did " +
			"not repair this, and the next one is at 2001-09-09T01:46:53Z", "", true},
	} {
		c.last, c.asked = listing.Verdict{}, nil
		if wrong := c.do(t, step.line); wrong != "" || c.last.Difference != step.difference ||
			strings.Join(c.asked, " ") != step.asked || c.Agreed != step.agreed {
			t.Errorf("%s: %s, %+v; asked %v, agreed %v", step.line, wrong, c.last, c.asked, c.Agreed)
		}
	}
}

// TestSameIDs whatever their order, and as often as it is asked about the same slices.
func TestSameIDs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		a, b []string
		want bool
	}{{nil, []string{}, true}, {[]string{"b", "a", "b"}, []string{"a", "b"}, true}, {[]string{"a"}, []string{"b"}, false},
		{[]string{"a"}, []string{"a", "b"}, false}, {nil, []string{"a"}, false}} {
		for range 2 {
			if got := listing.SameIDs(tt.a, tt.b); got != tt.want || listing.SameIDs(tt.b, tt.a) != got {
				t.Errorf("SameIDs(%q, %q) = %v", tt.a, tt.b, got)
			}
		}
	}
}

// TestTheNextPause grows from the one that the caller has set.
func TestTheNextPause(t *testing.T) {
	t.Parallel()
	c := newComparing()
	c.Pace = 50 * time.Millisecond
	if wrong := c.do(t, "1s same = 100ms resume"); wrong != "" {
		t.Error(wrong)
	}
}

// TestWhenListsAreSentAgain while the checkpoint may be outdated.
func TestWhenListsAreSentAgain(t *testing.T) {
	t.Parallel()
	var again listing.ResendPacing
	for i, outdated := range []bool{true, true, false, true} {
		if got, want := again.Due(time.Unix(1, 0), outdated), i == 0 || i == 3; got != want {
			t.Errorf("reading %d: the list is sent again: %v, want %v", i, got, want)
		}
	}
	var pacing listing.ResendPacing
	want := map[int]bool{0: true, 1: true, 3: true, 7: true, 15: true, 31: true, 61: true, 91: true}
	for second := range 100 {
		if got := pacing.Due(time.Unix(int64(second), 0), true); got != want[second] {
			t.Errorf("after %d s: the list is sent again: %v", second, got)
		}
	}
}
