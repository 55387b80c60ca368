package driverfacts

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// An entry is an entry of a boot menu.
type entry struct {
	// names are the names by which the loader's configuration may choose the entry.
	names   []string
	kernel  string // path of the kernel's file
	version string // of a BLS entry
}

// nextBoot returns the kernel of the next boot. It is an error if the files of the boot loader do
// not decide it.
func nextBoot(host, kernel root) (preflight.NextBoot, error) {
	if host.Exists("run/ostree/staged-deployment") {
		return preflight.NextBoot{}, errors.New("ostree has a staged deployment, whose entry is only written at " +
			"the shutdown")
	}
	for _, loader := range []func(host, kernel root) (preflight.NextBoot, error){systemdBoot, grub, imageLink} {
		next, err := loader(host, kernel)
		if err == nil || !errors.Is(err, errOtherLoader) {
			return next, err
		}
	}
	return preflight.NextBoot{}, errors.New("no configuration of GRUB or systemd-boot is in /boot, and no link vmlinuz")
}

// errOtherLoader says that a boot loader is not in use.
var errOtherLoader = errors.New("other loader")

// bootOf returns the kernel of an entry.
func bootOf(e entry, source string) (preflight.NextBoot, error) {
	release := releaseOf(e.kernel)
	if release == "" {
		return preflight.NextBoot{}, fmt.Errorf("the file name %q of the kernel in %s has no release", e.kernel, source)
	}
	return preflight.NextBoot{Release: release, Source: source}, nil
}

// releaseOf returns the release in the name of a kernel's file: vmlinuz-6.8.0-51-generic. It is
// empty if the name has none.
func releaseOf(file string) string {
	base := path.Base(file)
	for _, stem := range []string{"vmlinuz-", "vmlinux-", "Image-", "kernel-"} {
		if release, ok := strings.CutPrefix(base, stem); ok && release != "" && release[0] >= '0' && release[0] <= '9' {
			return release
		}
	}
	if base == "linux" { // systemd: /MACHINE-ID/RELEASE/linux
		if release := path.Base(path.Dir(file)); release[0] >= '0' && release[0] <= '9' && strings.Contains(release,
			".") {
			return release
		}
	}
	return ""
}

// grubEnvironment returns the variables of GRUB's environment block, and its path.
func grubEnvironment(host root) (map[string]string, string) {
	candidates := []string{"boot/grub2/grubenv", "boot/grub/grubenv"}
	systems, _ := host.List("boot/efi/EFI")
	for _, name := range systems {
		candidates = append(candidates, "boot/efi/EFI/"+name+"/grubenv")
	}
	for _, file := range candidates {
		text, err := host.Read(file)
		if err != nil {
			continue
		}
		values := map[string]string{}
		for line := range strings.Lines(string(text)) {
			if key, value, ok := strings.Cut(strings.TrimRight(line, "\n"), "="); ok && !strings.HasPrefix(line, "#") {
				values[key] = value
			}
		}
		return values, "/" + file
	}
	return map[string]string{}, ""
}

// grub decides by GRUB's configuration: an entry for the next boot only, the saved entry, or the
// configured default.
func grub(host, _ root) (preflight.NextBoot, error) {
	file, text := "", ""
	candidates := []string{"boot/grub/grub.cfg", "boot/grub2/grub.cfg"}
	systems, _ := host.List("boot/efi/EFI")
	for _, name := range systems {
		candidates = append(candidates, "boot/efi/EFI/"+name+"/grub.cfg")
	}
	var unread error
	for _, candidate := range candidates {
		content, err := host.Read(candidate)
		if err == nil && strings.Contains(string(content), "set default=") {
			file, text = candidate, string(content)
			break
		}
		if err != nil && host.Exists(candidate) {
			unread = err
		}
	}
	if file == "" {
		if unread != nil {
			return preflight.NextBoot{}, unread
		}
		return preflight.NextBoot{}, errOtherLoader
	}
	environment, block := grubEnvironment(host)
	source := "/" + file
	chosen, saved := grubDefault(text), false
	if next := environment["next_entry"]; next != "" {
		chosen, source = next, block+": next_entry"
	} else if strings.Contains(chosen, "saved_entry") {
		if chosen, saved = environment["saved_entry"], true; block != "" {
			source = block + ": saved_entry"
		}
	}
	entries := grubEntries(text)
	if strings.Contains(text, "blscfg") {
		bls, err := blsEntries(host, "boot/loader/entries")
		if err != nil {
			return preflight.NextBoot{}, err
		}
		for i := range bls {
			bls[i].names = append(bls[i].names, strconv.Itoa(i))
		}
		entries = append(bls, entries...)
	}
	if len(entries) == 0 {
		return preflight.NextBoot{}, fmt.Errorf("/%s has no entry with a kernel", file)
	}
	if chosen == "" && saved {
		chosen = "0" // GRUB starts the first entry if none is saved
	}
	if strings.ContainsRune(chosen, '$') {
		return preflight.NextBoot{}, fmt.Errorf("the default %q in /%s is a variable", chosen, file)
	}
	i := slices.IndexFunc(entries, func(e entry) bool { return slices.Contains(e.names, chosen) })
	if i < 0 {
		return preflight.NextBoot{}, fmt.Errorf("no entry of the boot menu is %q, as %s wants", chosen, source)
	}
	return bootOf(entries[i], source)
}

