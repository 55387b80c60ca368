package telemetry

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
)

// statusTimeout is how long a scrape waits for the daemon's status, which is in memory.
const statusTimeout = time.Second

// metrics answers a scrape with what is known now. Nothing is kept from one scrape to the next.
func (s *Exporter) metrics(w http.ResponseWriter, r *http.Request) {
	select {
	case s.scrapes <- struct{}{}:
		defer func() { <-s.scrapes }()
	default:
		answer(w, http.StatusServiceUnavailable, "too many scrapes at a time")
		return
	}
	format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultOpenMetricsAcceptedFormats()...)
	w.Header().Set("Content-Type", string(format))
	w.Header().Set("Vary", "Accept, Accept-Encoding")
	if !takesGzip(r.Header.Values("Accept-Encoding")) {
		_ = s.write(r.Context(), w, format) // the client is gone
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	zipped := gzips.Get().(*gzip.Writer)
	defer gzips.Put(zipped)
	zipped.Reset(w)
	if s.write(r.Context(), zipped, format) == nil {
		_ = zipped.Close() // as above
	}
}

// gzips are writers that can be used again. They compress quickly: the usual level takes three times as long, for a tenth less.
var gzips = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // the level is valid
	return w
}}

// takesGzip reports whether a client that accepts these encodings takes gzip: it names it, and not with the weight 0.
func takesGzip(accepted []string) bool {
	for offer := range strings.SplitSeq(strings.Join(accepted, ","), ",") {
		name, weight, weighted := strings.Cut(strings.ReplaceAll(offer, " ", ""), ";")
		if strings.EqualFold(name, "gzip") {
			return !weighted || strings.Trim(weight, "q=.0") != ""
		}
	}
	return false
}

// write writes all metrics in a format. An error means that the client is gone.
func (s *Exporter) write(ctx context.Context, out io.Writer, format expfmt.Format) error {
	others, _ := s.registry.Gather() // what it could not gather is absent
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

// page returns our own metrics as they are now.
func (s *Exporter) page(ctx context.Context) *page {
	out := &page{map[string]*family{}}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	if now, err := s.options.Status(ctx); err == nil { // otherwise the monitor is stuck, as /healthz says
		sendStatus(out, now)
		s.options.Counters.send(out, now)
	}
	if s.options.PCIGPUs != nil {
		pciGPUs.send(out, float64(s.options.PCIGPUs()))
	}
	if s.options.GPUs != nil {
		s.options.GPUs.send(out)
	}
	return out
}
