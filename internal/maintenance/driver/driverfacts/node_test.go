package driverfacts_test

import (
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"fmt"
	"io/fs"
	"maps"
	"math/big"
	"strings"
	"testing/fstest"
)

// files are files of a made-up node by path: their content, or "-> TARGET" for a symbolic link, and
// gone for a missing file.
type files map[string]string

const gone = "gone"

// with returns the files with changes.
func (f files) with(changes ...files) files {
	all := maps.Clone(f)
	for _, change := range changes {
		maps.Copy(all, change)
	}
	return all
}

// tree returns the file system with the files.
func (f files) tree() fstest.MapFS {
	tree := fstest.MapFS{}
	for name, text := range f {
		target, isLink := strings.CutPrefix(text, "-> ")
		switch {
		case text == gone:
		case isLink:
			tree[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
		default:
			tree[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o644}
		}
	}
	return tree
}

// A ko is a kernel module to be made: a small ELF file with .modinfo and, with a signer, a
// signature.
type ko struct {
	version, release string
	closed           bool // proprietary
	signer           string
	plain            bool // vermagic without modversions
}

func (k ko) String() string {
	license, options := "Dual MIT/GPL", "SMP preempt mod_unload modversions "
	if k.closed {
		license = "NVIDIA"
	}
	if k.plain {
		options = "SMP preempt mod_unload "
	}
	info := strings.Join([]string{"license=" + license, "version=" + k.version, "vermagic=" + k.release + " " +
		"" + options, ""}, "\x00")
	names := "\x00.modinfo\x00.shstrtab\x00"
	const header = 64
	at := header + len(info) + len(names)
	file := make([]byte, at+3*header)
	copy(file, "\x7fELF\x02\x01\x01")
	little := binary.LittleEndian
	little.PutUint64(file[40:], uint64(at)) // section headers
	little.PutUint16(file[58:], header)
	little.PutUint16(file[60:], 3)
	little.PutUint16(file[62:], 2)
	copy(file[header:], info+names)
	section := func(i, name, offset, size int) {
		s := file[at+i*header:]
		little.PutUint32(s, uint32(name))
		little.PutUint64(s[24:], uint64(offset))
		little.PutUint64(s[32:], uint64(size))
	}
	section(1, 1, header, len(info))
	section(2, 10, header+len(info), len(names))
	return string(file) + signature(k.signer)
}

// signature returns the end of a module that is signed by a key of an owner; empty without one.
func signature(owner string) string {
	if owner == "" {
		return ""
	}
	type signer struct {
		Version int
		Signer  struct {
			Issuer pkix.RDNSequence
			Serial *big.Int
		}
		Digest, Signature asn1.RawValue
	}
	one := signer{Version: 1}
	one.Signer.Issuer, one.Signer.Serial = pkix.Name{Organization: []string{"O"},
		CommonName: owner}.ToRDNSequence(), big.NewInt(7)
	one.Digest, one.Signature = asn1.RawValue{Tag: 16, IsCompound: true}, asn1.RawValue{Tag: 4,
		Bytes: []byte("made up")}
	data, err := asn1.Marshal(struct {
		Version          int
		Digests, Content asn1.RawValue
		Signers          []signer `asn1:"set"`
	}{1, asn1.RawValue{Tag: 17, IsCompound: true}, asn1.RawValue{Tag: 16, IsCompound: true}, []signer{one}})
	if err != nil {
		panic(err)
	}
	message, err := asn1.Marshal(struct {
		Type    asn1.ObjectIdentifier
		Content asn1.RawValue
	}{asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}, asn1.RawValue{Class: 2, Tag: 0, IsCompound: true,
		Bytes: data}})
	if err != nil {
		panic(err)
	}
	trailer := make([]byte, 12)
	trailer[2] = 2 // PKCS#7
	binary.BigEndian.PutUint32(trailer[8:], uint32(len(message)))
	return string(message) + string(trailer) + "~Module signature appended~\n"
}

// set returns the modules of a driver in a folder, and the modules.dep of their release.
func set(folder string, k ko, suffix string) files {
	all := files{}
	_, index, _ := strings.Cut(folder, "/"+k.release+"/")
	dep := ""
	for _, name := range []string{"nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"} {
		all[folder+"/"+name+".ko"+suffix] = k.String()
		dep += index + "/" + name + ".ko" + suffix + ":\n"
	}
	if at := strings.Index(folder, "lib/modules/"+k.release); at >= 0 {
		all[folder[:at]+"lib/modules/"+k.release+"/modules.dep"] = "kernel/fs/ext4/ext4.ko: kernel/fs/jbd2/jbd2.ko\n" + dep
	}
	return all
}

// gpu returns a GPU on the PCI bus.
func gpu(number int, device, module string) files {
	folder := fmt.Sprintf("sys/bus/pci/devices/0000:%02x:00.0/", number)
	return files{folder + "vendor": "0x10de\n", folder + "class": "0x030200\n", folder + "device": device + "\n",
		folder + "driver": "-> ../../../bus/pci/drivers/" + module}
}

