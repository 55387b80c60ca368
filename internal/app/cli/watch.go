package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// reconnectEvery is the interval of attempts to reach a daemon that has ended.
const reconnectEvery = 500 * time.Millisecond

// A watcher prints the changes of a daemon's status.
type watcher struct {
	out    io.Writer
	json   bool
	view   view
	before status.Status // latest status
	away   bool          // the daemon has ended
	now    func() time.Time
}

func newWatcher(out io.Writer, format string, v view) (*watcher, error) {
	if format == outputYAML {
		return nil, errors.New("--watch prints no YAML: give -o json")
	}
	return &watcher{out: out, json: format == outputJSON, view: v, now: time.Now}, nil
}

// follow prints changes until ctx ends. It waits for a first daemon, and for the next
// daemon after the end of a daemon.
func (w *watcher) follow(ctx context.Context, socket string) error {
	var printed error
	for {
		err := control.Follow(ctx, socket, daemon.CallStatusWatch, nil, func(s status.Status) error {
			printed = w.receive(s)
			return printed
		})
		switch {
		case ctx.Err() != nil:
			return nil
		case printed != nil || !errors.Is(err, control.ErrNoDaemon) && !errors.Is(err, control.ErrEnded) &&
			!errors.Is(err, control.ErrSilent):
			return err
		}
		if !w.away {
			w.away = true
			if err := w.print(
				status.Change{Kind: "connection", To: "waiting for the daemon", Reason: err.Error()}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reconnectEvery):
		}
	}
}

// receive prints the changes since the last status. For the first status, people see only the
// summary.
func (w *watcher) receive(s status.Status) error {
	if !w.json {
		terminal.Clean(&s)
	}
	changes := status.Changes(w.before, s, w.now())
	if !w.json {
		changes = status.Joined(changes)
		if w.before.Version == "" {
			changes = changes[max(0, len(changes)-1):] // an empty answer has no summary
		}
	}
	if w.away {
		w.away = false
		changes = append([]status.Change{{Kind: "connection", From: "waiting for the daemon", To: "connected"}},
			changes...)
	}
	w.before = s
	return w.print(changes...)
}

func (w *watcher) print(changes ...status.Change) error {
	var text bytes.Buffer
	for _, c := range changes {
		c.Time = status.Moment(w.now())
		if w.json {
			if err := json.NewEncoder(&text).Encode(c); err != nil {
				return fmt.Errorf("encode a change: %w", err)
			}
			continue
		}
		stamp := status.Stamp(c.Time) + "  "
		text.WriteString(stamp + w.line(c, w.view.columns-len(stamp)) + "\n")
	}
	_, err := w.out.Write(text.Bytes())
	return err
}

// line returns a change for people, with the state in its colour, cut to the given number of
// columns; 0 means no limit.
func (w *watcher) line(c status.Change, columns int) string {
	line := c.String()
	if runes := []rune(line); columns > 0 && len(runes) > columns {
		line = string(runes[:columns-1]) + "…"
	}
	if w.view.wide && c.Device != "" {
		line += " (" + c.Device + ")"
	}
	at := 0
	if c.From != "" {
		at = strings.Index(line, "→ ") + 1
	}
	before, after, whole := strings.Cut(line[at:], c.To)
	if colours[c.To] == "" || !whole {
		return line
	}
	return line[:at] + before + w.view.paint(c.To, colours[c.To]) + after
}
