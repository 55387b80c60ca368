package resource_test

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestPattern(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern resource.Pattern
		text    string
		want    bool
	}{
		{"", "", true},
		{"", "a", false},
		{"*", "", true},
		{"*", "abc", true},
		{"abc", "abc", true},
		{"abc", "abcd", false},
		{"abc", "xabc", false},
		{"*H100*", "NVIDIA H100 80GB HBM3", true},
		{"*H100*", "NVIDIA A100-SXM4-80GB", false},
		{"NVIDIA*HBM3", "NVIDIA H100 80GB HBM3", true},
		{"NVIDIA*HBM2", "NVIDIA H100 80GB HBM3", false},
		{"a*b*c", "a-b-b-c", true},
		{"a*b*c", "a-c-b", false},
		{"ab*ba", "aba", false},
		{"a**c", "ac", true},
		{"*a*a*", "a", false},
		{"1g.10gb", "1gx10gb", false},
	} {
		if got := tt.pattern.Match(tt.text); got != tt.want {
			t.Errorf("%q matches %q: %v, want %v", tt.pattern, tt.text, got, tt.want)
		}
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	ref := func(s string) (string, error) { r, err := resource.ParseRef(s); return string(r), err }
	for _, tt := range []struct {
		what  string
		parse func(string) (string, error)
		text  string
		want  string // empty if it is refused
	}{
		{"name", resource.ParseName, "gpu", "nvidia.com/gpu"},
		{"name", resource.ParseName, "nvidia.com/gpu", "nvidia.com/gpu"},
		{"name", resource.ParseName, "mig-1g.10gb.me", "nvidia.com/mig-1g.10gb.me"},
		{"name", resource.ParseName, strings.Repeat("g", 52), "nvidia.com/" + strings.Repeat("g", 52)},
		{"name", resource.ParseName, strings.Repeat("g", 53), ""},
		{"name", resource.ParseName, "", ""},
		{"name", resource.ParseName, "nvidia.com/", ""},
		{"name", resource.ParseName, "amd.com/gpu", ""},
		{"name", resource.ParseName, "-gpu", ""},
		{"name", resource.ParseName, "gpu+me", ""},
		{"name", resource.ParseName, "123", "nvidia.com/123"},
		{"name", resource.ParseName, "GPU", ""},
		{"name", resource.ParseName, "gpu_shared", ""},
		{"name", resource.ParseName, "gpu..a", ""},
		{"name", resource.ParseName, "gpu.-a", ""},
		{"name", resource.ParseName, "a/b", ""},
		{"ref", ref, "0", "0"},
		{"ref", ref, "12:3", "12:3"},
		{"ref", ref, "GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30", "GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30"},
		{"ref", ref, "MIG-GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30/1/0", "MIG-GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30/1/0"},
		{"ref", ref, "MIG-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30", "MIG-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30"},
		{"ref", ref, "GPU-UUID", ""},
		{"ref", ref, "MIG-GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30", ""},
		{"ref", ref, "GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30/1/0", ""},
		{"ref", ref, "-1", ""},
		{"ref", ref, "0:", ""},
		{"ref", ref, "all", ""},
		{"ref", ref, "", ""},
		{"PCI address", resource.ParsePCI, "0000:1b:00.0", "0000:1b:00.0"},
		{"PCI address", resource.ParsePCI, "00000000:1B:00.0", "0000:1b:00.0"},
		{"PCI address", resource.ParsePCI, "00010000:1b:00.0", "10000:1b:00.0"},
		{"PCI address", resource.ParsePCI, "1b:00.0", "0000:1b:00.0"},
		{"PCI address", resource.ParsePCI, "1b:00", ""},
		{"PCI address", resource.ParsePCI, "zz:00.0", ""},
	} {
		got, err := tt.parse(tt.text)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("%s %q: %q, %v; want %q", tt.what, tt.text, got, err, tt.want)
		}
	}
}

func TestMeets(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		a, b resource.Pattern
		want bool
	}{
		{"", "", true},
		{"", "*", true},
		{"", "a", false},
		{"a", "a", true},
		{"a", "b", false},
		{"*", "anything", true},
		{"*H100*", "*80GB*", true},
		{"NVIDIA H100*", "NVIDIA A100*", false},
		{"*H100", "*A100", false},
		{"*a*", "b*b", true},
		{"a*b", "ab", true},
		{"a*c", "a*b*d", false},
		{"a*", "*a", true},
	} {
		if got := tt.a.Meets(tt.b); got != tt.want {
			t.Errorf("%q meets %q: %v, want %v", tt.a, tt.b, got, tt.want)
		}
		if got := tt.b.Meets(tt.a); got != tt.want {
			t.Errorf("%q meets %q: %v, want %v", tt.b, tt.a, got, tt.want)
		}
	}
}

func FuzzMeets(f *testing.F) {
	f.Add("NVIDIA*H100*", "*A*", "NVIDIA A H100")
	f.Fuzz(func(t *testing.T, a, b, text string) {
		p, q := resource.Pattern(a), resource.Pattern(b)
		if p.Match(text) && q.Match(text) && !p.Meets(q) {
			t.Errorf("%q matches %q and %q, which do not meet", text, a, b)
		}
	})
}

// What this program may have offered is told from a file of kubelet's, and the name of a resource
// becomes that of a socket.
func TestMayBeOurs(t *testing.T) {
	t.Parallel()
	const uuid = "0a1b2c3d-0000-1111-2222-333344445555"
	for _, test := range []struct {
		name, id string
		want     bool
	}{
		{"nvidia.com/gpu", "GPU-" + uuid, true},
		{"nvidia.com/gpu.shared", "GPU-" + uuid + "::17", true},
		{"nvidia.com/mig-1g.10gb.me", "MIG-" + uuid, true},
		{"nvidia.com/renamed", "MIG-GPU-" + uuid + "/7/0::1", true},
		{"nvidia.com/gpu", "GPU-" + uuid + "-3", false},
		{"nvidia.com/gpu", "GPU-" + uuid + "::", false},
		{"nvidia.com/gpu", "xGPU-" + uuid, false},
		{"nvidia.com/gpu", uuid, false},
		{"nvidia.com/gpu", "GPU-" + uuid + "0", false},
		{"nvidia.com/gpu", "0000:3b:00.2", false},
		{"nvidia.com/gpu", "nvidia0", false},
		{"nvidia.com/gpu", "", false},
		{"gpu", "GPU-" + uuid, false},
		{"example.com/gpu", "GPU-" + uuid, false},
		{"nvidia.com/", "GPU-" + uuid, false},
		{"nvidia.com/../../x", "GPU-" + uuid, false},
		{"nvidia.com/gpu\n", "GPU-" + uuid, false},
		{"nvidia.com/" + strings.Repeat("x", 60), "GPU-" + uuid, false},
	} {
		if got := resource.MayBeOurs(test.name, test.id); got != test.want {
			t.Errorf("MayBeOurs(%q, %q) = %v, want %v", test.name, test.id, got, test.want)
		}
	}
}