// grubDefault returns the value of the last unconditional default in a configuration. The files that
// grub-mkconfig writes set the default in this order: the next entry, and otherwise that of
// GRUB_DEFAULT.
func grubDefault(text string) string {
	value := "0"
	for line := range strings.Lines(text) {
		if set, ok := strings.CutPrefix(strings.TrimSpace(line), "set default="); ok {
			set = strings.Trim(set, `"'`)
			if !strings.Contains(set, "next_entry") && !strings.Contains(set, "prev_entry") {
				value = set
			}
		}
	}
	return value
}

// maxMenu limits the entries of a boot menu.
const maxMenu = 512

// grubEntries returns the entries with a kernel in a configuration of GRUB.
func grubEntries(text string) (entries []entry) {
	type level struct {
		entry bool
		names []string // of the submenu or entry
		next  int      // index of the next entry in the submenu
	}
	stack := []level{{}}
	var kernel string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		top := &stack[len(stack)-1]
		switch {
		case len(entries) > maxMenu, len(stack) > 16:
			return entries
		case strings.HasPrefix(line, "menuentry ") || strings.HasPrefix(line, "submenu "):
			own := append(quoted(line), strconv.Itoa(top.next))
			top.next++
			if len(stack) > 1 && len(top.names) > 0 {
				var full []string
				for _, outer := range top.names {
					for _, name := range own {
						full = append(full, outer+">"+name)
					}
				}
				own = full
			}
			kernel = ""
			stack = append(stack, level{entry: strings.HasPrefix(line, "menuentry "), names: own})
		case strings.HasPrefix(line, "linux ") || strings.HasPrefix(line, "linux\t") || strings.HasPrefix(line,
			"linuxefi "),
			strings.HasPrefix(line, "linux16 "):
			if words := strings.Fields(line); len(words) > 1 && kernel == "" {
				kernel = words[1]
			}
		case line == "}" && len(stack) > 1:
			if top.entry && kernel != "" {
				entries = append(entries, entry{names: top.names, kernel: kernel})
			}
			kernel = ""
			stack = stack[:len(stack)-1]
		}
	}
	return entries
}

// quoted returns the title and the ID of a menuentry: its first word in quotes, and the word after
// --id or $menuentry_id_option.
func quoted(line string) (names []string) {
	word := func(text string) string {
		text = strings.TrimSpace(text)
		if text == "" || text[0] != '\'' && text[0] != '"' {
			first, _, _ := strings.Cut(text, " ")
			return first
		}
		inner, _, _ := strings.Cut(text[1:], text[:1])
		return inner
	}
	_, rest, _ := strings.Cut(line, " ")
	names = append(names, word(rest))
	for _, option := range []string{"$menuentry_id_option ", "--id "} {
		if _, id, ok := strings.Cut(line, option); ok {
			names = append(names, word(id))
		}
	}
	return names
}