// runs returns a running kernel with a driver and one GPU.
func runs(release, version, device string, open bool) files {
	line := "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " + version + "  Release Build\n"
	if open {
		line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " + version + "  Release Build\n"
	}
	return files{
		"proc/sys/kernel/osrelease":  release + "\n",
		"proc/driver/nvidia/version": line,
		"proc/modules": "nvidia_uvm 4096 0 - Live 0x0 (OE)\nnvidia_modeset 4096 0 - Live 0x0 (OE)\n" +
			"nvidia 8192 2 nvidia_uvm,nvidia_modeset, Live 0x0 (OE)\next4 4096 1 - Live 0x0\n",
		"sys/module/module/parameters/sig_enforce": "N\n",
		"sys/kernel/security/lockdown":             "[none] integrity confidentiality\n",
		"sys/firmware/acpi/tables/DSDT":            "",
		"sys/class/drm/version":                    "drm 1.1.0 20060810\n",
		"sys/devices/system/node/node0/meminfo":    "Node 0 MemTotal: 1024 kB\n",
		"sys/devices/system/node/node0/cpulist":    "0-63\n",
		"proc/1/comm":                              "systemd\n",
		"proc/1/fd/0":                              "-> /dev/null",
		"proc/1/maps":                              "7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/systemd/systemd\n",
		"usr/bin/bash":                             "",
		"boot/config":                              "",
	}.with(gpu(0x3b, device, "nvidia"))
}

// process returns a process of a node: its open files, and mapped files.
func process(pid int, name, cgroup string, open, mapped []string) files {
	folder := fmt.Sprintf("proc/%d/", pid)
	p := files{folder + "comm": name + "\n", folder + "cgroup": "0::" + cgroup + "\n", folder + "fd/0": "-> /dev/null",
		folder + "maps": "7f00-7f01 r-xp 00000000 fe:00 1 /usr/bin/" + name + "\n"}
	for i, file := range open {
		p[fmt.Sprintf("%sfd/%d", folder, 3+i)] = "-> " + file
	}
	for i, file := range mapped {
		p[folder+"maps"] += fmt.Sprintf("7f%02d-7fff r-xp 00000000 fe:00 1 %s\n", i, file)
	}
	return p
}

// pod returns the cgroup of a container, and the kubelet's logs that name it.
func pod(namespace, name, container, digit string) (cgroup string, logs files) {
	uid := strings.ReplaceAll("88888888-4444-4444-4444-cccccccccccc", "c", digit)
	id := strings.Repeat(digit, 64)
	return "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") +
			".slice/cri-containerd-" + id + ".scope",
		files{"var/log/pods/" + namespace + "_" + name + "_" + uid + "/" + container + "/0.log": "",
			"var/log/containers/" + name + "_" + namespace + "_" + container + "-" + id + ".log": "-> /gone"}
}

// efi is firmware with secure boot on, and a kernel that is locked down by it.
func efi(lockdown string, keys ...string) files {
	text := ""
	for i, key := range keys {
		text += fmt.Sprintf("%08x I------     1 perm 1f030000     0     0 asymmetri %s: 8584b25f8584b25f: "+
			"X509.rsa 8584b25f []\n", i, key)
	}
	return files{
		"sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": "\x06\x00\x00\x00\x01",
		"sys/kernel/security/lockdown": strings.Replace("none "+
			"integrity confidentiality", lockdown, "["+lockdown+"]", 1) + "\n",
		"proc/keys": text,
	}
}

// dpkg returns dpkg's status with installed packages, as "NAME VERSION".
func dpkg(packages ...string) files {
	text := "Package: base-files\nStatus: install ok installed\nVersion: 13\n\n" +
		"Package: nvidia-driver-470\nStatus: deinstall ok config-files\nVersion: 470.1-1\n\n"
	for _, one := range packages {
		name, version, _ := strings.Cut(one, " ")
		text += "Package: " + name + "\nStatus: install ok installed\nArchitecture: amd64\nVersion: " + version + "\n\n"
	}
	return files{"var/lib/dpkg/status": text}
}

// grubMenu returns GRUB's files as grub-mkconfig writes them, with a menu of kernels. The first one
// is also the entry outside of the submenu.
func grubMenu(folder, fallback string, kernels ...string) files {
	entry := func(title, id, release string) string {
		return "menuentry '" + title + "' --class gnu-linux $menuentry_id_option '" + id + "' {\n\tload_video\n\tif [ x$a = xy ]; then insmod gzio; fi\n" +
			"\techo 'Loading Linux'\n\tlinux\t/boot/vmlinuz-" + release + " root=UUID=1 ro quiet\n\tinitrd /boot/initrd.img\n}\n"
	}
	menu := entry("Ubuntu", "gnulinux-simple-1",
		kernels[0]) + "submenu 'Advanced options' $menuentry_id_option 'gnulinux-advanced-1' {\n"
	for _, k := range kernels {
		menu += entry("Ubuntu, with Linux "+k, "gnulinux-"+k+"-advanced-1", k)
	}
	text := "function savedefault {\n  save_env saved_entry\n}\nif [ \"${next_entry}\" ] ; then\n   set default=\"${next_entry}\"\n" +
		"   set next_entry=\n   set boot_once=true\nelse\n   set default=\"" + fallback + "\"\nfi\n" + menu + "}\n"
	return files{folder + "/grub.cfg": text, folder + "/grubenv": "# GRUB Environment Block\n####"}
}

// bls returns an entry of the Boot Loader Specification.
func bls(folder, id, release string) files {
	return files{folder + "/" + id + ".conf": "title Linux (" + release + ")\nversion " + release + "\nlinux " +
		"/vmlinuz-" + release + "\n"}
}
