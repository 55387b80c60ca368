package dra_test

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestShared: whole GPUs are given in shares, MIG devices are not. The scheduler can give at most
// so many shares of a GPU, and the whole of it to a claim that asks for no part.
func TestShared(t *testing.T) {
	t.Parallel()
	for _, name := range simulator.Names() {
		s := scan(t, name)
		whole := dra.New(s, "n", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)
		for _, most := range []int{2, 3, 48} {
			shared := whole.Shared(most)
			for i, slice := range shared.Slices {
				for j, d := range slice.Devices {
					memory, least := d.Capacity["memory"], d.SmallestShare
					switch kind := d.Attributes["type"].Value; {
					case kind == "mig" && least != 0, kind == "gpu" && (least <= 0) != (memory == 0):
						t.Errorf("%s, %s of %d bytes has a smallest share of %d", name, d.Name, memory, least)
					case least > 0 && (least*dra.Capacity(most) > memory || least*dra.Capacity(most+1) <= memory ||
						least%(1<<20) != 0):
						t.Errorf("%s, %s of %d bytes has not %d shares of %d", name, d.Name, memory, most, least)
					}
					if whole.Slices[i].Devices[j].SmallestShare != 0 {
						t.Fatal("the pool was changed in its place")
					}
				}
				if slice.Equal(whole.Slices[i]) != !slice.Shared() {
					t.Errorf("%s: a slice is equal to one without shares", name)
				}
				text, err := json.Marshal(slice)
				var back dra.Slice
				if err == nil {
					err = json.Unmarshal(text, &back)
				}
				if err != nil || !back.Equal(slice) {
					t.Errorf("%s: %v; %s is read as %+v", name, err, text, back)
				}
			}
			if back := shared.Unshared(); !back.Slices[0].Equal(whole.Slices[0]) {
				t.Errorf("%s: %+v without shares", name, back)
			}
		}
		if !whole.Shared(0).Slices[0].Equal(whole.Slices[0]) {
			t.Errorf("%s is given in shares by default", name)
		}
	}
}

// TestSharesOfOthers: a device whose rules of shares are not those of this driver is another
// device.
func TestSharesOfOthers(t *testing.T) {
	t.Parallel()
	const ours = `{"name":"gpu-0","attributes":{},"allowMultipleAllocations":true,` +
		`"capacity":{"memory":{"value":"80Gi",` +
		`"requestPolicy":{"default":"80Gi","validRange":{"min":"20Gi","step":"1Mi"}}}}}`
	var want dra.Device
	if err := json.Unmarshal([]byte(ours), &want); err != nil || want.SmallestShare != 20<<30 {
		t.Fatalf("%+v, %v", want, err)
	}
	for _, change := range [][2]string{
		{`"min":"20Gi"`, `"min":"10Gi"`},
		{`"step":"1Mi"`, `"step":"2Mi"`},
		{`"default":"80Gi"`, `"default":"40Gi"`},
		{`"allowMultipleAllocations":true,`, ``},
		{`,"requestPolicy":{"default":"80Gi","validRange":{"min":"20Gi","step":"1Mi"}}`, ``},
		{`"memory":{`, `"other":{"value":"1","requestPolicy":{"default":"1"}},"memory":{`},
	} {
		var d dra.Device
		err := json.Unmarshal([]byte(strings.Replace(ours, change[0], change[1], 1)), &d)
		delete(d.Capacity, "other")
		if err != nil || d.Equal(want) || d.SmallestShare == 0 {
			t.Errorf("with %s for %s: %v, smallest share %d", change[1], change[0], err, d.SmallestShare)
		}
	}
}

// TestShareOfAResult: a claim has a part of a device only if the allocation says how much.
func TestShareOfAResult(t *testing.T) {
	t.Parallel()
	device := func(kind string) dra.Device {
		return dra.Device{
			Attributes: map[string]dra.Attribute{"type": {Type: dra.String,
				Value: kind}}, Capacity: map[string]dra.Capacity{"memory": 80<<30 + 5},
		}
	}
	for _, tt := range []struct {
		kind, id, consumed string
		want               int64
	}{
		{"gpu", "a", "20Gi", 20 << 30}, {"gpu", "a", "1Mi", 1 << 20}, {"gpu", "a", "80Gi", 0}, {"gpu", "a", "90Gi",
			0}, {"gpu", "a", "90E", 0},
		{"gpu", "a", "", 0}, {"gpu", "a", "much", 0}, {"gpu", "", "20Gi", 0},
		{"gpu", "a", "0", 0}, {"gpu", "a", "-20Gi", 0}, {"gpu", "a", "1023Ki", 0}, {"mig", "a", "20Gi", 0},
	} {
		r := dra.Result{ShareID: tt.id, ConsumedCapacity: map[string]string{"memory": tt.consumed}}
		if got := r.Share(device(tt.kind)); got != tt.want {
			t.Errorf("%+v of a %s is %d bytes", r, tt.kind, got)
		}
	}
}

// TestSharedBy: by count and without a limit GPUs and MIG devices are given in shares, and read
// back as they are written. Without shares they are what they were.
func TestSharedBy(t *testing.T) {
	t.Parallel()
	for _, name := range simulator.Names() {
		s := scan(t, name)
		whole := dra.New(s, "n", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)
		for by, most := range map[dra.ShareBy]int{dra.ByCount: 4, dra.Unlimited: 0} {
			shared := whole.SharedBy(by, most)
			back := shared.Unshared()
			for i, slice := range shared.Slices {
				for j, d := range slice.Devices {
					if d.SharedBy != by || d.Attributes[dra.SharedAttribute].Value != string(by) ||
						d.Capacity[dra.SharesCapacity] != dra.Capacity(most) ||
						len(d.Attributes)+len(d.Capacity) > 32 {
						t.Errorf("%s, %s: %+v", name, by, d)
					}
					if was, is := whole.Slices[i].Devices[j], back.Slices[i].Devices[j]; !maps.Equal(was.Attributes,
						is.Attributes) || is.SharedBy != "" {
						t.Errorf("%s, %s: %+v without shares, and %+v before", name, by, is, was)
					}
				}
				text, err := json.Marshal(slice)
				var read dra.Slice
				if err == nil {
					err = json.Unmarshal(text, &read)
				}
				if err != nil || !read.Equal(slice) || len(slice.Devices) > 0 && read.Equal(whole.Slices[i]) {
					t.Errorf("%s, %s: %v; %s is read as %+v", name, by, err, text, read)
				}
				dropped := strings.ReplaceAll(string(text), `"allowMultipleAllocations":true,`, "")
				if err := json.Unmarshal([]byte(dropped), &read); err != nil || len(slice.Devices) > 0 &&
					read.Equal(slice) {
					t.Errorf("%s, %s: a slice without that devices are shared is the same: %v", name, by, err)
				}
			}
		}
		if !whole.SharedBy(dra.ByCount, 0).Slices[0].Equal(whole.Slices[0]) {
			t.Errorf("%s is given in shares by default", name)
		}
	}
}
