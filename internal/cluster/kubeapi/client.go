// Package kubeapi talks to the API server about the node that this program runs on, and about no
// other: it watches the Node, and writes the Events, labels, conditions, taints and slices of its
// GPUs. It is the only home of client-go, of which it takes the transport alone: the typed clients
// bring the types of all APIs with them, and make the program 16 MB larger.
//
// Nothing between the driver and kubelet waits for it.
package kubeapi

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// Options say who talks to which API server.
type Options struct {
	// Kubeconfig is a file with the address and the credentials; empty for those of the pod's service
	// account.
	Kubeconfig string
	// Node is the name of the node.
	Node string
	// Version is that of the program.
	Version string
	// Dial opens connections to the API server; nil for TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

const (
	// requestTimeout bounds a request, but for a watch. An API server that takes 10 s for an answer is
	// slow, not away.
	requestTimeout = 30 * time.Second
	// All requests of a node together.
	requestsPerSecond = 5
	requestBurst      = 10
	// maxAnswer is the largest answer that is read. A Node has about 20 kB.
	maxAnswer = 4 << 20
)

// A Client talks to the API server. Make it with New.
type Client struct {
	options Options
	node    string
	limiter flowcontrol.RateLimiter
	nodes   *feed.Feed[Node]
	problem *feed.Feed[error]
	back    *feed.Feed[struct{}] // published when the watch works again

	mu         sync.Mutex // guards all following fields
	connection *connection
	requested  func(verb, resource string, code int)
	fence      func() error // nil for none
	newest     Node         // that the API server has told of
	// resourceVersion is the index of the version of resource.k8s.io that was served last.
	resourceVersion int
}

// A connection is an address and the credentials for it.
type connection struct {
	base   *url.URL
	client *http.Client
}

// New returns a Client. The API server is looked for when it is asked first.
func New(o Options) *Client {
	return &Client{
		options: o, node: o.Node, limiter: flowcontrol.NewTokenBucketRateLimiter(requestsPerSecond, requestBurst),
		nodes: feed.New(Node{}), problem: feed.New[error](nil), back: feed.New(struct{}{}),
	}
}

// Count sets the function that is called for each request from now on. The code is that of the HTTP
// answer; 0 if there was none.
func (c *Client) Count(requested func(verb, resource string, code int)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requested = requested
}

// Fence has no request change anything for which check returns an error. That is the error of the
// request then.
func (c *Client) Fence(check func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fence = check
}

// count counts a request.
func (c *Client) count(r request, code int) {
	c.mu.Lock()
	requested := c.requested
	c.mu.Unlock()
	if requested == nil {
		return
	}
	verb, resource := r.verb, "nodes"
	if r.query.Get("watch") != "" {
		verb = "WATCH"
	}
	switch {
	case strings.HasPrefix(r.path, "/apis/events.k8s.io/"):
		resource = "events"
	case strings.HasPrefix(r.path, "/apis/nfd.k8s-sigs.io/"):
		resource = "nodefeatures"
	case strings.Contains(r.path, "/resourceslices"):
		resource = "resourceslices"
	case strings.Contains(r.path, "/resourceclaims"):
		resource = "resourceclaims"
	case strings.HasSuffix(r.path, "/eviction"):
		resource = "pods/eviction"
	case strings.HasPrefix(r.path, "/api/v1/namespaces/"), r.path == "/api/v1/pods":
		resource = "pods"
	case strings.HasSuffix(r.path, "/status"):
		resource = "nodes/status"
	}
	requested(verb, resource, code)
}

// connect returns the connection. Address and credentials are read again after a request that they
// may have been the reason for.
func (c *Client) connect() (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connection != nil {
		return c.connection, nil
	}
	config, err := rest.InClusterConfig()
	if c.options.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", c.options.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	config.Dial = c.options.Dial
	config.UserAgent = "gpu-node-agent/" + c.options.Version
	// A watch and a write have a TCP connection each, so that one that is stuck does not keep the
	// other.
	config.NextProtos = []string{"http/1.1"}
	// With the content in the place of the name, a file that has changed is another configuration for
	// client-go's cache of transports.
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("read the certificates of the API server: %w", err)
	}
	config.CAFile, config.CertFile, config.KeyFile = "", "", ""
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	resumeTLS(client)
	// The token is for the API server alone.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.connection = &connection{base: base, client: client}
	return c.connection, nil
}

// sessions guards the settings of transports, which client-go shares among clients of the same
// configuration.
var sessions sync.Mutex

// resumeTLS has all connections but the first begin with the TLS session of an earlier one: the API
// server signs nothing for them, which is the most that a connection costs it.
func resumeTLS(client *http.Client) {
	settings, err := utilnet.TLSClientConfig(client.Transport)
	if err != nil || settings == nil {
		return // no TLS
	}
	sessions.Lock()
	defer sessions.Unlock()
	if settings.ClientSessionCache == nil {
		settings.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	}
}

// forget has address and credentials read again for the next request.
func (c *Client) forget(old *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connection == old {
		c.connection = nil
		old.client.CloseIdleConnections()
	}
}

// A request is one to the API server.
type request struct {
	verb        string // such as PATCH
	path        string // such as /api/v1/nodes/a/status
	query       url.Values
	contentType string // of the body
	accept      string // the media type of the answer; empty for JSON
	body        []byte
	most        int64 // bytes of the answer; 0 for maxAnswer
	urgent      bool  // is not counted among those that are limited
}

// Refused is the error of a request that the API server answered, but not with success.
type Refused struct {
	// Code is the HTTP status, Reason Kubernetes' own, such as AlreadyExists; it may be empty.
	Code   int
	Reason string
	// Message is a sentence for people.
	Message string
	// RetryAfter is how long to wait before the next request; 0 if the answer does not say so.
	RetryAfter time.Duration
	// Conflicts are the fields that another program owns, of an apply.
	Conflicts []FieldConflict
	// Unknown says that the API server does not know the version that was asked for: it is behind, or
	// has begun anew.
	Unknown bool
}

