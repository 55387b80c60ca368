// Package driverfetch downloads archives of driver folders for gpu-driver, and goes on with a download
// after an interruption. Only the digest of an archive decides whether it is the wanted one. Only
// gpu-driver links the package.
package driverfetch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

const (
	// partialSuffix is the end of the name of an archive that is being downloaded: SHA256.partial.
	partialSuffix = ".partial"
	// maxAge is how long the part of an archive stays that nobody asks for.
	maxAge = 24 * time.Hour
	// maxArchive limits an archive, in bytes. The archive of a driver has about 400 MB.
	maxArchive = 8 << 30
)

// Options are the parameters of a Fetcher. Zero durations mean the usual ones.
type Options struct {
	// Directory is where a partial archive is. Only root may be able to write to it.
	Directory string
	// From are the URLs below which archives are. There is at least one.
	From []string
	// Root is where the node's root file system is, which has the certificates of servers. CAFile is a
	// path of the node with more certificates; empty for none.
	Root, CAFile string
	// Placed are the digests of the archives whose folders are there.
	Placed []string
	// Unpack places the folder of a whole archive.
	Unpack func(ctx context.Context, archive *os.File, sha256 string, progress func(percent int)) error
	// Stall is how long a server may send nothing, or almost nothing.
	Stall time.Duration
	// Pause is the time before another try. It doubles up to twenty times this. LongPause is the time
	// after an answer that another try does not change, such as one with another digest.
	Pause, LongPause time.Duration
	// AskedFor is how long an archive is downloaded after the last call of Ask.
	AskedFor time.Duration
}

// A Fetcher downloads one archive at a time.
type Fetcher struct {
	o    Options
	from []*url.URL
	wake chan struct{} // holds a value if there is something to do
	// isWhole is true if the part on the disk may be a whole archive: at the start of this process, and
	// while the archive cannot be unpacked. Run alone uses it.
	isWhole bool

	mu     sync.Mutex // guards the fields below
	now    driverapi.Download
	source string             // URL; empty if nothing was asked for
	asked  time.Time          // of the last call of Ask
	end    context.CancelFunc // ends the present try; nil between tries
}

// New returns a Fetcher. It removes the parts of archives that nobody has asked for lately, and those of
// archives that are placed. The error says what is wrong with Options.From.
func New(o Options) (*Fetcher, error) {
	o.Stall = cmp.Or(o.Stall, time.Minute)
	o.Pause = cmp.Or(o.Pause, 3*time.Second)
	o.LongPause = cmp.Or(o.LongPause, 10*time.Minute)
	o.AskedFor = cmp.Or(o.AskedFor, 2*time.Minute)
	f := &Fetcher{o: o, wake: make(chan struct{}, 1), isWhole: true}
	for _, text := range o.From {
		u, err := parse(text)
		if err != nil {
			return nil, err
		}
		f.from = append(f.from, u)
	}
	err := f.removeParts(func(archive string, info fs.FileInfo) bool {
		return time.Since(info.ModTime()) > maxAge || slices.Contains(o.Placed, archive)
	})
	return f, err
}

// parse returns a URL of an archive, or the beginning of one.
func parse(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("a URL of drivers cannot be read: %w", errors.Unwrap(err))
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return nil, fmt.Errorf("%.200q is not a URL that begins with https:// or http://", Shown(text))
	case u.User != nil:
		return nil, fmt.Errorf("the URL %.200q has a user or a password: use a server that needs none; the digest "+
			"says whether the file is the right one", Shown(text))
	}
	u.Path = cmp.Or(u.Path, "/")
	return u, nil
}

