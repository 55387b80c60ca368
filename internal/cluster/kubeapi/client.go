// Package kubeapi talks to the API server about the daemon's own node: it watches the Node, and
// writes the Events, labels, conditions, taints and slices of its GPUs. It is the only package that
// imports client-go, and uses its RESTClient: the typed clients include the types of all APIs, and
// would add 16 MB to the program.
//
// Nothing between the driver and the kubelet waits for this package.
package kubeapi

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
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
	// maxFailure is the size limit of a response that reports a failure, in bytes.
	maxFailure = 64 << 10
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

// A connection is a client with the address of an API server and the credentials for it.
type connection struct {
	api  *rest.RESTClient
	http *http.Client
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
func (c *Client) count(r *http.Request, code int) {
	c.mu.Lock()
	onRequest := c.onRequest
	c.mu.Unlock()
	if onRequest == nil {
		return
	}
	verb, resource, path := r.Method, "nodes", r.URL.Path
	if r.URL.Query().Get("watch") != "" {
		verb = "WATCH"
	}
	switch {
	case strings.Contains(path, "/apis/events.k8s.io/"):
		resource = "events"
	case strings.Contains(path, "/apis/nfd.k8s-sigs.io/"):
		resource = "nodefeatures"
	case strings.Contains(path, "/resourceslices"):
		resource = "resourceslices"
	case strings.Contains(path, "/resourceclaims"):
		resource = "resourceclaims"
	case strings.Contains(path, leasePath):
		resource = "leases"
	case strings.HasSuffix(path, "/eviction"):
		resource = "pods/eviction"
	case strings.Contains(path, "/api/v1/namespaces/"), strings.HasSuffix(path, podsPath):
		resource = "pods"
	case strings.HasSuffix(path, "/status"):
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
	config.NegotiatedSerializer, config.RateLimiter = codecs, c.limiter
	config.WarningHandlerWithContext = rest.NoWarnings{}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	resumeTLS(client)
	client.Transport = &transport{client.Transport, c.count}
	// The token must not go to another server.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	api, err := rest.UnversionedRESTClientForConfigAndClient(config, client)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	c.connection = &connection{api: api, http: client}
	return c.connection, nil
}

// codecs decode the Status of a failed request, in all encodings.
var codecs = func() runtime.NegotiatedSerializer {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	return serializer.NewCodecFactory(scheme).WithoutConversion()
}()

// A transport counts requests, and limits the size of responses that report a failure: client-go
// reads them whole.
type transport struct {
	http.RoundTripper
	count func(r *http.Request, code int)
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if err != nil {
		t.count(r, 0)
		return nil, err
	}
	if t.count(r, answer.StatusCode); answer.StatusCode >= http.StatusMultipleChoices {
		answer.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(answer.Body, maxFailure), answer.Body}
	}
	return answer, nil
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
		old.http.CloseIdleConnections()
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

// IsCode reports whether the API server responded with this HTTP status.
func IsCode(err error, code int) bool {
	status := statusOf(err)
	return status != nil && status.Code == int32(code)
}

// statusOf returns the Status of a response that reports a failure; nil if err has another reason.
func statusOf(err error) *metav1.Status {
	var failure *apierrors.StatusError
	if !errors.As(err, &failure) {
		return nil
	}
	return &failure.ErrStatus
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
	status := statusOf(err)
	if status == nil {
		return err != nil
	}
	switch status.Code {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// send sends a request once, and returns the body of the response. The error wraps an
// *apierrors.StatusError, or says why there is no response.
func (c *Client) send(ctx context.Context, r request) ([]byte, error) {
	_, restoredChanged := c.watchRestored.Latest()
	answer, err := c.do(ctx, r)
	if isUnavailable(err) {
		return nil, &unavailableError{err, restoredChanged}
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
	sent := connection.api.Verb(r.verb).AbsPath(r.path).SetHeader("Accept", cmp.Or(r.accept, "application/json")).
		Body(r.body).MaxRetries(0)
	for name, values := range r.query {
		sent.Param(name, values[0])
	}
	if r.contentType != "" {
		sent.SetHeader("Content-Type", r.contentType)
	}
	if r.unlimited {
		sent.Throttle(nil)
	}
	body, err := sent.Stream(ctx)
	if err == nil {
		return body, nil
	}
	if isCertificateError(err) || IsCode(err, http.StatusUnauthorized) {
		c.disconnect(connection)
	}
	status := statusOf(err)
	if status == nil {
		return nil, fmt.Errorf("ask the API server: %w", err)
	}
	status.Message = truncate(status.Message)
	return nil, fmt.Errorf("the API server answered %d: %w", status.Code, err)
}

// isCertificateError reports whether an error concerns the certificate of the API server.
func isCertificateError(err error) bool {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &unknown) || errors.As(err, &invalid)
}

// maxMessage is the size limit of a message, in bytes.
const maxMessage = 300

func truncate(message string) string {
	return strings.ToValidUTF8(message[:min(len(message), maxMessage)], "")
}
