package driverstore_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

func unpack(t *testing.T, s *driverstore.Store, archive []byte) (driverstore.Folder, error) {
	t.Helper()
	return s.Unpack(t.Context(), bytes.NewReader(archive), standinkernel.Digest(archive), ignore)
}

// An archive becomes a folder like one that was copied, and the directory says from which archives it
// is. The links of archives go with the folder.
func TestUnpack(t *testing.T) {
	t.Parallel()
	sources, directory := t.TempDir(), t.TempDir()
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	plain := standinkernel.Tar(t, standinkernel.Entries(t, filepath.Join(sources, "a"))...)
	compressed := standinkernel.Gzip(t, plain)
	s := open(t, directory)
	var last int
	f, err := s.Unpack(t.Context(), bytes.NewReader(compressed), standinkernel.Digest(compressed), func(percent int) {
		if percent < last || percent > 99 {
			t.Errorf("%d %% after %d %%", percent, last)
		}
		last = percent
	})
	if err != nil || f.Digest != digest || last == 0 {
		t.Fatalf("unpacked %+v at %d %%: %v", f, last, err)
	}
	if _, found, err := driverfolder.Verify(t.Context(), f.Path); err != nil || found != digest {
		t.Errorf("the folder: %s, %v", found, err)
	}
	if f, err := unpack(t, s, plain); err != nil || f.Digest != digest {
		t.Errorf("the same folder without gzip: %+v, %v", f, err)
	}
	want := []string{standinkernel.Digest(plain), standinkernel.Digest(compressed)}
	slices.Sort(want)
	if diff := cmp.Diff(map[string][]string{digest: want}, s.Archives()); diff != "" {
		t.Errorf("the archives (-want +got):\n%s", diff)
	}
	for _, version := range []string{"580.95.06", "580.95.07"} {
		standinkernel.Driver(t, sources, version, version, standinkernel.Release)
		if _, err := s.Place(t.Context(), filepath.Join(sources, version), ignore); err != nil {
			t.Fatal(err)
		}
	}
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "proc"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Prune(os.DirFS(root)); err != nil || len(s.Archives()) > 0 || len(names(t, directory)) != 2 {
		t.Errorf("after the folder was removed: %v, %v, %v", s.Archives(), names(t, directory), err)
	}
}

