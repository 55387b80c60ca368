// Package kubeapi talks to the API server about the daemon's own node: it watches the Node, and
// writes the Events, labels, conditions, taints and slices of its GPUs. It is the only package that
// imports client-go, and uses only its transport: the typed clients include the types of all APIs,
// and would add 16 MB to the program.
//
// Nothing between the driver and the kubelet waits for this package.
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

// Options configure a Client.
type Options struct {
	// Kubeconfig is a file with the address and the credentials; empty for the pod's service account.
	Kubeconfig string
	// Node is the name of the node.
	Node string
	// Version is the version of the program.
	Version string
	// Dial opens connections to the API server; nil for TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

const (
	// requestTimeout limits a request other than a watch. An API server that responds after 10 s is
	// slow, but available.
	requestTimeout = 30 * time.Second
	// The rate limit of all requests of a node together.
	requestsPerSecond = 5
	requestBurst      = 10
	// maxResponse is the size limit of a response, in bytes. A Node has about 20 kB.
	maxResponse = 4 << 20
)

// A Client talks to the API server. Create it with New.
type Client struct {
	options       Options
	node          string
	limiter       flowcontrol.RateLimiter
	nodes         *feed.Feed[Node]
	problem       *feed.Feed[error]
	watchRestored *feed.Feed[struct{}] // published when the watch works again

	mu         sync.Mutex // guards all following fields
	connection *connection
	onRequest  func(verb, resource string, code int)
	fence      func() error // nil if there is none
	latest     Node         // newest version received from the API server
	// resourceVersion is the index of the last version of resource.k8s.io that was served.
	resourceVersion int
}

// A connection is the address of an API server, and a client with credentials for it.
type connection struct {
	base   *url.URL
	client *http.Client
}

// New returns a Client. The first request reads the address and the credentials.
func New(o Options) *Client {
	return &Client{
		options: o, node: o.Node, limiter: flowcontrol.NewTokenBucketRateLimiter(requestsPerSecond, requestBurst),
		nodes: feed.New(Node{}), problem: feed.New[error](nil), watchRestored: feed.New(struct{}{}),
	}
}

// Count sets the function that is called for each request from now on. The code is the HTTP status;
// 0 without a response.
func (c *Client) Count(onRequest func(verb, resource string, code int)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onRequest = onRequest
}

// Fence sets a check for requests that change something. If check returns an error, the request is
// not sent and returns this error.
func (c *Client) Fence(check func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fence = check
}

// count reports a request to the function of Count.
func (c *Client) count(r request, code int) {
	c.mu.Lock()
	onRequest := c.onRequest
	c.mu.Unlock()
	if onRequest == nil {
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
	case strings.HasPrefix(r.path, leasePath):
		resource = "leases"
	case strings.HasSuffix(r.path, "/eviction"):
		resource = "pods/eviction"
	case strings.HasPrefix(r.path, "/api/v1/namespaces/"), r.path == "/api/v1/pods":
		resource = "pods"
	case strings.HasSuffix(r.path, "/status"):
		resource = "nodes/status"
	}
	onRequest(verb, resource, code)
}

// connect returns the connection. It reads the address and the credentials again after a request
// that may have failed because of them.
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
	// A watch and a write use separate TCP connections, so that a stuck one does not block the other.
	config.NextProtos = []string{"http/1.1"}
	// With the content instead of the file name, a changed file is another configuration for
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
	// The token must not go to another server.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.connection = &connection{base: base, client: client}
	return c.connection, nil
}

// tlsMutex guards the settings of transports, which client-go shares among clients with the same
// configuration.
var tlsMutex sync.Mutex

// resumeTLS makes all connections but the first resume an earlier TLS session. The API server then
// signs nothing, and signing is the most expensive part of a connection.
func resumeTLS(client *http.Client) {
	settings, err := utilnet.TLSClientConfig(client.Transport)
	if err != nil || settings == nil {
		return // no TLS
	}
	tlsMutex.Lock()
	defer tlsMutex.Unlock()
	if settings.ClientSessionCache == nil {
		settings.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	}
}

// disconnect makes the next request read the address and the credentials again.
func (c *Client) disconnect(old *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connection == old {
		c.connection = nil
		old.client.CloseIdleConnections()
	}
}

// A request is a request to the API server.
type request struct {
	verb        string // for example PATCH
	path        string // for example /api/v1/nodes/a/status
	query       url.Values
	contentType string // of the body
	accept      string // media type of the response; empty for JSON
	body        []byte
	maxBytes    int64 // size limit of the response; 0 for maxResponse
	unlimited   bool  // bypasses the rate limit
}

