// Package config merges defaults, the configuration file, environment variables and flags
// into a typed, validated and immutable Config, and watches the file. Later sources override
// earlier sources. The daemon's default values, environment variables and YAML have no other home;
// other commands read their own flags.
//
// Each setting with more than one source is one row of a table: in options.go, features.go, rollout.go,
// mig.go or dra.go, joined in options.go. In a row, fallback is the default, and set checks the text
// and fills a field of Config. The packages that read the field give it its effect: a field of Startup
// once, and a field of Live after each change. The package checks everything except hardware, and
// reports all problems at once. The plan checks the rest for each node, so that one file can serve
// many nodes.
package config
