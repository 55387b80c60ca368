package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

const payloadType = "application/vnd.in-toto+json"

// An envelope is a signed statement as DSSE v1 has it:
// https://github.com/secure-systems-lab/dsse/blob/master/envelope.md.
type envelope struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"` // in base64
	Signatures  []signature `json:"signatures"`
}

// A signature names no key: DSSE leaves open what the ID of a key is, and Sigstore's verifier skips
// a signature with an ID that is not the one that it computes.
type signature struct {
	Sig string `json:"sig"` // ASN.1, in base64
}

// signedPart returns what a signature of an envelope signs: DSSE's pre-authentication encoding.
func signedPart(payloadType string, payload []byte) []byte {
	return fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(payloadType), payloadType, len(payload), payload)
}

// seal returns payload in an envelope that a key has signed. The same payload and key give the same
// envelope: a signature without a source of random numbers follows RFC 6979.
func seal(payload []byte, key *ecdsa.PrivateKey) (*envelope, error) {
	digest := sha256.Sum256(signedPart(payloadType, payload))
	sig, err := key.Sign(nil, digest[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	return &envelope{payloadType, base64.StdEncoding.EncodeToString(payload),
		[]signature{{base64.StdEncoding.EncodeToString(sig)}}}, nil
}

// open returns the payload of an envelope in JSON. One of its signatures has to be by the key;
// signatures by others neither help nor harm.
func open(text []byte, key *ecdsa.PublicKey) ([]byte, error) {
	var e envelope
	if err := json.Unmarshal(text, &e); err != nil {
		return nil, fmt.Errorf("read envelope: %w", err)
	}
	payload, err := decode(e.Payload)
	if err != nil {
		return nil, fmt.Errorf("read payload: %w", err)
	}
	if e.PayloadType != payloadType {
		return nil, fmt.Errorf("a payload of the type %q, want %q", e.PayloadType, payloadType)
	}
	digest := sha256.Sum256(signedPart(e.PayloadType, payload))
	for _, s := range e.Signatures {
		if sig, err := decode(s.Sig); err == nil && ecdsa.VerifyASN1(key, digest[:], sig) {
			return payload, nil
		}
	}
	return nil, fmt.Errorf("none of %d signatures is by this key", len(e.Signatures))
}

// decode decodes base64. DSSE allows both alphabets.
func decode(text string) ([]byte, error) {
	if content, err := base64.StdEncoding.DecodeString(text); err == nil {
		return content, nil
	}
	return base64.URLEncoding.DecodeString(text)
}

// readPrivateKey reads an ECDSA key on P-256 in PEM, in the form of PKCS #8 or SEC 1.
func readPrivateKey(file string) (*ecdsa.PrivateKey, error) {
	parsed, err := readPEM(file, map[string]func([]byte) (any, error){
		"PRIVATE KEY":    x509.ParsePKCS8PrivateKey,
		"EC PRIVATE KEY": func(der []byte) (any, error) { return x509.ParseECPrivateKey(der) },
	})
	if err != nil {
		return nil, err
	}
	if key, ok := parsed.(*ecdsa.PrivateKey); ok && key.Curve == elliptic.P256() {
		return key, nil
	}
	return nil, fmt.Errorf("%s has no private key of ECDSA on P-256", file)
}

// readPublicKey reads an ECDSA key on P-256 in PEM.
func readPublicKey(file string) (*ecdsa.PublicKey, error) {
	parsed, err := readPEM(file, map[string]func([]byte) (any, error){"PUBLIC KEY": x509.ParsePKIXPublicKey})
	if err != nil {
		return nil, err
	}
	if key, ok := parsed.(*ecdsa.PublicKey); ok && key.Curve == elliptic.P256() {
		return key, nil
	}
	return nil, fmt.Errorf("%s has no public key of ECDSA on P-256", file)
}

// readPEM returns what the first block of a type that is wanted has.
func readPEM(file string, parsers map[string]func([]byte) (any, error)) (any, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read key: %w", err)
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if parse := parsers[block.Type]; parse != nil {
			key, err := parse(block.Bytes)
			if err != nil {
				return nil, fmt.Errorf("read key %s: %w", file, err)
			}
			return key, nil
		}
	}
	return nil, fmt.Errorf("%s has none of %s in PEM; a key with a passphrase is not read", file,
		strings.Join(slices.Sorted(maps.Keys(parsers)), ", "))
}
