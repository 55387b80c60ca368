// Package config merges defaults, the configuration file, environment variables and flags into one
// typed, validated and immutable Config, and watches the file. Later sources override earlier ones.
// It is the only home of default values, environment variables and YAML.
//
// Each setting with more than one source is one row of the table in options.go. The package checks
// everything that needs no hardware, and reports all problems at once. The plan checks what depends
// on the node, so that one file can serve many nodes.
package config
