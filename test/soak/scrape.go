package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// maxScrape is how long a daemon may take to answer a scrape or a probe, whatever its driver does.
const maxScrape = time.Second

// scrape returns the answer of a daemon to a GET.
func (s *stage) scrape(ctx context.Context, n *node.Node, path string) (string, error) {
	s.mu.Lock()
	at := s.metrics[n]
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, maxScrape*s.options.slack)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at+path, http.NoBody)
	if err != nil {
		return "", err
	}
	request.Close = true
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.200s", answer.Status, text)
	}
	return string(text), err
}

// scrapes asks each daemon over HTTP. It has to answer in time, whatever hangs.
func (s *stage) scrapes(ctx context.Context) error {
	s.note("scrapes")
	for _, n := range s.running() {
		for _, path := range []string{"/metrics", "/healthz", "/readyz"} {
			began := time.Now()
			text, err := s.scrape(ctx, n, path)
			if err != nil && ctx.Err() == nil {
				s.violate("%s was answered with %v after %s", path, err, short(time.Since(began)))
			}
			if path == "/metrics" && !strings.Contains(text, "# TYPE") {
				s.violate("a scrape has no metrics: %.200s", text)
			}
			s.slowest(time.Since(began))
		}
	}
	return nil
}

// slowest remembers the slowest answer to a scrape, in milliseconds.
func (s *stage) slowest(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts["scrapes"]++
	s.counts["slowest scrape in ms"] = max(s.counts["slowest scrape in ms"], int(took.Milliseconds()))
}