// An archive that is something else, or has what its manifest does not have, leaves nothing.
func TestHostileArchives(t *testing.T) {
	t.Parallel()
	type entries = []standinkernel.Entry
	with := func(head tar.Header, content string) func(entries) entries {
		return func(all entries) entries {
			return append(all, standinkernel.Entry{Head: head, Content: []byte(content)})
		}
	}
	change := func(name string, edit func(*standinkernel.Entry)) func(entries) entries {
		return func(all entries) entries {
			i := slices.IndexFunc(all, func(e standinkernel.Entry) bool { return e.Head.Name == name })
			edit(&all[i])
			return all
		}
	}
	manifest := func(edit func(*driverfolder.Manifest)) func(entries) entries {
		return change(driverfolder.ManifestName, func(e *standinkernel.Entry) {
			m, _, err := driverfolder.Decode(e.Content)
			if err != nil {
				t.Fatal(err)
			}
			edit(&m)
			if e.Content, err = m.Encode(); err != nil {
				t.Fatal(err)
			}
		})
	}
	const notListed = " is there twice, or is not in the manifest"
	for name, tt := range map[string]struct {
		edit func(entries) entries
		want string
	}{
		"an absolute path":       {with(tar.Header{Typeflag: tar.TypeReg, Name: "/etc/cron.d/a"}, "a"), `"/etc/cron.d/a"` + notListed},
		"a path that leads out":  {with(tar.Header{Typeflag: tar.TypeReg, Name: "usr/../../a"}, "a"), notListed},
		"a folder that is above": {with(tar.Header{Typeflag: tar.TypeDir, Name: "../"}, ""), notListed},
		"another folder":         {with(tar.Header{Typeflag: tar.TypeDir, Name: "usr/lib/a/"}, ""), notListed},
		"a folder twice":         {with(tar.Header{Typeflag: tar.TypeDir, Name: "usr/lib/"}, ""), notListed},
		"another file":           {with(tar.Header{Typeflag: tar.TypeReg, Name: "usr/lib/a"}, "a"), notListed},
		"a file twice":           {with(tar.Header{Typeflag: tar.TypeReg, Name: library}, "libcuda 580.95.05"), notListed},
		"a second manifest":      {with(tar.Header{Typeflag: tar.TypeReg, Name: driverfolder.ManifestName}, "{}"), notListed},
		"another link":           {with(tar.Header{Typeflag: tar.TypeSymlink, Name: "usr/lib/a", Linkname: "/"}, ""), notListed},
		"a device":               {with(tar.Header{Typeflag: tar.TypeChar, Name: "dev/mem", Devmajor: 1, Devminor: 1}, ""), notListed},
		"a hard link": {change(library, func(e *standinkernel.Entry) {
			*e = standinkernel.Entry{Head: tar.Header{Typeflag: tar.TypeLink, Name: library, Linkname: "/etc/shadow"}}
		}), "has another type, size or target"},
		"a device for a file": {change(library, func(e *standinkernel.Entry) {
			*e = standinkernel.Entry{Head: tar.Header{Typeflag: tar.TypeBlock, Name: library}}
		}), "has another type, size or target"},
		"a link for a file": {change(library, func(e *standinkernel.Entry) {
			*e = standinkernel.Entry{Head: tar.Header{Typeflag: tar.TypeSymlink, Name: library, Linkname: "/etc/passwd"}}
		}), "has another type, size or target"},
		"a link with another target": {change("usr/lib/libcuda.so.1", func(e *standinkernel.Entry) {
			e.Head.Linkname = "../../../etc/passwd"
		}), "has another type, size or target"},
		"a longer file": {change(library, func(e *standinkernel.Entry) { e.Content = make([]byte, 1<<20) }),
			"has another type, size or target"},
		"another content": {change(library, func(e *standinkernel.Entry) { e.Content[0]++ }), "is not the file that was packed"},
		"a missing file":  {func(all entries) entries { return all[:len(all)-1] }, "is missing"},
		"the manifest last": {func(all entries) entries { return append(all[1:], all[0]) },
			"the first entry is \"etc/\", and not manifest.json: it is not an archive of a driver folder: pack it first"},
		"a manifest with a link out": {change(driverfolder.ManifestName, func(e *standinkernel.Entry) {
			e.Content = bytes.Replace(e.Content, []byte(`"libcuda.so.580.95.05"`), []byte(`"../../../etc/passwd"`), 1)
		}), "leads out of the folder"},
		"a manifest with a path out": {change(driverfolder.ManifestName, func(e *standinkernel.Entry) {
			e.Content = bytes.Replace(e.Content, []byte(`"usr/bin/nvidia-smi"`), []byte(`"../bin/nvidia-smi"`), 1)
		}), "is not a path inside the folder"},
		"too much": {manifest(func(m *driverfolder.Manifest) {
			for i := range m.Files {
				if m.Files[i].Link == "" {
					m.Files[i].Size = 1 << 62
				}
			}
		}), "more than 16 GB"},
		"more than the disk has": {manifest(func(m *driverfolder.Manifest) {
			for i := range m.Files {
				if m.Files[i].Path == library {
					m.Files[i].Size = 16<<30 - 1<<20
				}
			}
		}), ""}, // no space, or another size
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sources, directory := t.TempDir(), t.TempDir()
			standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
			all := standinkernel.Entries(t, filepath.Join(sources, "a"))
			if name == "the manifest last" {
				all = slices.Insert(all, 1, standinkernel.Entry{Head: tar.Header{Typeflag: tar.TypeDir, Name: "etc/", Mode: 0o755}})
			}
			s := open(t, directory)
			if _, err := unpack(t, s, standinkernel.Tar(t, tt.edit(all)...)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
			if left := names(t, directory); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
	sources := t.TempDir()
	standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	whole, _ := standinkernel.Archive(t, filepath.Join(sources, "a"))
	for name, tt := range map[string]struct {
		content []byte
		want    string
	}{
		"nothing":                  {nil, "pack it first, with gpu-driver pack --archive"},
		"a .run file":              {[]byte("#!/bin/sh\n# NVIDIA Accelerated Graphics Driver" + strings.Repeat("\n#", 1000)), "pack it first"},
		"zstd":                     {append([]byte{0x28, 0xb5, 0x2f, 0xfd}, make([]byte, 1000)...), "pack it first"},
		"gzip without tar":         {standinkernel.Gzip(t, make([]byte, 1000)), "pack it first"},
		"gzip with a damaged head": {[]byte("\x1f\x8b\x00"), "pack it first"},
		"a truncated archive":      {whole[:len(whole)/2], "unexpected EOF"},
		"a damaged archive": {slices.Concat(whole[:len(whole)/2], []byte{0, 1, 2, 3}, whole[len(whole)/2+4:]),
			""},
	} {
		directory := t.TempDir()
		if _, err := unpack(t, open(t, directory), tt.content); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
		if left := names(t, directory); len(left) > 0 {
			t.Errorf("%s: left: %v", name, left)
		}
	}
}

// A disk that is full at any byte, and an end of the program, leave nothing.
func TestUnpackThatIsInterrupted(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	sources, directory := t.TempDir(), t.TempDir()
	standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	archive, _ := standinkernel.Archive(t, filepath.Join(sources, "a"))
	s := open(t, directory)
	for limit := 10.0; ; limit *= 3 {
		ownprocess.LimitFiles(t, uint64(limit))
		_, err := unpack(t, s, archive)
		ownprocess.LimitFiles(t, 0)
		if err == nil {
			break
		}
		if left := names(t, directory); !errors.Is(err, syscall.EFBIG) || len(left) > 0 {
			t.Fatalf("with %.0f bytes: %v, left %v", limit, err, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	other := t.TempDir()
	_, err := open(t, other).Unpack(ctx, bytes.NewReader(archive), standinkernel.Digest(archive),
		func(int) { cancel() })
	if left := names(t, other); !errors.Is(err, context.Canceled) || len(left) > 0 {
		t.Errorf("an end: %v, left %v", err, left)
	}
}