// Shown returns a URL without its query, user and fragment, which may be secret.
func Shown(source string) string {
	u, err := url.Parse(source)
	if err != nil {
		return "a URL that cannot be read"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// mayFetch returns an error unless a URL is below one of Options.From.
func (f *Fetcher) mayFetch(source string) error {
	u, err := parse(source)
	if err != nil {
		return err
	}
	for _, from := range f.from {
		folder := strings.TrimSuffix(from.Path, "/") + "/"
		isBelow := strings.HasPrefix(u.Path, folder) || u.Path == from.Path
		if u.Scheme == from.Scheme && strings.EqualFold(u.Host, from.Host) && isBelow && path.Clean(u.Path) == u.Path {
			return nil
		}
	}
	return fmt.Errorf("%s is not below the URLs of --download-from (%s): add its folder there, in the chart with "+
		"driver.downloadFrom", Shown(source), strings.Join(f.o.From, ", "))
}

// Ask lets the Fetcher download an archive, by its URL and its digest in hexadecimal. A call with the
// archive of the call before keeps the download going, which ends some time after the last call: see
// Options.AskedFor. Another archive takes the place of the one before.
func (f *Fetcher) Ask(source, archive string) error {
	if !driverfolder.IsDigest(archive) {
		return fmt.Errorf("%.80q is not a SHA-256 digest in hexadecimal", archive)
	}
	if err := f.mayFetch(source); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = time.Now()
	if f.source == source && f.now.Archive == archive {
		return nil
	}
	f.source = source
	f.now = driverapi.Download{Archive: archive, Source: Shown(source), Since: time.Now().UTC().Truncate(time.Second)}
	if f.end != nil {
		f.end()
	}
	f.wakeUp()
	return nil
}

func (f *Fetcher) wakeUp() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Status returns the progress; nil if nothing is asked for.
func (f *Fetcher) Status() *driverapi.Download {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.source == "" {
		return nil
	}
	now := f.now
	return &now
}

// Run downloads until ctx ends.
func (f *Fetcher) Run(ctx context.Context) {
	failures := 0
	for last := ""; ctx.Err() == nil; {
		pause := time.Duration(-1) // until somebody asks
		if source, archive, try := f.begin(ctx); source != "" {
			if archive != last {
				last, failures = archive, 0
			}
			err := f.fetch(try, source, archive)
			pause = f.ended(ctx, try, source, archive, err, failures)
			if failures++; err == nil {
				failures = 0
			}
		}
		var again <-chan time.Time
		if pause >= 0 {
			again = time.After(pause)
		}
		select {
		case <-ctx.Done():
		case <-f.wake:
		case <-again:
		}
	}
}

// begin returns what is asked for, and the context of a try; an empty source for nothing.
func (f *Fetcher) begin(ctx context.Context) (source, archive string, try context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.wake: // for what is begun now
	default:
	}
	if time.Since(f.asked) > f.o.AskedFor {
		f.source = ""
	}
	if f.source == "" {
		return "", "", nil
	}
	try, f.end = context.WithCancel(ctx)
	return f.source, f.now.Archive, try
}

// ended returns the pause after a try, which is negative if nothing is left to do.
func (f *Fetcher) ended(ctx, try context.Context, source, archive string, err error, failures int) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	wasEnded := try.Err() != nil || time.Since(f.asked) > f.o.AskedFor
	f.end()
	f.end = nil
	switch {
	case f.source != source || f.now.Archive != archive: // another one is asked for
		return 0
	case err == nil:
		klog.FromContext(ctx).Info("The archive of a driver is downloaded and unpacked", "source", f.now.Source,
			"archive", archive)
		f.source = ""
		return -1
	case wasEnded: // this program ends, or nobody asks any more
		f.source = ""
		return -1
	}
	if f.now.Problem != err.Error() {
		klog.FromContext(ctx).Error(err, "The archive of a driver is not downloaded; it is tried again",
			"source", f.now.Source, "archive", archive)
	}
	f.now.Problem = err.Error()
	const doublings, most = 5, 20
	f.now.IsFinal = isFinal(err)
	switch {
	case errors.Is(err, errDigest): // each try downloads the whole file
		return f.o.LongPause << min(failures, doublings)
	case f.now.IsFinal:
		return f.o.LongPause
	}
	return min(f.o.Pause<<min(failures, doublings), most*f.o.Pause)
}

// A final error is one that another try does not change, unless somebody does something.
type final struct{ error }