// blsEntries returns the entries of a folder in the order of the menu: the newest version first.
func blsEntries(host root, folder string) ([]entry, error) {
	names, err := host.List(folder)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(names, func(a, b string) int {
		return compareVersions(strings.TrimSuffix(b, ".conf"), strings.TrimSuffix(a, ".conf"))
	})
	var entries []entry
	for _, name := range names {
		id, ok := strings.CutSuffix(name, ".conf")
		if !ok || len(entries) >= maxMenu {
			continue
		}
		text, err := host.Read(folder + "/" + name)
		if err != nil {
			return nil, err // its place in the order is not known
		}
		e := entry{names: []string{id, name}}
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(strings.TrimSpace(strings.ReplaceAll(line, "\t", " ")), " ")
			switch value = strings.TrimSpace(value); key {
			case "title":
				e.names = append(e.names, value)
			case "linux":
				e.kernel = value
			case "version":
				e.version = value
			}
		}
		if e.kernel != "" {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// compareVersions compares texts as rpm does: digits as numbers, and letters as texts.
func compareVersions(a, b string) int {
	kind := func(c byte) int {
		switch {
		case c >= '0' && c <= '9':
			return 2
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
			return 1
		}
		return 0
	}
	part := func(text string) (first, rest string) {
		for text != "" && kind(text[0]) == 0 {
			text = text[1:]
		}
		i := 0
		for i < len(text) && kind(text[i]) == kind(text[0]) {
			i++
		}
		return text[:i], text[i:]
	}
	for {
		var one, other string
		one, a = part(a)
		other, b = part(b)
		if one == "" || other == "" {
			return cmp.Compare(len(one), len(other))
		}
		if kind(one[0]) != kind(other[0]) {
			return cmp.Compare(kind(one[0]), kind(other[0]))
		}
		if kind(one[0]) == 2 {
			one, other = strings.TrimLeft(one, "0"), strings.TrimLeft(other, "0")
			if len(one) != len(other) {
				return cmp.Compare(len(one), len(other))
			}
		}
		if one != other {
			return cmp.Compare(one, other)
		}
	}
}

// loaderVariables are the variables in which systemd-boot keeps the entry for the next boot only,
// and the entry that an operator chose as the default.
var loaderVariables = []string{"LoaderEntryOneShot", "LoaderEntryDefault"}

// systemdBoot decides by the configuration of systemd-boot.
func systemdBoot(host, kernel root) (preflight.NextBoot, error) {
	for _, folder := range []string{"boot", "efi", "boot/efi"} {
		file := folder + "/loader/loader.conf"
		if !host.Exists(file) {
			continue
		}
		text, err := host.Read(file)
		if err != nil {
			return preflight.NextBoot{}, err
		}
		if host.Exists("boot/grub/grub.cfg") || host.Exists("boot/grub2/grub.cfg") {
			return preflight.NextBoot{}, fmt.Errorf("both GRUB and systemd-boot (/%s) are configured", file)
		}
		entries, err := blsEntries(host, folder+"/loader/entries")
		if err != nil {
			return preflight.NextBoot{}, err
		}
		if unified, _ := host.List(folder + "/EFI/Linux"); len(unified) > 0 {
			return preflight.NextBoot{}, fmt.Errorf("/%s/EFI/Linux has unified kernel images, which are not read",
				folder)
		}
		pattern, source := "", "/"+file
		for line := range strings.Lines(string(text)) {
			if words := strings.Fields(line); len(words) == 2 && words[0] == "default" {
				pattern = words[1]
			}
		}
		for _, name := range loaderVariables {
			if value := efiText(kernel, name); value != "" {
				pattern, source = value, "EFI variable "+name
				break
			}
		}
		matching := slices.DeleteFunc(slices.Clone(entries), func(e entry) bool {
			for _, name := range e.names[:2] {
				if ok, err := path.Match(pattern, name); ok && err == nil {
					return false
				}
			}
			return true
		})
		if pattern == "" {
			matching = entries
		}
		if len(matching) == 0 {
			return preflight.NextBoot{}, fmt.Errorf("no entry matches the default %q of %s", pattern, source)
		}
		releases := map[string]bool{}
		for _, e := range matching {
			releases[releaseOf(e.kernel)] = true
		}
		if len(releases) > 1 {
			return preflight.NextBoot{}, fmt.Errorf("several entries match the default %q of %s", pattern, source)
		}
		return bootOf(matching[0], source)
	}
	return preflight.NextBoot{}, errOtherLoader
}

// efiText returns a variable of the boot loader; empty if it does not exist.
func efiText(kernel root, name string) string {
	value, err := kernel.Read("sys/firmware/efi/efivars/" + name + "-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f")
	if err != nil || len(value) < 6 || len(value) > 1024 {
		return ""
	}
	var units []uint16
	for text := value[4:]; len(text) > 1; text = text[2:] { // four bytes of attributes
		units = append(units, uint16(text[0])|uint16(text[1])<<8)
	}
	return strings.TrimRight(string(utf16.Decode(units)), "\x00")
}

// imageLink decides by the link that Debian's and Ubuntu's packages keep for boot loaders without a
// menu.
func imageLink(host, _ root) (preflight.NextBoot, error) {
	for _, link := range []string{"boot/vmlinuz", "vmlinuz"} {
		if target, err := host.Link(link); err == nil {
			return bootOf(entry{kernel: target}, "/"+link)
		}
	}
	return preflight.NextBoot{}, errOtherLoader
}
