//go:build !race

package daemon

var buildFlags []string