func (e final) Unwrap() error { return e.error }

func isFinal(err error) bool { return errors.As(err, new(final)) }

// errDigest is wrapped by the error for a file that is not the archive.
var errDigest = errors.New("correct driver.source or driver.sha256")

// fetch downloads an archive, goes on with a part that is there, and unpacks the archive.
func (f *Fetcher) fetch(ctx context.Context, source, archive string) error {
	if err := f.removeParts(func(other string, _ fs.FileInfo) bool { return other != archive }); err != nil {
		return final{err}
	}
	name := f.part(archive)
	part, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return final{err}
	}
	defer func() { _ = part.Close() }() // its digest is compared whenever it is used
	info, err := part.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return final{errors.Join(fmt.Errorf("%s is not a file: remove it", name), err)}
	}
	had := info.Size()
	found := ""
	if f.isWhole && had > 0 {
		if found, err = digest(ctx, part); err != nil {
			return err
		}
	}
	f.isWhole = false
	if found != archive {
		isResumed, err := f.download(ctx, source, part, had)
		var onDisk *fs.PathError
		switch {
		case err == nil:
		case !isFinal(err) && errors.As(err, &onDisk): // such as a full disk, which others need
			return final{errors.Join(err, os.Remove(name))}
		default:
			return err
		}
		if found, err = digest(ctx, part); err != nil {
			return err
		}
		if found != archive {
			if isResumed { // perhaps of two files that the server had one after the other
				err := fmt.Errorf("the file has the digest sha256:%s: it is downloaded again", found)
				return errors.Join(err, os.Remove(name))
			}
			err := fmt.Errorf("the file has the digest sha256:%s, and not sha256:%s: %w", found, archive, errDigest)
			return final{errors.Join(err, os.Remove(name))}
		}
	}
	if _, err := part.Seek(0, io.SeekStart); err != nil {
		return err
	}
	f.isWhole = true
	err = f.o.Unpack(ctx, part, archive, func(percent int) { f.progress(downloaded + percent*(100-downloaded)/100) })
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil: // such as a .run file, or no space: the next try needs no download
		return final{err}
	}
	return os.Remove(name)
}

// downloaded is the percentage of the progress at the end of the download.
const downloaded = 90

func (f *Fetcher) part(archive string) string {
	return filepath.Join(f.o.Directory, archive+partialSuffix)
}

// progress tells how much is done.
func (f *Fetcher) progress(percent int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now.Percent = percent
}

// count tells how many bytes of the archive are there; total is 0 if it is not known. A try that makes
// progress has no problem.
func (f *Fetcher) count(done, total int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now.Done, f.now.Total = done, total
	f.now.Problem, f.now.IsFinal = "", false
	f.now.Percent = 0
	if total > 0 {
		f.now.Percent = int(min(done, total) * downloaded / total)
	}
}

// isAsked reports whether the archive is still wanted.
func (f *Fetcher) isAsked() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Since(f.asked) <= f.o.AskedFor
}

// removeParts removes parts of archives, by the digests of the archives and the files.
func (f *Fetcher) removeParts(remove func(archive string, info fs.FileInfo) bool) error {
	entries, err := os.ReadDir(f.o.Directory)
	if err != nil {
		return err
	}
	for _, e := range entries {
		archive, isPart := strings.CutSuffix(e.Name(), partialSuffix)
		if !isPart || !driverfolder.IsDigest(archive) {
			continue
		}
		if info, err := e.Info(); err == nil && remove(archive, info) {
			if err := os.Remove(filepath.Join(f.o.Directory, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// digest returns the SHA-256 digest of a file in hexadecimal.
func digest(ctx context.Context, file *os.File) (string, error) {
	hash := sha256.New()
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	_, err := io.Copy(hash, readerFunc(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return file.Read(p)
	}))
	return hex.EncodeToString(hash.Sum(nil)), err
}

type readerFunc func([]byte) (int, error)

func (r readerFunc) Read(p []byte) (int, error) { return r(p) }
