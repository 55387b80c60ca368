package driverfacts

import (
	"bytes"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math/big"
	"path"
	"regexp"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// moduleName matches the files of the driver's modules, with the names of distributions:
// nvidia.ko, nvidia-uvm.ko.xz, nvidia-current-drm.ko of Debian. It does not match other modules for
// NVIDIA's devices, such as nvidiafb.ko.
var moduleName = regexp.MustCompile(
	`^nvidia(?:[-_](?:current|tesla|open|legacy-[0-9]+xx|[0-9]{3})){0,3}` +
		`(?:[-_](uvm|modeset|drm|peermem))?\.ko(?:\.(xz|zst|gz))?$`)

// readModule reads a file with a kernel module, with a path below the root.
func readModule(r root, file string) *preflight.ModuleFile {
	m := &preflight.ModuleFile{Path: "/" + file, Part: preflight.Core}
	found := moduleName.FindStringSubmatch(path.Base(file))
	if found == nil {
		m.Unread = "is no module of the driver"
		return m
	}
	if found[1] != "" {
		m.Part = found[1]
	}
	if found[2] != "" {
		m.Unread = "is compressed (" + found[2] + "), and not unpacked here"
		return m
	}
	f, err := r.OpenFile(file)
	if err != nil {
		m.Unread = "cannot be read: " + reason(err)
		return m
	}
	defer f.Close()
	info, err := f.Stat()
	content, ok := f.(io.ReaderAt)
	if err != nil || !ok {
		m.Unread = "cannot be read"
		return m
	}
	values, err := modinfo(content)
	if err != nil {
		return m // damaged, or no module
	}
	m.Version, m.Vermagic, m.License = values["version"], values["vermagic"], values["license"]
	m.Signed, m.Signer = signer(content, info.Size())
	return m
}

// reason returns an error without the path.
func reason(err error) string {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err.Error()
	}
	return err.Error()
}

const (
	maxSections = 1 << 16 // the ELF format has no more without an extension
	maxModinfo  = 1 << 18
	maxNames    = 16 << 20 // names of sections
)

var errNoModule = errors.New("not a 64-bit kernel module")

// modinfo returns the section .modinfo of a module: the first value of each key. Every size in the
// file is checked, because the file may be damaged or made up.
func modinfo(file io.ReaderAt) (map[string]string, error) {
	header := make([]byte, 64)
	if _, err := file.ReadAt(header, 0); err != nil || !bytes.HasPrefix(header, []byte("\x7fELF\x02")) {
		return nil, errNoModule
	}
	var order binary.ByteOrder = binary.LittleEndian
	if header[5] == 2 {
		order = binary.BigEndian
	}
	const sectionHeader = 64
	at, size := order.Uint64(header[40:]), order.Uint16(header[58:])
	number, names := int(order.Uint16(header[60:])), int(order.Uint16(header[62:]))
	if size != sectionHeader || number == 0 || number > maxSections || names >= number || at > 1<<40 {
		return nil, errNoModule
	}
	sections := make([]byte, number*sectionHeader)
	if _, err := file.ReadAt(sections, int64(at)); err != nil {
		return nil, errNoModule
	}
	section := func(i, most int) ([]byte, error) {
		s := sections[i*sectionHeader:]
		offset, size := order.Uint64(s[24:]), order.Uint64(s[32:])
		if offset > 1<<40 || size > uint64(most) {
			return nil, errNoModule
		}
		text := make([]byte, size)
		_, err := file.ReadAt(text, int64(offset))
		return text, err
	}
	table, err := section(names, maxNames)
	if err != nil {
		return nil, errNoModule
	}
	for i := range number {
		name := order.Uint32(sections[i*sectionHeader:])
		if uint64(name) >= uint64(len(table)) || !bytes.HasPrefix(table[name:], []byte(".modinfo\x00")) {
			continue
		}
		text, err := section(i, maxModinfo)
		if err != nil {
			return nil, errNoModule
		}
		values := map[string]string{}
		for entry := range strings.SplitSeq(string(text), "\x00") {
			if key, value, ok := strings.Cut(entry, "="); ok && values[key] == "" {
				values[key] = value[:min(len(value), maxValue)]
			}
		}
		return values, nil
	}
	return nil, errNoModule
}

// ModuleInfo returns the section .modinfo of a module file: the first value of each key.
func ModuleInfo(file io.ReaderAt) (map[string]string, error) { return modinfo(file) }

// maxValue limits a value of .modinfo and the name of a signer, in bytes.
const maxValue = 256

// signatureEnd is the end of a signed module.
const signatureEnd = "~Module signature appended~\n"

// signer reports whether a module is signed, and the name of the owner of the key; empty if the
// signature does not tell it. Before signatureEnd are the signature, a PKCS#7 message, and 12 bytes:
// the last four are the length of the message.
func signer(file io.ReaderAt, size int64) (signed bool, name string) {
	const trailer = int64(12 + len(signatureEnd))
	end := make([]byte, trailer)
	if size < trailer {
		return false, ""
	}
	if _, err := file.ReadAt(end, size-trailer); err != nil || !bytes.HasSuffix(end, []byte(signatureEnd)) {
		return false, ""
	}
	length := int64(binary.BigEndian.Uint32(end[8:]))
	const pkcs7 = 2
	if end[2] != pkcs7 || length > 1<<20 || length > size-trailer {
		return true, ""
	}
	message := make([]byte, length)
	if _, err := file.ReadAt(message, size-trailer-length); err != nil {
		return true, ""
	}
	return true, signerOf(message)
}

// signerOf returns the common name of the first signer of a PKCS#7 message.
func signerOf(message []byte) string {
	var outer struct {
		Type    asn1.ObjectIdentifier
		Content asn1.RawValue `asn1:"explicit,optional,tag:0"`
	}
	if _, err := asn1.Unmarshal(message, &outer); err != nil {
		return ""
	}
	var data struct {
		Version      int
		Digests      asn1.RawValue
		Content      asn1.RawValue
		Certificates asn1.RawValue `asn1:"optional,tag:0"`
		Revocations  asn1.RawValue `asn1:"optional,tag:1"`
		Signers      []struct {
			Version int
			Signer  struct {
				Issuer pkix.RDNSequence
				Serial *big.Int
			}
		} `asn1:"set"`
	}
	if _, err := asn1.Unmarshal(outer.Content.Bytes, &data); err != nil || len(data.Signers) == 0 {
		return ""
	}
	var owner pkix.Name
	owner.FillFromRDNSequence(&data.Signers[0].Signer.Issuer)
	return owner.CommonName[:min(len(owner.CommonName), maxValue)]
}