// A StatusError is the error of a request to which the API server responded with a failure.
type StatusError struct {
	// Code is the HTTP status, and Reason Kubernetes' reason, for example AlreadyExists; it may be
	// empty.
	Code   int
	Reason string
	// Message is a sentence for users.
	Message string
	// RetryAfter is the requested delay before the next request; 0 if there is none.
	RetryAfter time.Duration
	// Conflicts are the fields of an apply that another program owns.
	Conflicts []FieldConflict
	// VersionUnknown says that the API server does not know the requested version, because it lags
	// behind or was restored from a backup.
	VersionUnknown bool
}

// FieldConflict is a field that another program owns, with the API server's message.
type FieldConflict struct{ Field, Message string }

func (r *StatusError) Error() string {
	if r.Message == "" {
		return fmt.Sprintf("the API server answered %d %s", r.Code, http.StatusText(r.Code))
	}
	return fmt.Sprintf("the API server answered %d: %s", r.Code, r.Message)
}

// IsCode reports whether the API server responded with this HTTP status.
func IsCode(err error, code int) bool {
	var status *StatusError
	return errors.As(err, &status) && status.Code == code
}

// IsForbidden reports whether this program lacks the right to make the request.
func IsForbidden(err error) bool { return IsCode(err, http.StatusForbidden) }

// IsNotFound reports whether the API server does not have the object, or does not serve the API.
func IsNotFound(err error) bool { return IsCode(err, http.StatusNotFound) }

// IsInvalid reports whether the API server will never accept the request.
func IsInvalid(err error) bool {
	return IsCode(err, http.StatusBadRequest) || IsCode(err, http.StatusUnprocessableEntity)
}

// IsBusy reports whether the API server rejected the request because it is overloaded.
func IsBusy(err error) bool { return IsCode(err, http.StatusTooManyRequests) }

// IsTemporary reports whether the same request may succeed later: there was no response, or the
// response says so.
func IsTemporary(err error) bool {
	var status *StatusError
	if !errors.As(err, &status) {
		return err != nil
	}
	switch status.Code {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// send sends a request once, and returns the body of the response. The error wraps a *StatusError,
// or says why there is no response.
func (c *Client) send(ctx context.Context, r request) ([]byte, error) {
	_, restored := c.watchRestored.Latest()
	answer, err := c.do(ctx, r)
	if isUnavailable(err) {
		return nil, &unavailableError{err, restored}
	}
	return answer, err
}

func (c *Client) do(ctx context.Context, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	body, err := c.open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	maxBytes := cmp.Or(r.maxBytes, maxResponse)
	answer, err := io.ReadAll(io.LimitReader(body, maxBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	case int64(len(answer)) > maxBytes:
		return nil, fmt.Errorf("the answer of the API server has more than %d bytes", maxBytes)
	}
	return answer, nil
}

// open sends a request once, and returns the body of a successful response.
func (c *Client) open(ctx context.Context, r request) (io.ReadCloser, error) {
	if !r.unlimited {
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
		if isCertificateError(err) {
			c.disconnect(connection)
		}
		return nil, fmt.Errorf("ask the API server: %w", err)
	}
	c.count(r, answer.StatusCode)
	if answer.StatusCode < http.StatusMultipleChoices {
		return answer.Body, nil
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusUnauthorized {
		c.disconnect(connection)
	}
	return nil, newStatusError(answer)
}

// isCertificateError reports whether an error concerns the certificate of the API server.
func isCertificateError(err error) bool {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &unknown) || errors.As(err, &invalid)
}

// maxRetryAfter limits the delay that a response can request.
const maxRetryAfter = 10 * time.Minute

// maxMessage is the size limit of a message, in bytes.
const maxMessage = 300

// newStatusError returns the error for an unsuccessful response.
func newStatusError(answer *http.Response) error {
	r := &StatusError{Code: answer.StatusCode}
	if seconds, err := strconv.Atoi(answer.Header.Get("Retry-After")); err == nil && seconds > 0 {
		r.RetryAfter = min(time.Duration(seconds)*time.Second, maxRetryAfter)
	}
	var s struct {
		Kind, Reason, Message string
		Details               struct {
			Causes []struct{ Reason, Field, Message string }
		}
	}
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxResponse))
	if status := fieldOf(bytes.TrimPrefix(text, []byte(protobufPrefix)),
		unknownRaw); answer.Header.Get("Content-Type") == protobuf {
		r.Reason, r.Message = textOf(status, statusReason), truncate(textOf(status, statusMessage))
		return r
	}
	if err == nil && json.Unmarshal(text, &s) == nil && s.Kind == "Status" {
		for _, cause := range s.Details.Causes {
			switch cause.Reason {
			case "FieldManagerConflict":
				r.Conflicts = append(r.Conflicts, FieldConflict{cause.Field, cause.Message})
			case "ResourceVersionTooLarge":
				r.VersionUnknown = true
			}
		}
		r.Reason, r.Message = s.Reason, truncate(s.Message)
	}
	return r
}

func truncate(message string) string {
	return strings.ToValidUTF8(message[:min(len(message), maxMessage)], "")
}
