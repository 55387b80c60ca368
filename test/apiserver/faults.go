package apiserver

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Request is a kind of request.
type Request struct {
	Verb     string // get, list, watch, create, update, patch, apply for a server-side apply, or delete
	Resource string // such as nodes or nodes/status
}

// IsWrite says whether requests of this kind change objects.
func (r Request) IsWrite() bool {
	return slices.Contains([]string{"create", "update", "patch", "apply", "delete"}, r.Verb)
}

// Fault is how requests are answered. The zero value answers them rightly.
type Fault struct {
	// Status, unless 0, is the HTTP status of each answer: 401, 403, 409, 410, 429, 500 or 503.
	Status int
	// Late says that a write with a bad Status is carried out all the same, as one whose answer was
	// lost.
	Late bool
	// RetryAfter, unless 0, is what an answer with Status tells the client to wait. It is sent in
	// whole seconds.
	RetryAfter time.Duration
	// Delay is how long each answer takes, at most until another fault is set.
	Delay time.Duration
	// Only says which requests have the fault; nil stands for all of them.
	Only func(Request) bool
	// Path is a part of the path or query of the requests that have the fault, such as "/pods/a"; empty
	// for any request.
	Path string
}

// SetFault sets how requests are answered from now on. Watches that are open go on.
func (s *Server) SetFault(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
	close(s.over)
	s.over = make(chan struct{})
}

// SetBlackHole says whether the bytes of all connections, new ones too, are held back.
func (s *Server) SetBlackHole(open bool) {
	if open {
		s.hole.open()
		return
	}
	s.hole.release()
}

// SetSkew sets how far the server's clock is ahead, as its answers say. It may be negative.
func (s *Server) SetSkew(skew time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.skew = skew
}

// SetNodeFeaturesServed says whether the cluster has the NodeFeature resource.
func (s *Server) SetNodeFeaturesServed(served bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noFeatures = !served
}

// DropWatches ends all watches, as the server does from time to time.
func (s *Server) DropWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.watches)
	s.watches = make(chan struct{})
}

// Expire forgets the history and ends all watches: a watch that goes on from a resource version of
// before gets 410 Gone.
func (s *Server) Expire() {
	s.store.compact()
	s.DropWatches()
}

// Restore has the resource versions begin again, as those of a cluster that was restored from a
// backup, and ends all watches: one that goes on from a version of before is silent until that is
// reached.
func (s *Server) Restore() error {
	err := s.store.restore()
	s.DropWatches()
	return err
}

// SendBookmark raises the resource version, as a change of some other object does, and sends it to
// all watches that take bookmarks.
func (s *Server) SendBookmark() { s.store.bookmark() }

// Requests returns how many requests came of each kind, those that were refused too. A request
// without the right token is one of them.
func (s *Server) Requests() map[Request]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

// LatestLists returns how many lists of a resource were to be the latest. With an etcd before
// 3.4.25 such a one reads all objects of the resource.
func (s *Server) LatestLists(resource string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.latest[resource]
}

// Writes returns how many requests came that change objects.
func (s *Server) Writes() int {
	n := 0
	for request, count := range s.Requests() {
		if request.IsWrite() {
			n += count
		}
	}
	return n
}

// A NamedFault is something that the server, or the network before it, can do wrong. Begin and End
// are called once each, in turn; all may be played again.
type NamedFault struct {
	Name  string
	Begin func(*Server) error
	End   func(*Server) error
	// Passes says that the fault is over by itself: clients can go on before End.
	Passes bool
}

// Faults returns all faults that a client must live with.
func Faults() []NamedFault {
	answer := func(name string, f Fault) NamedFault {
		return NamedFault{
			Name:  name,
			Begin: func(s *Server) error { s.SetFault(f); return nil },
			End:   func(s *Server) error { s.SetFault(Fault{}); return nil },
		}
	}
	nothing := func(*Server) error { return nil }
	return []NamedFault{
		{Name: "away", Begin: func(s *Server) error { s.Stop(); return nil }, End: (*Server).Resume},
		{
			Name:  "black hole",
			Begin: func(s *Server) error { s.SetBlackHole(true); return nil },
			End:   func(s *Server) error { s.SetBlackHole(false); return nil },
		},
		answer("slow", Fault{Delay: 10 * time.Second}),
		answer("unauthorized", Fault{Status: http.StatusUnauthorized}),
		answer("forbidden", Fault{Status: http.StatusForbidden}),
		answer("conflict", Fault{Status: http.StatusConflict, Only: Request.IsWrite}),
		answer("too many requests", Fault{Status: http.StatusTooManyRequests, RetryAfter: time.Second}),
		answer("internal error", Fault{Status: http.StatusInternalServerError}),
		{Name: "watch dropped", Begin: func(s *Server) error { s.DropWatches(); return nil }, End: nothing, Passes: true},
		{Name: "gone", Begin: func(s *Server) error { s.Expire(); return nil }, End: nothing, Passes: true},
		{Name: "token rotated", Begin: (*Server).RotateToken, End: nothing, Passes: true},
		{Name: "CA replaced", Begin: (*Server).ReplaceCA, End: (*Server).PublishCA},
		{
			Name:   "clock skewed",
			Begin:  func(s *Server) error { s.SetSkew(-6 * time.Hour); s.DropWatches(); return nil },
			End:    func(s *Server) error { s.SetSkew(0); return nil },
			Passes: true,
		},
	}
}

// admit counts a request and plays the fault. It returns the error to answer with, or nil, and
// whether a write is carried out all the same.
func (s *Server) admit(w http.ResponseWriter, r *http.Request, request Request) (refused *apierrors.StatusError,
	late bool) {
	s.mu.Lock()
	s.counts[request]++
	fault, skew, token, over := s.fault, s.skew, s.token, s.over
	s.mu.Unlock()
	w.Header().Set("Date", time.Now().Add(skew).UTC().Format(http.TimeFormat))
	if fault.Only != nil && !fault.Only(request) || !strings.Contains(r.RequestURI, fault.Path) {
		fault = Fault{}
	}
	if fault.Delay > 0 {
		timer := time.NewTimer(fault.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-over:
		case <-r.Context().Done():
		}
	}
	if fault.Status == 0 && r.Header.Get("Authorization") != "Bearer "+token {
		return apierrors.NewUnauthorized("Unauthorized"), false
	}
	if fault.Status == 0 {
		return nil, false
	}
	resource, _, _ := strings.Cut(request.Resource, "/")
	answer := apierrors.NewGenericServerResponse(fault.Status, request.Verb, schema.GroupResource{Resource: resource}, "",
		fmt.Sprintf("the stand-in answers %d", fault.Status), 0, false)
	if fault.Status == http.StatusGone {
		answer = apierrors.NewResourceExpired("the stand-in answers 410")
	}
	if fault.RetryAfter > 0 {
		seconds := int32(fault.RetryAfter.Seconds())
		w.Header().Set("Retry-After", strconv.Itoa(int(seconds)))
		answer.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: seconds}
	}
	return answer, fault.Late
}
