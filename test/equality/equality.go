// Package equality holds that an Equal method forgets no field: it changes each field of a value,
// one at a time, by reflection. Tests of any package may import it.
package equality

import (
	"fmt"
	"reflect"
	"testing"
	"time"
)

// Check fails for each exported field, of T and of the structs, slices, maps and pointers in it,
// that may differ between two values that are equal. value returns the same value every time; a
// slice, map or pointer that it leaves empty is filled, and not looked into. Fields that do not
// count are named by their paths, such as ".Generation" or ".GPUs[0].Index".
func Check[T any](t *testing.T, value func() T, equal func(a, b T) bool, ignored ...string) {
	t.Helper()
	if !equal(value(), value()) {
		t.Fatalf("%T: two values that are the same are not equal", value())
	}
	skip := map[string]bool{}
	for _, path := range ignored {
		skip[path] = true
	}
	for leaf := 0; ; leaf++ {
		changed := value()
		rest := leaf
		path, found := change(reflect.ValueOf(&changed).Elem(), "", &rest)
		if !found {
			return
		}
		if same := equal(value(), changed) || equal(changed, value()); same != skip[path] {
			t.Errorf("%T: a change of %s is seen: %v", changed, path, !same)
		}
	}
}

// change changes the field that rest others come before, and returns its path.
func change(v reflect.Value, path string, rest *int) (string, bool) {
	mine := func(set func()) (string, bool) {
		if *rest--; *rest >= 0 {
			return "", false
		}
		set()
		return path, true
	}
	if at, is := v.Interface().(time.Time); is {
		return mine(func() { v.Set(reflect.ValueOf(at.Add(time.Second))) })
	}
	switch v.Kind() {
	case reflect.Bool:
		return mine(func() { v.SetBool(!v.Bool()) })
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return mine(func() { v.SetInt(v.Int() + 1) })
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return mine(func() { v.SetUint(v.Uint() + 1) })
	case reflect.Float32, reflect.Float64:
		return mine(func() { v.SetFloat(v.Float() + 1) })
	case reflect.String:
		return mine(func() { v.SetString(v.String() + "+") })
	case reflect.Struct:
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.IsExported() {
				if where, found := change(v.Field(i), path+"."+field.Name, rest); found {
					return where, true
				}
			}
		}
		return "", false
	case reflect.Pointer:
		if v.IsNil() {
			path += " (not nil)"
			return mine(func() { v.Set(reflect.New(v.Type().Elem())) })
		}
		return change(v.Elem(), path, rest)
	case reflect.Slice:
		if v.Len() == 0 {
			path += " (one more)"
			return mine(func() { v.Set(reflect.MakeSlice(v.Type(), 1, 1)) })
		}
		for i := range v.Len() {
			if where, found := change(v.Index(i), fmt.Sprintf("%s[%d]", path, i), rest); found {
				return where, true
			}
		}
		path += " (one less)"
		return mine(func() { v.Set(v.Slice(0, v.Len()-1)) })
	case reflect.Map:
		if v.Len() == 0 {
			path += " (one more)"
		} else {
			path += " (one less)"
		}
		return mine(func() { resize(v) })
	default:
		return "", false
	}
}

// resize takes an entry out of a map, or puts one into an empty map.
func resize(v reflect.Value) {
	if v.Len() > 0 {
		v.SetMapIndex(v.MapKeys()[0], reflect.Value{})
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	v.SetMapIndex(reflect.Zero(v.Type().Key()), reflect.Zero(v.Type().Elem()))
}
