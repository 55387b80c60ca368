package driverfetch_test

import (
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfetch"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

// Only archives below the given URLs are downloaded.
func TestDownloadFrom(t *testing.T) {
	t.Parallel()
	digest := strings.Repeat("0a", 32)
	f, err := driverfetch.New(driverfetch.Options{Directory: t.TempDir(),
		From: []string{"https://a.example/drivers/", "http://b.example:81", "https://c.example/one.tar.gz"}})
	if err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]string{
		"https://a.example/drivers/580.tar.gz":      "",
		"https://A.example/drivers/a/b?token=c":     "",
		"http://b.example:81/580":                   "",
		"https://c.example/one.tar.gz":              "",
		"https://c.example/one.tar.gz2":             "is not below the URLs of --download-from (https://a.example/drivers/, ",
		"http://a.example/drivers/580":              "is not below",
		"https://a.example/drivers":                 "is not below",
		"https://a.example/drivers2/580":            "is not below",
		"https://a.example/drivers/../580":          "is not below",
		"https://a.example/drivers/%2e%2e/580":      "is not below",
		"https://a.example/drivers/..%2f580":        "is not below",
		"https://a.example:444/drivers/580":         "is not below",
		"https://a.example.evil/drivers/580":        "is not below",
		"http://b.example/580":                      "is not below",
		"https://u:secret@a.example/drivers/580":    "has a user or a password",
		"file:///drivers/580":                       "is not a URL that begins with https:// or http://",
		"":                                          "is not a URL",
		"https://a.example/drivers/\x00?key=secret": "cannot be read",
	} {
		err := f.Ask(source, digest)
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: %v, want %s", source, err, want)
		}
	}
	if err := f.Ask("https://a.example/drivers/580", "../../etc/passwd"); err == nil || !strings.Contains(err.Error(), "not a SHA-256 digest") {
		t.Errorf("a digest that is a path: %v", err)
	}
	if _, err := driverfetch.New(driverfetch.Options{Directory: t.TempDir(), From: []string{"drivers.example"}}); err == nil {
		t.Error("a URL without a scheme is accepted")
	}
}

// A server with https needs a certificate that the node knows, and must not redirect to http.
func TestHTTPS(t *testing.T) {
	t.Parallel()
	plain, digest := newServer(t), standinkernel.Digest(archive)
	s := &server{}
	s.Server = httptest.NewTLSServer(s)
	t.Cleanup(s.Close)
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	for name, tt := range map[string]struct {
		file, caFile, content string
		redirect              string
		want                  string
	}{
		"of the node":         {file: "etc/pki/tls/certs/ca-bundle.crt", content: string(certificate)},
		"of a file":           {file: "etc/my/ca.pem", caFile: "/etc/my/ca.pem", content: string(certificate)},
		"unknown":             {want: "certificate signed by unknown authority; --ca-file, in the chart driver.caFile"},
		"a file that is none": {file: "etc/my/ca.pem", caFile: "/etc/my/ca.pem", content: "a", want: "--ca-file: /etc/my/ca.pem has no certificate"},
		"a missing file":      {caFile: "/etc/my/ca.pem", want: "--ca-file: "},
		"a redirect to http": {file: "etc/my/ca.pem", caFile: "/etc/my/ca.pem", content: string(certificate),
			redirect: plain.URL + "/d", want: "the server redirects from https to http://"},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.redirect != "" {
				s.let(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, tt.redirect, http.StatusFound) })
				defer s.let(nil)
			}
			n := newNode(t, s)
			n.options.CAFile = tt.caFile
			if tt.file != "" {
				at := filepath.Join(n.options.Root, tt.file)
				if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, []byte(tt.content), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			n.start()
			n.ask(s.URL+"/d", digest)
			if tt.want == "" {
				n.awaitPlaced(1)
				return
			}
			if d := n.awaitProblem(tt.want); !d.IsFinal {
				t.Errorf("%+v", d)
			}
		})
	}
}
