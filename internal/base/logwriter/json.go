package logwriter

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// JSON returns a logger that writes each message to w as a JSON object in a line, with the keys of
// Kubernetes' components: ts (milliseconds since 1970), caller, msg, v (of an Info), err (of an
// Error), and the keys of the message. The verbosity of klog selects the messages. From now on the
// notices of w are also JSON.
func (w *Writer) JSON() klog.Logger {
	w.json.Store(true)
	return logr.FromSlogHandler(newHandler(w))
}

// A handler writes records as JSON. Of duplicate keys it writes only the last, because many JSON
// readers reject duplicates.
type handler struct {
	to    slog.Handler
	attrs []slog.Attr
}

func newHandler(w io.Writer) *handler {
	return &handler{to: slog.NewJSONHandler(w, &slog.HandlerOptions{
		AddSource: true, Level: slog.Level(-1 << 10), ReplaceAttr: asKubernetes,
	})}
}

// Enabled implements slog.Handler. The level of an Info is its verbosity, negated.
func (h *handler) Enabled(_ context.Context, level slog.Level) bool {
	return klog.VDepth(0, klog.Level(-level)).Enabled() // errors are below every verbosity
}

// Handle implements slog.Handler.
func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	attrs := slices.Clone(h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	line := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	for i, a := range attrs {
		if !slices.ContainsFunc(attrs[i+1:], func(later slog.Attr) bool { return later.Key == a.Key }) {
			line.AddAttrs(a)
		}
	}
	return h.to.Handle(ctx, line)
}

// WithAttrs implements slog.Handler.
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.to, append(slices.Clip(h.attrs), attrs...)}
}

// WithGroup implements slog.Handler. No message has groups.
func (h *handler) WithGroup(string) slog.Handler { return h }

// asKubernetes converts slog's own keys to the names and values used by Kubernetes' components, and
// other values to text.
func asKubernetes(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case *slog.Source:
		return slog.String("caller", fmt.Sprintf("%s:%d", filepath.Base(value.File), value.Line))
	case slog.Level:
		if value > 0 {
			return slog.Attr{} // an error has its key err
		}
		return slog.Int("v", -int(value))
	case time.Time:
		if a.Key == slog.TimeKey {
			return slog.Float64("ts", float64(value.UnixMicro())/1000)
		}
	case error:
		return slog.String(a.Key, value.Error())
	case fmt.Stringer:
		return slog.String(a.Key, value.String())
	}
	return a
}
