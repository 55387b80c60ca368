package main

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	commit   = "0123456789abcdef0123456789abcdef01234567"
	artefact = "gpu-device-plugin-v0.1.0-linux-amd64"
)

// A signed is an artefact with its SBOM, and the envelope with its statement, all in one folder.
type signed struct {
	file, keyFile string
	key, other    *ecdsa.PrivateKey
}

func newSigned(t *testing.T) *signed {
	t.Helper()
	folder := t.TempDir()
	s := &signed{file: filepath.Join(folder, artefact), key: newKey(t, elliptic.P256()), other: newKey(t, elliptic.P256())}
	put(t, s.file, "a program")
	put(t, s.file+sbomSuffix, "what it has")
	var private string
	private, s.keyFile = writeKeys(t, folder, s.key)
	if err := run([]string{"-version", "v0.1.0", "-image", "ghcr.io/x/y", "-commit", commit,
		"-dependency", "pkg:golang/stdlib@1.26.8", "-dependency", "pkg:deb/debian/libc6@2.36?arch=amd64 sha256:00ff",
		"-key", private, s.file}, &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func newKey(t *testing.T, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	return must(ecdsa.GenerateKey(curve, rand.Reader))
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func put(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// writeKeys writes a key and its public key into a folder, and returns the names of the files.
func writeKeys(t *testing.T, folder string, key *ecdsa.PrivateKey) (private, public string) {
	t.Helper()
	private, public = filepath.Join(folder, "release.pem"), filepath.Join(folder, "release.pub")
	writeKey(t, private, "PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(key)))
	writeKey(t, public, "PUBLIC KEY", must(x509.MarshalPKIXPublicKey(&key.PublicKey)))
	return private, public
}

func writeKey(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	put(t, file, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

// envelope returns the envelope as it was written.
func (s *signed) envelope(t *testing.T) *envelope {
	t.Helper()
	var e envelope
	if err := json.Unmarshal(must(os.ReadFile(s.file+envelopeSuffix)), &e); err != nil {
		t.Fatal(err)
	}
	return &e
}

// change writes the envelope again after a change, which nobody has signed.
func change(change func(s *signed, e *envelope)) func(*testing.T, *signed) {
	return func(t *testing.T, s *signed) {
		t.Helper()
		e := s.envelope(t)
		change(s, e)
		put(t, s.file+envelopeSuffix, string(must(encode(e, ""))))
	}
}

// restate signs another statement with the key of the release.
func restate(old, replacement string) func(*testing.T, *signed) {
	return func(t *testing.T, s *signed) {
		t.Helper()
		text := string(must(decode(s.envelope(t).Payload)))
		if !strings.Contains(text, old) {
			t.Fatalf("the statement has no %q:\n%s", old, text)
		}
		put(t, s.file+envelopeSuffix,
			string(must(encode(must(seal([]byte(strings.ReplaceAll(text, old, replacement)), s.key)), ""))))
	}
}

// by returns a signature of the payload of e by a key.
func by(key *ecdsa.PrivateKey, e *envelope) signature {
	return must(seal(must(decode(e.Payload)), key)).Signatures[0]
}

func TestVerify(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		change func(*testing.T, *signed)
		want   string // in the error; empty where the artefact is verified
	}{
		{"as it was written", func(*testing.T, *signed) {}, ""},
		{"another artefact", func(t *testing.T, s *signed) { put(t, s.file, "another program") }, "the file has the SHA-256"},
		{"another SBOM", func(t *testing.T, s *signed) { put(t, s.file+sbomSuffix, "less") }, "SBOM"},
		{"no SBOM", func(_ *testing.T, s *signed) { _ = os.Remove(s.file + sbomSuffix) }, ""},
		{"no artefact", func(_ *testing.T, s *signed) { _ = os.Remove(s.file) }, "no such file"},
		{"no envelope", func(_ *testing.T, s *signed) { _ = os.Remove(s.file + envelopeSuffix) }, "no such file"},
		{"an empty envelope", func(t *testing.T, s *signed) { put(t, s.file+envelopeSuffix, "") }, "is empty"},
		{"another key", func(t *testing.T, s *signed) {
			writeKey(t, s.keyFile, "PUBLIC KEY", must(x509.MarshalPKIXPublicKey(&s.other.PublicKey)))
		}, "none of 1 signatures is by this key"},
		{"a truncated envelope", func(t *testing.T, s *signed) {
			text := must(os.ReadFile(s.file + envelopeSuffix))
			put(t, s.file+envelopeSuffix, string(text[:len(text)/2]))
		}, "read envelope"},
		{"a truncated payload", change(func(_ *signed, e *envelope) { e.Payload = e.Payload[:len(e.Payload)/8*4] }),
			"none of 1 signatures"},
		{"a truncated signature", change(func(_ *signed, e *envelope) { e.Signatures[0].Sig = e.Signatures[0].Sig[:40] }),
			"none of 1 signatures"},
		{"no signature", change(func(_ *signed, e *envelope) { e.Signatures = nil }), "none of 0 signatures"},
		{"a payload that is no base64", change(func(_ *signed, e *envelope) { e.Payload = "?" }), "read payload"},
		{"the other alphabet of base64", change(func(_ *signed, e *envelope) {
			e.Payload = base64.URLEncoding.EncodeToString(must(decode(e.Payload)))
			e.Signatures[0].Sig = base64.URLEncoding.EncodeToString(must(decode(e.Signatures[0].Sig)))
		}), ""},
		{"two signatures, the second by the key", change(func(s *signed, e *envelope) {
			e.Signatures = []signature{by(s.other, e), e.Signatures[0]}
		}), ""},
		{"two signatures, the second by somebody else", change(func(s *signed, e *envelope) {
			e.Signatures = append(e.Signatures, by(s.other, e))
		}), ""},
		{"two signatures by somebody else", change(func(s *signed, e *envelope) {
			e.Signatures = []signature{by(s.other, e), by(s.other, e)}
		}), "none of 2 signatures"},
		{"a signature with the ID of a key", func(t *testing.T, s *signed) {
			text := string(must(os.ReadFile(s.file + envelopeSuffix)))
			put(t, s.file+envelopeSuffix, strings.Replace(text, `{"sig"`, `{"keyid": "other", "sig"`, 1))
		}, ""},
		{"a signature of the payload alone", change(func(s *signed, e *envelope) {
			digest := sha256.Sum256(must(decode(e.Payload)))
			e.Signatures[0].Sig = base64.StdEncoding.EncodeToString(must(s.key.Sign(nil, digest[:], crypto.SHA256)))
		}), "none of 1 signatures"},
		{"a payload of another type that is signed", change(func(s *signed, e *envelope) {
			e.PayloadType = "text/plain"
			digest := sha256.Sum256(signedPart(e.PayloadType, must(decode(e.Payload))))
			e.Signatures[0].Sig = base64.StdEncoding.EncodeToString(must(s.key.Sign(nil, digest[:], crypto.SHA256)))
		}), "a payload of the type"},
		{"a statement that is not JSON", restate("{", "("), "read statement"},
		{"a statement about another file", restate(`"`+artefact+`"`, `"gpu-device-plugin-v0.1.0-linux-arm64"`), "the statement is about"},
		{"an older version", restate("v0.1.0", "v0.0.9"), "the statement is about"},
		{"a statement without a digest", restate(`"sha256"`, `"sha1"`), "the file has the SHA-256"},
		{"a statement of in-toto 0.1", restate(statementType, "https://in-toto.io/Statement/v0.1"), "a statement of the type"},
		{"another predicate", restate(provenanceType, "https://spdx.dev/Document"), "a predicate of the type"},
		{"another type of build", restate(buildType, "https://example.com/build"), "a build of the type"},
		{"another repository", restate("git+"+repository, "git+https://example.com/fork"), "names no commit"},
		{"a parameter that is not known", restate(`"image": `, `"patch": "x", "image": `), "unknown field"},
		{"other lines around it", func(t *testing.T, s *signed) {
			put(t, s.file+envelopeSuffix, "{}\nno JSON\n"+string(must(os.ReadFile(s.file+envelopeSuffix)))+"{}\n")
		}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newSigned(t)
			tt.change(t, s)
			var output bytes.Buffer
			err := run([]string{"-verify", "-key", s.keyFile, s.file}, &output)
			if tt.want == "" {
				if err != nil || !strings.HasPrefix(output.String(), s.file+": verified\n  built as v0.1.0 from "+repository+", commit "+commit) {
					t.Errorf("%v\n%s", err, output.String())
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "NOT VERIFIED") {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if output.Len() > 0 {
				t.Errorf("it says %q", output.String())
			}
		})
	}
}

// TestVerifyEachFile: one file that is not verified makes the command fail.
func TestVerifyEachFile(t *testing.T) {
	t.Parallel()
	s := newSigned(t)
	for _, args := range [][]string{{s.file, s.file + ".other"}, {s.file + ".other", s.file}, {}} {
		if err := run(append([]string{"-verify", "-key", s.keyFile}, args...), &bytes.Buffer{}); err == nil {
			t.Errorf("the files %q are verified", args)
		}
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "key.pem")
	p256, p384 := newKey(t, elliptic.P256()), newKey(t, elliptic.P384())
	rsaKey := must(rsa.GenerateKey(rand.Reader, 2048))
	parameters := string(pem.EncodeToMemory(&pem.Block{Type: "EC PARAMETERS", Bytes: []byte{6, 0}}))
	text := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	for _, tt := range []struct {
		name, text string
		private    string // in the error of reading it as a private key; empty for none
		public     string
	}{
		{"PKCS #8", text("PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(p256))), "", "has none of PUBLIC KEY"},
		{"SEC 1", parameters + text("EC PRIVATE KEY", must(x509.MarshalECPrivateKey(p256))), "", "has none of PUBLIC KEY"},
		{"public", text("PUBLIC KEY", must(x509.MarshalPKIXPublicKey(&p256.PublicKey))), "has none of EC PRIVATE KEY, PRIVATE KEY", ""},
		{"another curve", text("PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(p384))), "ECDSA on P-256", "has none of"},
		{"another public curve", text("PUBLIC KEY", must(x509.MarshalPKIXPublicKey(&p384.PublicKey))), "has none of", "ECDSA on P-256"},
		{"RSA", text("PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(rsaKey))), "ECDSA on P-256", "has none of"},
		{"with a passphrase", text("ENCRYPTED PRIVATE KEY", []byte{1}), "a key with a passphrase", "has none of"},
		{"damaged", text("PRIVATE KEY", []byte{1}) + text("PUBLIC KEY", []byte{1}), "read key", "read key"},
		{"empty", "", "has none of", "has none of"},
	} {
		put(t, file, tt.text)
		_, err := readPrivateKey(file)
		isWanted(t, tt.name+" as a private key", err, tt.private)
		_, err = readPublicKey(file)
		isWanted(t, tt.name+" as a public key", err, tt.public)
	}
}

func isWanted(t *testing.T, name string, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: error %v, want %q", name, err, want)
	}
}

// TestSignatureOfDSSE holds signatures to the example of DSSE's own document, which has a key, a
// payload and the two numbers of the signature by RFC 6979.
func TestSignatureOfDSSE(t *testing.T) {
	t.Parallel()
	const kind, payload = "http://example.com/HelloWorld", "hello world"
	part := signedPart(kind, []byte(payload))
	if string(part) != "DSSEv1 29 http://example.com/HelloWorld 11 hello world" {
		t.Errorf("what is signed is %q", part)
	}
	number := func(text string) *big.Int {
		n, _ := new(big.Int).SetString(text, 10)
		return n
	}
	point := append([]byte{4}, append(
		number("46950820868899156662930047687818585632848591499744589407958293238635476079160").FillBytes(make([]byte, 32)),
		number("5640078356564379163099075877009565129882514886557779369047442380624545832820").FillBytes(make([]byte, 32))...)...)
	key := must(ecdsa.ParseRawPrivateKey(elliptic.P256(),
		number("97358161215184420915383655311931858321456579547487070936769975997791359926199").FillBytes(make([]byte, 32))))
	if !bytes.Equal(must(key.PublicKey.Bytes()), point) {
		t.Fatal("the public key is another one")
	}
	digest := sha256.Sum256(part)
	var numbers struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(must(key.Sign(nil, digest[:], crypto.SHA256)), &numbers); err != nil {
		t.Fatal(err)
	}
	got := base64.StdEncoding.EncodeToString(append(numbers.R.FillBytes(make([]byte, 32)), numbers.S.FillBytes(make([]byte, 32))...))
	if want := "A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA=="; got != want {
		t.Errorf("signature %s, want %s", got, want)
	}
}
