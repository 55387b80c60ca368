package driverfetch

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	connectTimeout = 30 * time.Second
	maxRedirects   = 10
	maxHead        = 64 << 10 // bytes of the head of an answer
	maxBundle      = 16 << 20 // bytes of a file with certificates
	// minBytes is what a server must send within Options.Stall.
	minBytes = 64 << 10
)

// download downloads an archive to part, which has bytes of it already, and reports whether it has used
// them. A part that a server does not go on with is downloaded again.
func (f *Fetcher) download(ctx context.Context, source string, part *os.File, had int64) (isResumed bool, err error) {
	client, err := f.client()
	if err != nil {
		return false, err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var received atomic.Int64
	go f.watch(ctx, stop, &received)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, source, http.NoBody)
	if err != nil {
		return false, final{withoutURL(err)}
	}
	request.Header.Set("Accept-Encoding", "identity") // the digest is that of the file
	if had > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", had))
	}
	answer, err := client.Do(request)
	if isUnknown := errors.As(err, new(*tls.CertificateVerificationError)); isUnknown {
		return false, final{fmt.Errorf("%w; --ca-file, in the chart driver.caFile, names a file of the node with more "+
			"certificates", withoutURL(err))}
	}
	if err != nil {
		return false, cause(ctx, withoutURL(err))
	}
	defer func() { _ = answer.Body.Close() }() // only read
	var at, total int64
	switch answer.StatusCode {
	case http.StatusOK:
		total = max(answer.ContentLength, 0)
	case http.StatusPartialContent:
		var first, last int64
		at = had
		text := answer.Header.Get("Content-Range")
		if n, _ := fmt.Sscanf(text, "bytes %d-%d/%d", &first, &last, &total); n < 2 || first != had || had == 0 {
			err := fmt.Errorf("the server was asked for the bytes from %d on, and sends %.80q", had, text)
			return false, restart(part, err)
		}
	case http.StatusRequestedRangeNotSatisfiable:
		return false, restart(part, errors.New("the server has a shorter file than before"))
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false, fmt.Errorf("the server answers %s", answer.Status)
	default:
		err := fmt.Errorf("the server answers %.100s", answer.Status)
		if answer.StatusCode >= http.StatusInternalServerError {
			return false, err
		}
		return false, final{err}
	}
	if err := f.hasSpace(at, total); err != nil {
		return false, final{err}
	}
	if err := part.Truncate(at); err != nil {
		return false, err
	}
	if _, err := part.Seek(at, io.SeekStart); err != nil {
		return false, err
	}
	done := at
	f.count(done, total)
	_, err = io.Copy(part, readerFunc(func(p []byte) (int, error) {
		n, err := answer.Body.Read(p)
		received.Add(int64(n))
		if done += int64(n); done > maxArchive {
			return 0, final{errTooLarge}
		}
		f.count(done, total)
		return n, err
	}))
	if err == nil && total > 0 && done != total {
		err = fmt.Errorf("the answer ended after %d of %d bytes", done, total)
	}
	return at > 0, cause(ctx, withoutURL(err))
}

var errTooLarge = fmt.Errorf("the file has more than %d GB", int64(maxArchive)>>30)

// restart empties the part, so that the next try downloads the archive from its beginning.
func restart(part *os.File, err error) error { return errors.Join(err, part.Truncate(0)) }

// client returns a client with the certificates that the node has now.
func (f *Fetcher) client() (*http.Client, error) {
	roots, err := f.certificates()
	if err != nil {
		return nil, final{err}
	}
	transport := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: connectTimeout}).DialContext,
		TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    connectTimeout,
		ResponseHeaderTimeout:  f.o.Stall,
		MaxResponseHeaderBytes: maxHead,
		DisableCompression:     true,
		DisableKeepAlives:      true,
	}
	return &http.Client{Transport: transport, CheckRedirect: func(next *http.Request, before []*http.Request) error {
		switch {
		case next.URL.Scheme != "https" && before[0].URL.Scheme == "https":
			return final{fmt.Errorf("the server redirects from https to %s", Shown(next.URL.String()))}
		case next.URL.Scheme != "https" && next.URL.Scheme != "http":
			return final{fmt.Errorf("the server redirects to %s", Shown(next.URL.String()))}
		case len(before) >= maxRedirects:
			return final{fmt.Errorf("the server redirects more than %d times", maxRedirects)}
		}
		return nil
	}}, nil
}

// bundles are the files with the certificates of authorities, on the distributions that Go knows.
var bundles = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/ssl/ca-bundle.pem", "/etc/pki/tls/cacert.pem", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/cert.pem"}

// certificates returns the certificates of the node's authorities and those of Options.CAFile. The image
// of gpu-driver has none.
func (f *Fetcher) certificates() (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	for _, name := range bundles {
		if f.addCertificates(pool, name) == nil {
			break
		}
	}
	if f.o.CAFile != "" {
		if err := f.addCertificates(pool, f.o.CAFile); err != nil {
			return nil, fmt.Errorf("--ca-file: %w", err)
		}
	}
	return pool, nil
}

func (f *Fetcher) addCertificates(pool *x509.CertPool, name string) error {
	at, err := driverroot.ResolveIn(f.o.Root, name)
	if err != nil {
		return err
	}
	text, err := statefile.Read(at, maxBundle)
	if err == nil && !pool.AppendCertsFromPEM(text) {
		err = fmt.Errorf("%s has no certificate in the form PEM", name)
	}
	return err
}

// hasSpace returns an error if the disk has no space for the rest of an archive and for its files, which
// need at least as much.
func (f *Fetcher) hasSpace(done, total int64) error {
	if total > maxArchive {
		return errTooLarge
	}
	var free unix.Statfs_t
	if err := unix.Statfs(f.o.Directory, &free); err != nil {
		return err
	}
	if has, needs := free.Bavail*uint64(free.Bsize), uint64(total-min(done, total)+total); has < needs {
		return fmt.Errorf("%s has %d MB free, and the archive and its files need at least %d MB: free some space",
			f.o.Directory, has/1_000_000, needs/1_000_000+1)
	}
	return nil
}

// errStalled is why a download is ended that makes no progress.
var errStalled = errors.New("the server sends nothing, or almost nothing")

// watch ends a download that makes no progress, and one that nobody wants any more.
func (f *Fetcher) watch(ctx context.Context, stop context.CancelCauseFunc, received *atomic.Int64) {
	ticks := time.NewTicker(f.o.Stall)
	defer ticks.Stop()
	for last := int64(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		now := received.Load()
		if now-last < minBytes {
			stop(fmt.Errorf("%w for %v", errStalled, f.o.Stall))
			return
		}
		if last = now; !f.isAsked() {
			stop(nil)
			return
		}
	}
}

// cause returns why watch has ended a download, or else the error.
func cause(ctx context.Context, err error) error {
	if stalled := context.Cause(ctx); err != nil && errors.Is(stalled, errStalled) {
		return stalled
	}
	return err
}

// withoutURL returns an error of package http without the URL, whose query may be secret.
func withoutURL(err error) error {
	var at *url.Error
	if errors.As(err, &at) {
		return at.Err
	}
	return err
}
