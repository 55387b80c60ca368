package why

import (
	"fmt"
	"slices"
	"strings"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	resourceapi "k8s.io/api/resource/v1"
)

// A reference is a part of a device named in a selector's expression: an attribute or a capacity
// with its domain, or the driver.
type reference struct{ of, domain, name string }

// The kinds of references.
const (
	attributes = "attributes"
	capacities = "capacity"
	driverOf   = "driver"
)

// valuesOf returns the device's values for the references in a selector's expression; empty if it
// has none.
func (a *allocation) valuesOf(expression, driver string, d resourceapi.Device) string {
	named, is := a.named[expression]
	if !is {
		named = references(expression)
		a.named[expression] = named
	}
	var texts []string
	for _, r := range named {
		texts = append(texts, r.value(driver, d))
	}
	return strings.Join(texts, ", ")
}

// value returns the device's value for the reference.
func (r reference) value(driver string, d resourceapi.Device) string {
	names := []resourceapi.QualifiedName{resourceapi.QualifiedName(r.domain + "/" + r.name)}
	if r.domain == driver {
		names = append(names, resourceapi.QualifiedName(r.name))
	}
	for _, name := range names {
		switch r.of {
		case attributes:
			if v, is := d.Attributes[name]; is {
				return r.name + " is " + attributeText(v)
			}
		case capacities:
			if v, is := d.Capacity[name]; is {
				return r.name + " is " + v.Value.String()
			}
		case driverOf:
			return "driver is " + driver
		}
	}
	return fmt.Sprintf("no %s %s/%s", strings.TrimSuffix(r.of, "s"), r.domain, r.name)
}

func attributeText(v resourceapi.DeviceAttribute) string {
	switch {
	case v.StringValue != nil:
		return *v.StringValue
	case v.VersionValue != nil:
		return *v.VersionValue
	case v.IntValue != nil:
		return fmt.Sprint(*v.IntValue)
	case v.BoolValue != nil:
		return fmt.Sprint(*v.BoolValue)
	case v.StringValues != nil:
		return strings.Join(v.StringValues, ", ")
	case v.VersionValues != nil:
		return strings.Join(v.VersionValues, ", ")
	case v.IntValues != nil:
		return fmt.Sprint(v.IntValues)
	}
	return fmt.Sprint(v.BoolValues)
}

// references returns the references in an expression, in the order of their first use.
func references(expression string) (named []reference) {
	env, err := celgo.NewEnv(celgo.OptionalTypes())
	if err != nil {
		return nil
	}
	parsed, issues := env.Parse(expression)
	if issues.Err() != nil {
		return nil
	}
	ast.PreOrderVisit(parsed.NativeRep().Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if r, is := referenceOf(e); is && !slices.Contains(named, r) {
			named = append(named, r)
		}
	}))
	return named
}

// referenceOf returns the reference if an expression is nothing else; otherwise false.
func referenceOf(e ast.Expr) (reference, bool) {
	of, name := selection(e)
	if name == driverOf && isDevice(of) {
		return reference{of: driverOf, name: driverOf}, true
	}
	if of == nil {
		return reference{}, false
	}
	all, domain := selection(of)
	if all == nil {
		return reference{}, false
	}
	device, kind := selection(all)
	if (kind == attributes || kind == capacities) && isDevice(device) {
		return reference{of: kind, domain: domain, name: name}, true
	}
	return reference{}, false
}

func isDevice(e ast.Expr) bool {
	return e != nil && e.Kind() == ast.IdentKind && e.AsIdent() == "device"
}

// selection returns the operand and the field of a field selection: of.name, of["name"], and their
// optional forms; nil for other expressions.
func selection(e ast.Expr) (of ast.Expr, name string) {
	if e == nil {
		return nil, ""
	}
	if e.Kind() == ast.SelectKind {
		return e.AsSelect().Operand(), e.AsSelect().FieldName()
	}
	if e.Kind() != ast.CallKind {
		return nil, ""
	}
	call := e.AsCall()
	switch call.FunctionName() {
	case operators.Index, operators.OptIndex, operators.OptSelect:
	default:
		return nil, ""
	}
	if args := call.Args(); len(args) == 2 && args[1].Kind() == ast.LiteralKind {
		if text, is := args[1].AsLiteral().(types.String); is {
			return args[0], string(text)
		}
	}
	return nil, ""
}
