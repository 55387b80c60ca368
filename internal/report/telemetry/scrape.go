package telemetry

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"k8s.io/klog/v2"
)

// statusTimeout is how long a scrape waits for the daemon's status, which is in memory.
const statusTimeout = time.Second

// metrics answers a scrape with current values. Nothing is cached between scrapes. The place of a
// scrape is free again before the answer is written: a client that does not read keeps no place,
// and no more memory than the compressed answer.
func (s *Exporter) metrics(w http.ResponseWriter, r *http.Request) {
	format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultOpenMetricsAcceptedFormats()...)
	zipped, ok := s.render(r.Context(), format)
	switch {
	case r.Context().Err() != nil: // the client disconnected
		return
	case !ok:
		s.logRefusal(klog.FromContext(r.Context()))
		answer(w, http.StatusServiceUnavailable, "too many scrapes at a time")
		return
	}
	w.Header().Set("Content-Type", string(format))
	w.Header().Set("Vary", "Accept, Accept-Encoding")
	if takesGzip(r.Header.Values("Accept-Encoding")) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Length", strconv.Itoa(zipped.Len()))
		_, _ = zipped.WriteTo(w) // the client disconnected
		return
	}
	if plain, err := gzip.NewReader(zipped); err == nil { // cannot fail: the data was compressed above
		_, _ = io.Copy(w, plain) //nolint:gosec // trusted data; errors as above
	}
}

// render returns the compressed answer to a scrape. It returns false if no place for the scrape
// became free in time.
func (s *Exporter) render(ctx context.Context, format expfmt.Format) (*bytes.Buffer, bool) {
	late := time.NewTimer(placeTimeout)
	defer late.Stop()
	select {
	case s.scrapes <- struct{}{}:
		defer func() { <-s.scrapes }()
	case <-ctx.Done():
		return nil, false
	case <-late.C:
		return nil, false
	}
	var text bytes.Buffer
	zipped := gzips.Get().(*gzip.Writer)
	defer gzips.Put(zipped)
	zipped.Reset(&text)
	_ = errors.Join(s.write(ctx, zipped, format), zipped.Close()) // a Buffer never fails
	return &text, true
}

// logRefusal logs a refused scrape, at most once in refusalPause.
func (s *Exporter) logRefusal(log klog.Logger) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.refused) > refusalPause {
		s.refused = now
		log.Info("Refused a scrape: too many at a time", "reason", "no place within "+placeTimeout.String())
	}
}

// gzips are reusable writers. They favour speed: the default level takes three times as long and
// saves a tenth.
var gzips = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // the level is valid
	return w
}}

// takesGzip reports whether the accepted encodings include gzip with a weight other than 0.
func takesGzip(accepted []string) bool {
	for offer := range strings.SplitSeq(strings.Join(accepted, ","), ",") {
		name, weight, weighted := strings.Cut(strings.ReplaceAll(offer, " ", ""), ";")
		if strings.EqualFold(name, "gzip") {
			return !weighted || strings.Trim(weight, "q=.0") != ""
		}
	}
	return false
}

// write writes all metrics in a format.
func (s *Exporter) write(ctx context.Context, out io.Writer, format expfmt.Format) error {
	others, _ := s.registry.Gather() // metrics that failed are absent
	encoder := expfmt.NewEncoder(out, format)
	for _, family := range others {
		if err := encoder.Encode(family); err != nil {
			return err
		}
	}
	if err := s.page(ctx).write(out, format); err != nil {
		return err
	}
	if end, ok := encoder.(expfmt.Closer); ok {
		return end.Close()
	}
	return nil
}

// page returns the current values of the program's own metrics.
func (s *Exporter) page(ctx context.Context) *page {
	out := &page{map[string]*family{}}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	if now, err := s.options.Status(ctx); err == nil { // after an error the monitor is stuck, and /healthz reports it
		sendStatus(out, now)
		s.options.Counters.send(out, now)
	}
	if s.options.PCIGPUs != nil {
		own, away := s.options.PCIGPUs()
		pciGPUs.send(out, float64(own))
		pciGPUsGivenAway.send(out, float64(away))
	}
	if s.options.GPUs != nil {
		s.options.GPUs.send(out)
	}
	return out
}
