// Package config merges defaults, the configuration file, environment variables and flags
// into a typed, validated and immutable Config, and watches the file. Later sources override
// earlier sources. Default values, environment variables and YAML have no other home.
//
// Each setting with more than one source is one row of the table in options.go. The package
// checks everything except hardware, and reports all problems at once. The plan checks the
// rest for each node, so that one file can serve many nodes.
package config