// FieldConflict is a field that another program owns, and a sentence about that.
type FieldConflict struct{ Field, Message string }

func (r *Refused) Error() string {
	if r.Message == "" {
		return fmt.Sprintf("the API server answered %d %s", r.Code, http.StatusText(r.Code))
	}
	return fmt.Sprintf("the API server answered %d: %s", r.Code, r.Message)
}

// IsCode reports whether err is of a request that the API server answered with this HTTP status.
func IsCode(err error, code int) bool {
	var refused *Refused
	return errors.As(err, &refused) && refused.Code == code
}

// IsForbidden reports whether err is of a request that this program has no right to.
func IsForbidden(err error) bool { return IsCode(err, http.StatusForbidden) }

// IsNotFound reports whether err is of a request for an object that the API server does not have,
// or for an API that it does not serve.
func IsNotFound(err error) bool { return IsCode(err, http.StatusNotFound) }

// IsWrong reports whether err is of a request that the API server never takes as it is.
func IsWrong(err error) bool {
	return IsCode(err, http.StatusBadRequest) || IsCode(err, http.StatusUnprocessableEntity)
}

// IsBusy reports whether err is of a request that the API server refused because it has too much to
// do.
func IsBusy(err error) bool { return IsCode(err, http.StatusTooManyRequests) }

// IsPassing reports whether err is of a request that may be taken as it is at another time: there
// was no answer, or one that says so.
func IsPassing(err error) bool {
	var refused *Refused
	if !errors.As(err, &refused) {
		return err != nil
	}
	switch refused.Code {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// send sends a request once, and returns the answer's body. The error has a *Refused in it, or says
// why there was no answer.
func (c *Client) send(ctx context.Context, r request) ([]byte, error) {
	_, back := c.back.Latest()
	answer, err := c.ask(ctx, r)
	if isAway(err) {
		return nil, &awayError{err, back}
	}
	return answer, err
}

func (c *Client) ask(ctx context.Context, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	body, err := c.open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	most := cmp.Or(r.most, maxAnswer)
	answer, err := io.ReadAll(io.LimitReader(body, most+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	case int64(len(answer)) > most:
		return nil, fmt.Errorf("the answer of the API server has more than %d bytes", most)
	}
	return answer, nil
}

// open sends a request once, and returns the body of an answer that says success.
func (c *Client) open(ctx context.Context, r request) (io.ReadCloser, error) {
	if !r.urgent {
		if err := c.limiter.Wait(ctx); err != nil {
			return nil, fmt.Errorf("wait to ask the API server: %w", err)
		}
	}
	connection, err := c.connect()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	fence := c.fence
	c.mu.Unlock()
	if fence != nil && r.verb != http.MethodGet {
		if err := fence(); err != nil {
			return nil, err
		}
	}
	address := *connection.base
	address.Path = strings.TrimSuffix(address.Path, "/") + r.path
	address.RawQuery = r.query.Encode()
	sent, err := http.NewRequestWithContext(ctx, r.verb, address.String(), bytes.NewReader(r.body))
	if err != nil {
		return nil, fmt.Errorf("ask the API server: %w", err)
	}
	sent.Header.Set("Accept", cmp.Or(r.accept, "application/json"))
	if r.contentType != "" {
		sent.Header.Set("Content-Type", r.contentType)
	}
	answer, err := connection.client.Do(sent)
	if err != nil {
		c.count(r, 0)
		if isCertificate(err) {
			c.forget(connection)
		}
		return nil, fmt.Errorf("ask the API server: %w", err)
	}
	c.count(r, answer.StatusCode)
	if answer.StatusCode < http.StatusMultipleChoices {
		return answer.Body, nil
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusUnauthorized {
		c.forget(connection)
	}
	return nil, refused(answer)
}

// isCertificate reports whether an error is about the certificate of the API server.
func isCertificate(err error) bool {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &unknown) || errors.As(err, &invalid)
}

// maxRetryAfter is the longest time that an answer can have a node wait.
const maxRetryAfter = 10 * time.Minute

// maxMessage is how many bytes of a message are kept.
const maxMessage = 300

// refused returns the error of an answer that does not say success.
func refused(answer *http.Response) error {
	r := &Refused{Code: answer.StatusCode}
	if seconds, err := strconv.Atoi(answer.Header.Get("Retry-After")); err == nil && seconds > 0 {
		r.RetryAfter = min(time.Duration(seconds)*time.Second, maxRetryAfter)
	}
	var s struct {
		Kind, Reason, Message string
		Details               struct {
			Causes []struct{ Reason, Field, Message string }
		}
	}
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if status := fieldOf(bytes.TrimPrefix(text, []byte(protobufPrefix)),
		unknownRaw); answer.Header.Get("Content-Type") == protobuf {
		r.Reason, r.Message = textOf(status, statusReason), shortened(textOf(status, statusMessage))
		return r
	}
	if err == nil && json.Unmarshal(text, &s) == nil && s.Kind == "Status" {
		for _, cause := range s.Details.Causes {
			switch cause.Reason {
			case "FieldManagerConflict":
				r.Conflicts = append(r.Conflicts, FieldConflict{cause.Field, cause.Message})
			case "ResourceVersionTooLarge":
				r.Unknown = true
			}
		}
		r.Reason, r.Message = s.Reason, shortened(s.Message)
	}
	return r
}

func shortened(message string) string {
	return strings.ToValidUTF8(message[:min(len(message), maxMessage)], "")
}
